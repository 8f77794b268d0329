"""The table of the self-test's steps, read from steps.yaml."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.launcher.rank_entry import worker_entry
from harness.records.rank_report import RunStatus
from harness.records.schema import Record
from harness.selftest import checks, observations, rank_variants
from harness.selftest.bench import Bench

Check = Callable[[Bench, Sequence[Record]], str]


@dataclass(frozen=True)
class Step:
    """One step of the self-test; steps.yaml says what its fields mean."""

    name: str
    about: str
    check: Check  # returns a few words on the result; raises StepFailedError
    runs: tuple[str, ...]  # the overrides of each run, beside those of `base`
    base: str
    status: RunStatus = "ok"
    gpus: int = 0
    entry: Callable[[str], None] = worker_entry
    may_not_fit: bool = False


def each_run(overrides: str) -> Iterator[str]:
    """Yield the overrides of one run for each combination of values, as a sweep has them."""
    choices = []
    for override in overrides.split():
        key, _, values = override.partition("=")
        choices.append([f"{key}={value}" for value in values.split(",")])
    return map(" ".join, itertools.product(*choices))


def read_steps() -> tuple[Step, ...]:
    """Return the steps of the table in its order."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    functions: dict[str, Any] = vars(checks) | vars(observations) | vars(rank_variants)
    steps = []
    for name, facts in table["steps"].items():
        facts |= {key: functions[facts[key]] for key in ("check", "entry") if key in facts}
        facts["runs"] = tuple(run for overrides in facts.get("runs", ()) for run in each_run(overrides))
        facts["base"] = table["bases"][facts.get("base", "tiny")]
        steps.append(Step(name, **facts))
    return tuple(steps)


STEPS = read_steps()
