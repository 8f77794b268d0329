"""harness export results/NAME/RUN: a run's layout as scripts and configuration for other launchers and libraries."""

from argparse import Namespace
from collections.abc import Iterator

from harness.export.recorded_run import RecordedRun, read_recorded_run
from harness.util.files import atomic_write_text
from harness.util.text import sanitize

# Every file that an export can have, with the macro of scripts/refusals.j2 that has the reasons against it.
FILES = {
    "accelerate.yaml": "accelerate",
    "train_accelerate.py": "accelerate",
    "deepspeed.json": "deepspeed",
    "train.py": "train",
    "torchrun.sh": "train",
}


def main(options: Namespace) -> None:
    """Write the files of an export, and print one line about each file.

    Raises UserError if there is no run with status=ok in the folder.
    """
    for line in export_run(read_recorded_run(options.run, options.to)):
        print(sanitize(line))


def export_run(run: RecordedRun) -> Iterator[str]:
    """Write every file that the run allows, and yield one line about each file."""
    from harness.export.script import file_text, refusals  # they import torch

    run.target.mkdir(parents=True, exist_ok=True)
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
