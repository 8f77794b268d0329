"""harness export results/NAME/RUN: a run's layout as scripts and configuration for other launchers and libraries."""

import sys
from argparse import Namespace
from collections.abc import Iterator

from harness.cli.commands import choices_text
from harness.export.recorded_run import RecordedRun, read_recorded_run
from harness.util.files import atomic_write_text
from harness.util.text import UserError, sanitize

# Every file that an export can have, with the macro of scripts/refusals.j2 that has the reasons against it.
FILES = {
    "accelerate.yaml": "accelerate",
    "train_accelerate.py": "accelerate",
    "deepspeed.json": "deepspeed",
    "train.py": "train",
    "torchrun.sh": "train",
    "torchtitan.toml": "torchtitan",
    "trainer_arguments.py": "trainer",
    "axolotl.yaml": "axolotl",
}


def main(options: Namespace) -> int:
    """Write the files of an export, and print one line about each file. Return 1 if there is none, else 0.

    Raises UserError if there is no run with status=ok in the folder, or no plan of the settings.
    """
    run = run_of(options)
    problem = nothing_to_export(run)
    if problem:
        print(sanitize(f"nothing is written: {problem}"), file=sys.stderr)
        return 1
    for line in export_run(run):
        print(sanitize(line))
    return 0


def run_of(options: Namespace) -> RecordedRun:
    """Return the run of a command line, recorded or planned. Raises UserError."""
    if (options.run is None) == (options.plan is None):
        runs = choices_text("export", "results/NAME/RUN")
        raise UserError(f"harness export takes the folder of one run, or --plan KEY=VALUE… --to DIR: {runs}")
    if options.run is not None:
        from harness.export.row_run import row_alone, row_run  # it imports what plans need

        row = row_alone(options.run)
        return read_recorded_run(options.run, options.to) if row is None else row_run(row, options.to)
    if options.to is None:
        raise UserError("a plan has no folder for its export: add --to DIR")
    from harness.export.planned_run import plan_run  # it imports what plans need

    return plan_run(options.plan, options.to, lambda line: print(sanitize(line), file=sys.stderr, flush=True))


def nothing_to_export(run: RecordedRun) -> str | None:
    """Return why no file of a run can be written, by its script; None if one can."""
    from harness.export.script import refusals  # it imports torch

    reasons = {kind: refusals(run, kind) for kind in FILES.values()}
    return reasons["train"][0] if all(reasons.values()) else None


def export_run(run: RecordedRun) -> Iterator[str]:
    """Write every file that the run allows, and yield one line about each file."""
    from harness.export.script import file_text, refusals  # they import torch

    run.target.mkdir(parents=True, exist_ok=True)
    if run.is_planned:
        run.spec.write(run.target)
    for name, refusal in FILES.items():
        path = run.target / name
        reasons = refusals(run, refusal)
        if reasons:
            path.unlink(missing_ok=True)  # an earlier export may have written it
            yield f"{name}: not written, {reasons[0]}"
            continue
        atomic_write_text(path, file_text(run, name))
        if path.suffix == ".sh":
            path.chmod(0o755)
        yield f"{name}: {path}"
