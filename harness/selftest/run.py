"""One pass over the self-test's steps: those that have passed before are left out, and every other one is run."""

import time
import traceback
from collections.abc import Callable, Sequence

from harness.records.schema import Record
from harness.selftest.bench import Bench, StepFailedError, StepSkippedError
from harness.selftest.results import Outcome, ResultsFile, SelfTestResult, run_summary
from harness.selftest.steps import STEPS, Step
from harness.util.text import count_text, one_line

# Called with a step, its result, and whether that is an earlier command's.
OnResult = Callable[[Step, SelfTestResult, bool], None]


def run_steps(
    bench: Bench,
    results: ResultsFile,
    names: Sequence[str],
    again: bool,
    on_start: Callable[[Step], None],
    on_result: OnResult,
) -> bool:
    """Run the steps of these names in the order of the table, and return whether none of them failed.

    Args:
        bench: The machine and the folder of the runs.
        results: The results so far, to which every result is added as soon as it is known.
        names: The names of the steps.
        again: Whether to repeat steps that have passed before.
        on_start: The function that shows which step is running.
        on_result: The function that shows a result.
    """
    chosen = [step for step in STEPS if step.name in names]
    for step in chosen:
        is_earlier = results.passed(step.name) and not again
        if not is_earlier:
            on_start(step)
            results.add(step.name, run_step(bench, step))
        on_result(step, results.steps[step.name], is_earlier)
    return all(results.steps[step.name].outcome != "failed" for step in chosen)


def run_step(bench: Bench, step: Step) -> SelfTestResult:
    """Make the runs of one step and check them. Whatever goes wrong is the step's result and ends no other step."""
    if step.gpus > bench.gpus:
        available = count_text(bench.gpus, "CUDA device") if bench.gpus else "the processor alone"
        return SelfTestResult(
            "skipped", f"needs {count_text(step.gpus, 'CUDA device')}; runs here use {available}", 0.0
        )
    started = time.monotonic()
    records: list[Record] = []
    stack = ""
    try:
        outcome, detail = make_and_check(bench, step, records)
    except Exception as error:
        outcome, detail, stack = "failed", f"{type(error).__name__}: {error}", traceback.format_exc()
    summaries = [run_summary(record, bench.folder(record), outcome == "failed") for record in records]
    return SelfTestResult(outcome, one_line(detail), round(time.monotonic() - started, 1), summaries, stack)


def make_and_check(bench: Bench, step: Step, records: list[Record]) -> tuple[Outcome, str]:
    """Make the runs of a step, append their records, and return the outcome with a few words on it."""
    problems, left_out = [], []
    for overrides in step.runs:
        try:
            records.append(bench.make_run(overrides, step.base, step.entry, step.may_not_fit))
        except StepSkippedError as skipped:
            left_out.append(str(skipped))
        except StepFailedError as failed:
            problems.append(str(failed))
    if left_out and not records and not problems:
        return "skipped", "; ".join(left_out)
    try:
        detail = "" if problems else step.check(bench, records)
    except StepSkippedError as skipped:
        return "skipped", str(skipped)
    except StepFailedError as failed:
        problems.append(str(failed))
    if problems:
        return "failed", "; ".join(problems)
    return "passed", "; left out, ".join([detail, *left_out])
