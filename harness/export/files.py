"""The files of an export, and the command that writes them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from harness.export import unsupported
from harness.export.recorded_run import RecordedRun, read_recorded_run
from harness.util.files import atomic_write_text
from harness.util.text import sanitize


class ExportFile(NamedTuple):
    """One file: its name, the reasons why it cannot be written for a run, and its text."""

    name: str
    reasons: Callable[[RecordedRun], Iterator[str]]
    text: Callable[[RecordedRun], str]


def export_files() -> list[ExportFile]:
    """Return every file that an export can have."""
    from harness.export import configs, script  # they import torch

    return [
        ExportFile("accelerate.yaml", unsupported.why_not_accelerate, configs.accelerate_yaml),
        ExportFile("train_accelerate.py", unsupported.why_not_accelerate, script.train_accelerate_py),
        ExportFile("deepspeed.json", unsupported.why_not_deepspeed, configs.deepspeed_json),
        ExportFile("train.py", unsupported.why_not_train, script.train_py),
        ExportFile("torchrun.sh", unsupported.why_not_train, configs.torchrun_sh),
    ]


def export_run(run: RecordedRun) -> Iterator[str]:
    """Write every file that the run allows, and yield one line about each file."""
    run.target.mkdir(parents=True, exist_ok=True)
    for file in export_files():
        path = run.target / file.name
        reason = next(file.reasons(run), None)
        if reason is not None:
            path.unlink(missing_ok=True)  # an earlier export may have written it
            yield f"{file.name}: not written, {reason}"
            continue
        atomic_write_text(path, file.text(run))
        if path.suffix == ".sh":
            path.chmod(0o755)
        yield f"{file.name}: {path}"


def write_files(run_dir: Path, target: Path | None) -> None:
    """Export a run's folder to `target`, by default its folder `export`, and print one line about each file.

    Raises UserError if there is no run with status=ok in the folder.
    """
    for line in export_run(read_recorded_run(run_dir, target)):
        print(sanitize(line))
