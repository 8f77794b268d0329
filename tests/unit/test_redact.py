"""What is hidden as a secret, and what is not: no value of the project's own records, and no term of the field."""

import base64
import csv
import json
import random
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.sweep.display import ProgressDisplay
from harness.sweep.jobs.executor import JobExecutor
from harness.util.redact import keys_holding_secrets, redacted
from harness.util.text import UserError
from tests.support.commands import ROOT

BASE62 = string.ascii_letters + string.digits

HASHED = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def drawn(length: int, alphabet: str = BASE62) -> st.SearchStrategy[str]:
    """Return texts that are neither a word nor a number, which are not taken for secrets."""
    texts = st.text(alphabet, min_size=length, max_size=length)
    return texts.filter(lambda text: text[0].isalpha() and any(character.isdigit() for character in text))


def part_of_token(values: dict[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


# Keys as their issuers make them: {} is the random part.
KEYS = {
    "hf_{}": drawn(34),
    "sk-{}": drawn(48),
    "sk-proj-{}": drawn(60, BASE62 + "-_"),
    "sk-ant-api03-{}": drawn(90, BASE62 + "-_"),
    "ghp_{}": drawn(36),
    "github_pat_{}": drawn(82, BASE62 + "_"),
    "glpat-{}": drawn(20, BASE62 + "-_"),
    "xoxb-123456789012-1234567890123-{}": drawn(24),
    "AKIA{}": drawn(16, string.ascii_uppercase + string.digits),
    "nvapi-{}": drawn(64, BASE62 + "-_"),
    "wandb_v1_{}": drawn(70, BASE62 + "_"),
    f"{part_of_token({'alg': 'HS256'})}.{part_of_token({'sub': 'me'})}.{{}}": drawn(43, BASE62 + "-_"),
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n{}\n-----END RSA PRIVATE KEY-----": drawn(64, BASE62 + "+/"),
    "https://me:{}@host/x": drawn(8, BASE62 + "/!+"),
    "https://{}@host:80/x": drawn(20),
    "https://host/x?a=b&token={}#top": drawn(6),
    "s3://host/x?X-Amz-Signature={}": drawn(64, "0123456789abcdef"),
    "curl --api-token {} now": drawn(8),
    "Authorization: Bearer {}": drawn(12),
    '{{"clientSecret": "{}"}}': drawn(12),
    "MY_PASS={}": drawn(8),
}


@given(data=st.data(), form=st.sampled_from(sorted(KEYS)), frame=st.sampled_from(["{}", "failed: {} (x)", "'{}'"]))
def test_what_looks_like_a_key_is_hidden(data: st.DataObject, form: str, frame: str) -> None:
    """It is hidden in a text of a library, under any key of a record, and again in what was redacted."""
    part = data.draw(KEYS[form])
    text = frame.format(form.format(part))
    hidden = redacted({"reason": [text]})
    assert part not in hidden["reason"][0] and "[secret]" in hidden["reason"][0]
    assert redacted(hidden) == hidden and keys_holding_secrets({"a": {"b": text}}) == ["a.b"]


def test_long_random_words_are_hidden() -> None:
    """Nine of ten are told from names by their mixture of kinds alone."""
    draw = random.Random(1).choices
    words = ["".join(draw(BASE62, k=length)) for length in (36, 40, 64) for _ in range(200)]
    assert sum(redacted(f"x {word}") == "x [secret]" for word in words) > 0.9 * len(words)


NAMES = ("DB_PASS", "GITHUB_PAT", "REGISTRY_AUTH", "MY_PRIVATE_KEY", "HF_TOKEN2", "AWS_CREDENTIALS", "dbPassword")

HARMLESS_NAMES = ("PATH", "MY_PATTERN", "AUTHOR", "PASSES", "TOKENIZER", "MONKEY", "PWD", "HF_TOKEN_PATH", "num_tokens")


@pytest.mark.parametrize("value", ["hunter2", "p@ssword", "a-much-longer-word", "/begins/with-a-slash"])
@pytest.mark.parametrize("name", (*NAMES, *HARMLESS_NAMES))
def test_a_value_is_a_secret_by_the_words_of_its_name(name: str, value: str) -> None:
    """It is one as a variable of the environment, and as a key of a record or of the configuration."""
    text = f"no {value}, x{value}x"
    with mock.patch.dict("os.environ", {name: value}):
        shown = redacted({"reason": text})["reason"]
    if name in NAMES:
        assert shown.startswith("no [secret],") and redacted({name: value}) == {name: "[secret]"}
        assert ("x[secret]x" in shown) == (len(value) >= 12)
    else:
        assert shown == text and redacted({name: value}) == {name: value}


def test_paths_and_common_values_are_no_secrets(tmp_path: Path) -> None:
    for value in (str(tmp_path), "false", "disabled", "ddp", "4096", "12.5GiB"):
        with mock.patch.dict("os.environ", {"A_TOKEN": value, "A_PASS": value}):
            assert redacted({"A_PASS": value, "reason": f"at {value}"}) == {"A_PASS": value, "reason": f"at {value}"}


def published() -> Iterator[tuple[str, Any]]:
    """Yield the files that git has of the project's own records and of others' figures, as plain values."""
    listed = subprocess.run(
        ["git", "ls-files", "results", "tests/data", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix == ".csv":
            with path.open(newline="") as file:
                yield name, list(csv.DictReader(file))
        elif path.suffix == ".md":
            yield name, path.read_text().splitlines()
        elif path.suffix == ".json" and name != "results/behavior.json":  # which has pages of reports
            yield name, json.loads(path.read_text())


def test_nothing_that_is_published_is_hidden() -> None:
    files = dict(published())
    assert len(files) > 60 and sum(name.startswith("results/published/") for name in files) > 30
    changed = [name for name, values in files.items() if redacted(values) != values]
    assert not changed


@pytest.mark.parametrize(
    "text",
    [
        f"commit {HASHED[:40]}, sha256 {HASHED}, zero3_tuned-every_n-7b-w8-{HASHED[:10]}",
        "GPU-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f and MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
        "Qwen/Qwen3-Next-80B-A3B-Instruct, meta-llama/Meta-Llama-3-8B, Qwen3OmniMoeTalkerTextSparseMoeBlock",
        "_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEEPNS0_4NodeERNS0_11InputBufferE",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN, sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "tokens=131072, bytes per token: 1.25e+05, pass: backward, token_ids = torch.argsort(x.view(-1))",
        "tcp://10.0.0.1:29500/x@y, ssh://git@github.com/a/b, http://[fe80::1]:80/a@b, https://host?model=7b&keyword=a1b2",
    ],
    ids=lambda text: text[:12],
)
def test_terms_of_the_field_are_not_hidden(text: str) -> None:
    assert redacted({"author": text, "path": text}) == {"author": text, "path": text}


def test_a_batch_script_stores_no_secret() -> None:
    setup = ["export HF_TOKEN=hf_aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3f"]
    with pytest.raises(UserError, match=r"^hydra\.launcher\.setup holds a secret.*set it in the environment"):
        JobExecutor({"kind": "slurm", "setup": setup}, ProgressDisplay())
