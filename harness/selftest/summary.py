"""The self-test on the terminal: a line for each step as soon as it ends, and one for all of them."""

import shutil
import sys
import textwrap

from harness import __version__
from harness.selftest.bench import Bench
from harness.selftest.results import ResultsFile, SelfTestResult
from harness.selftest.steps import STEPS, Step, step_names
from harness.util.text import count_text, sanitize

_NAME_WIDTH = max(map(len, step_names())) + 2

_LEAD = _NAME_WIDTH + len("skipped  seconds  ")  # columns before the detail

_MOST_CHARACTERS = 400  # of a detail; the file has all of it


def print_header(bench: Bench) -> None:
    """Print what is tested, and the head of the table."""
    machine = bench.machine
    device = "the processor" if machine.device == "cpu" else f"{machine.devices} x {machine.device_name}"
    print(f"harness {__version__} selftest on {device}, {count_text(bench.world_size, 'rank')} a run")
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
