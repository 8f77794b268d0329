"""Mistakes on the command line: each is answered by one line that says what to type, and what it says is right."""

import re
import shlex

import pytest

from harness.cli.main import main
from harness.config import mistakes
from harness.config.mistakes import choices_of, group_names, known_keys, similar_models
from tests.support.commands import ROOT

PAGE = ROOT / "docs" / "reference" / "mistakes.md"

SLIPS = re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


def answer(typed: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command prints for a mistake, which must be one line."""
    status = main(shlex.split(typed))
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1), (typed, printed)
    return printed.err.strip().replace("`", "")


def test_every_mistake_of_the_page_has_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SLIPS) > 70
    answers = {typed: (expected, answer(typed, capsys)) for typed, expected in SLIPS}
    wrong = {
        typed: printed
        for typed, (expected, printed) in answers.items()
        if not re.fullmatch(re.escape(expected).replace("…", ".+"), printed)
    }
    assert wrong == {}


def test_several_values_are_the_first_mistake_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "add -m to run every combination" in answer("gpus=8 strategy=ddp,nope", capsys)


def is_setting(key: str, value: str) -> bool:
    """Return whether a setting is one that the harness has; what the user fills in is not checked."""
    if key in group_names() and "{" not in value:
        return value in choices_of(key)
    return key in (*known_keys(), *group_names())


def test_every_alias_leads_to_a_setting_that_exists() -> None:
    targets = [target if "=" in target else f"{target}={{}}" for target in mistakes.KEYS.values()]
    targets += [
        choice if "=" in choice.partition(" ")[0] else f"{group}={choice}"
        for group, names in mistakes.VALUES.items()
        for choices in names.values()
        for choice in choices
    ]
    targets += [text.replace("hydra/launcher=slurm", "") for text in mistakes.NO_KEYS.values()]
    settings = [pair for target in targets for pair in re.findall(r"\b([a-z_.]+)=([\w.{}-]+)", target)]
    assert [pair for pair in settings if not is_setting(*pair)] == [] and set(mistakes.KEY_VALUES) <= set(known_keys())


def test_no_alias_hides_what_exists() -> None:
    names = {*known_keys(), *group_names()} - {"sweep"}  # which is a group of keys, and no setting by itself
    assert not names & {*mistakes.KEYS, *mistakes.NO_KEYS}
    assert not set(mistakes.KEYS) & set(mistakes.NO_KEYS)
    for group, spellings in mistakes.VALUES.items():
        assert not set(spellings) & set(choices_of(group)), group


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("meta-llama/Llama-2-7b-hf", ["7b"]),
        ("meta-llama/Llama-3.2-1B", ["1b"]),
        ("llama-3.1-70b-instruct", ["70b"]),
        ("llama3_405b", ["405b"]),
        ("mistralai/Mistral-7B-v0.1", ["mistral_7b"]),
        ("gpt3-175b", ["gpt_175b"]),
        ("mpt-30b-chat", ["mpt_30b"]),
        ("llama-65b", ["70b"]),
        ("Qwen2.5-7B", []),
        ("bert-base", []),
    ],
)
def test_a_model_is_known_by_its_names_elsewhere(name: str, models: list[str]) -> None:
    assert similar_models(name, choices_of("model")) == models
