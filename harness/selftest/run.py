"""The self-test's steps, read from steps.yaml, and one pass over them with its lines on the terminal.

What has passed before is left out.
"""

import itertools
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness import __version__
from harness.launcher.rank_entry import worker_entry
from harness.records.rank_report import RunStatus
from harness.records.schema import Record
from harness.selftest import checks, observations, rank_variants
from harness.selftest.bench import Bench, StepFailedError, StepSkippedError
from harness.selftest.results import Outcome, ResultsFile, SelfTestResult, run_summary
from harness.util.text import count_text, format_duration, one_line, sanitize

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
    seconds: Mapping[str, float] = field(default_factory=dict)  # by the kind of device


def each_run(overrides: str) -> Iterator[str]:
    """Yield the overrides of one run for each combination of values, as a sweep has them."""
    pairs = (override.partition("=") for override in overrides.split())
    choices = [[f"{key}={value}" for value in values.split(",")] for key, _, values in pairs]
    return map(" ".join, itertools.product(*choices))


def read_steps() -> tuple[Step, ...]:
    """Return the steps of the table in its order."""
    table = yaml.safe_load(Path(__file__).with_name("steps.yaml").read_text("utf-8"))
    functions: dict[str, Any] = vars(checks) | vars(observations) | vars(rank_variants)
    steps = []
    for name, facts in table["steps"].items():
        facts |= {key: functions[facts[key]] for key in ("check", "entry") if key in facts}
        facts["runs"] = tuple(run for overrides in facts.get("runs", ()) for run in each_run(overrides))
        facts["base"] = table["bases"][facts.get("base", "tiny")]
        usual = {device: seconds * len(facts["runs"]) for device, seconds in table["run_seconds"].items()}
        facts["seconds"] = usual | facts.get("seconds", {})
        steps.append(Step(name, **facts))
    return tuple(steps)


STEPS = read_steps()


def run_steps(bench: Bench, results: ResultsFile, names: Sequence[str], again: bool) -> bool:
    """Run the steps of these names in the order of the table, and return whether none of them failed.

    Every result is shown and added to the results as soon as it is known. Steps that have passed before are repeated
    only `again`.
    """
    chosen = [step for step in STEPS if step.name in names]
    earlier = {step.name for step in chosen if results.passed(step.name) and not again}
    print_header(bench, [step for step in chosen if step.name not in earlier])
    for step in chosen:
        is_earlier = step.name in earlier
        if not is_earlier:
            print_started(step)
            results.add(step.name, run_step(bench, step))
        print_result(step, results.steps[step.name], is_earlier)
    return all(results.steps[step.name].outcome != "failed" for step in chosen)


def run_step(bench: Bench, step: Step) -> SelfTestResult:
    """Make the runs of one step and check them. Whatever goes wrong is the step's result and ends no other step."""
    if step.gpus > bench.gpus:
        available = count_text(bench.gpus, "CUDA device") if bench.gpus else "the processor alone"
        return SelfTestResult(
            "skipped", f"needs {count_text(step.gpus, 'CUDA device')}; runs here use {available}", 0.0
        )
    started, stack = time.monotonic(), ""
    records: list[Record] = []
    outcome: Outcome = "passed"
    try:
        detail = make_and_check(bench, step, records)
    except StepSkippedError as skipped:
        outcome, detail = "skipped", str(skipped)
    except StepFailedError as failed:
        outcome, detail = "failed", str(failed)
    except Exception as error:
        outcome, detail, stack = "failed", f"{type(error).__name__}: {error}", traceback.format_exc()
    summaries = [run_summary(record, bench.folder(record), outcome == "failed") for record in records]
    return SelfTestResult(outcome, one_line(detail), round(time.monotonic() - started, 1), summaries, stack)


def make_and_check(bench: Bench, step: Step, records: list[Record]) -> str:
    """Make the runs of a step, append their records, and return a few words on them.

    Raises StepFailedError if a run or the check fails, StepSkippedError if nothing can run here.
    """
    problems, left_out = [], []
    for overrides in step.runs:
        try:
            records.append(bench.make_run(overrides, step.base, step.entry, step.may_not_fit))
        except StepSkippedError as skipped:
            left_out.append(str(skipped))
        except StepFailedError as failed:
            problems.append(str(failed))
    checks.require(not problems, "; ".join(problems))
    if left_out and not records:
        raise StepSkippedError("; ".join(left_out))
    checks.require_status(records, step.status)
    return "; left out, ".join([step.check(bench, records), *left_out])


_NAME_WIDTH = max(len(step.name) for step in STEPS) + 2
_LEAD = _NAME_WIDTH + len("skipped  seconds  ")  # columns before the detail
_MOST_CHARACTERS = 400  # of a detail; the file has all of it


def print_header(bench: Bench, steps: Sequence[Step]) -> None:
    """Print what is tested, how long the steps take on this device, and the head of the table."""
    machine = bench.machine
    device = "the processor" if machine.device == "cpu" else f"{machine.devices} x {machine.device_name}"
    seconds = sum(step.seconds[machine.device] for step in steps if step.gpus <= bench.gpus)
    ranks = count_text(bench.world_size, "rank")
    print(f"harness {__version__} selftest on {device}, {ranks} a run: about {format_duration(seconds)}")
    print(f"{'step':<{_NAME_WIDTH}}outcome  seconds  detail", flush=True)


def print_started(step: Step) -> None:
    """Show in a terminal which step is running, until its line takes that place."""
    if sys.stdout.isatty():
        print(f"{step.name:<{_NAME_WIDTH}}running", end="\r", flush=True)


def print_result(step: Step, result: SelfTestResult, is_earlier: bool) -> None:
    """Print the line of one step."""
    seconds = "before" if is_earlier else f"{result.seconds:.1f}"
    detail = sanitize(result.detail)
    if len(detail) > _MOST_CHARACTERS:
        detail = detail[: _MOST_CHARACTERS - 3] + "..."
    lead = f"{step.name:<{_NAME_WIDTH}}{result.outcome:<7}  {seconds:>7}  "
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
    print(textwrap.fill(detail, max(width, _LEAD + 40), initial_indent=lead, subsequent_indent=" " * _LEAD), flush=True)


def print_footer(results: ResultsFile, names: list[str]) -> None:
    """Print the counts of all steps and where the results are."""
    outcomes = [results.steps[name].outcome for name in names]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
    print(f"{counts}. For a bug report, attach {results.path}")


def list_steps() -> str:
    """Return the names of all steps, what each shows, and what it needs."""
    lines = []
    for step in STEPS:
        need = f" ({count_text(step.gpus, 'CUDA device')})" if step.gpus else ""
        lines.append(f"  {step.name:<{_NAME_WIDTH}}{step.about}{need}")
    return "\n".join(lines)
