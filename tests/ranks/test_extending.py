"""The two files that docs/development/extending.md shows are enough: once in place they are proven like the others."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, read_rows

PAGE = (ROOT / "docs" / "development" / "extending.md").read_text()

SMALL = ("train.global_batch=8", "train.micro_batch=1", "train.seq_len=32", "train.steps=1", "train.warmup_steps=2")


def block(language: str) -> str:
    match = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert match is not None
    return match[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project with both files in place."""
    root = tmp_path_factory.mktemp("extended")
    for folder in ("harness", "conf", "sweeps"):
        shutil.copytree(ROOT / folder, root / folder)  # with compiled modules, which save seconds
    (root / "conf" / "strategy" / "wide_pipeline.yaml").write_text(block("yaml"))
    (root / "harness" / "engines" / "by_hand.py").write_text(block("python"))
    return root


def statuses(clone: Path, name: str, *overrides: str) -> list[tuple[str, str]]:
    command = [sys.executable, "-m", "harness", "-m", f"name={name}", *overrides, *SMALL, "tracking=none"]
    subprocess.run(command, cwd=clone, check=False, timeout=600, capture_output=True)
    rows = read_rows(clone / "results", name)
    return list(zip(rows.status, rows.reason.astype(object).fillna(""), strict=True))


@pytest.mark.long
def test_a_strategy_is_added_by_one_yaml_file(clone: Path) -> None:
    assert statuses(clone, "yaml", "strategy=wide_pipeline", "world_size=4") == [("ok", "")]


@pytest.mark.long
def test_an_engine_is_added_by_one_file(clone: Path) -> None:
    by_hand = ("strategy=ddp", "strategy.engine=by_hand", "strategy.data_parallel=none", "world_size=2")
    assert statuses(clone, "engine", *by_hand, "precision=fp32,bf16_mixed") == [("ok", "")] * 2
    ((status, reason),) = statuses(clone, "refused", *by_hand, "strategy.tp=2", "world_size=4")
    assert status == "refused" and reason.startswith("strategy.engine=by_hand replicates")


@pytest.mark.long
def test_an_engine_that_leaves_something_out_is_an_error(clone: Path) -> None:
    engine = clone / "harness" / "engines" / "by_hand.py"
    whole = engine.read_text()
    engine.write_text(whole.replace("dist.all_reduce(parameter.grad)", "pass"))
    by_hand = ("strategy=ddp", "strategy.engine=by_hand", "strategy.data_parallel=none", "world_size=2")
    ((status, reason),) = statuses(clone, "spoiled", *by_hand)
    engine.write_text(whole)
    assert status == "error" and "sent 0 bytes a step along dp_replicate" in reason
