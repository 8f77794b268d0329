"""The invariants of a comparison's folder, which must hold whatever happened to its commands."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.records.run_folder import RunFolder
from harness.records.store import read_all, read_record
from harness.util.text import UserError
from tests.support.campaigns import read_table

# The columns that differ between two runs of one configuration. If several moments of a step are equally full, which
# of them is reported as the peak differs too.
MOMENTARY = {
    *("attempts", "earlier_ends"),
    *("started_at", "duration_seconds", "noise_warning", "cpu_seconds", "peak_rss_bytes", "mfu", "hfu"),
    *("peak_phase", "peak_rank"),
    *("tokens_per_second", "tokens_per_second_per_device", "model_flops_per_second_per_device"),
    *("fragmentation_bytes", "non_torch_bytes", "pipeline_bubble", "step_seconds_iqr_ratio"),
}

# Relative, because the number of collective buffers that exist at once depends on timing. The first two are equal on a
# CPU. Reruns of one configuration differ by up to 2 % even without the copies of gloo, whose threads refer to small
# tensors of a collective a moment longer (results/simulator/virtual_against_real.csv), on a busy machine by 2.2 %,
# and by 8.2 % under DeepSpeed's stage 2.
NEARLY = {"peak_allocated_bytes": 0.15, "peak_requested_bytes": 0.15, "peak_without_backend_bytes": 0.1}


def stable(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that are the same however often a configuration is run."""
    return {
        column: value
        for column, value in row.items()
        if column not in MOMENTARY and not column.startswith("at_peak_") and not column.endswith(("_seconds", "_p95"))
    }


@dataclass
class Ledger:
    """The finished records of one folder of results, which may never change from one look to the next."""

    folder: Path  # results_dir
    finished: dict[Path, tuple[int, int]] = field(default_factory=dict)  # of records that are ok: inode, mtime in ns

    def look(self) -> list[str]:
        """Return the finished records that were touched, the incomplete ones, and the started runs without a record."""
        problems = []
        for path in records_in(self.folder):
            try:
                status = path.stat()
                is_ok = read_record(path.parent).row["status"] == "ok"
            except FileNotFoundError:  # the folder of a run that is started again
                continue
            except UserError as error:
                if path.exists():
                    problems.append(f"half a record: {error}")
                continue
            if is_ok:
                written = (status.st_ino, status.st_mtime_ns)
                if self.finished.setdefault(path, written) != written:
                    problems.append(f"a finished record was touched: {path.parent.name}")
                    self.finished[path] = written
        problems += [f"a finished record is gone: {path}" for path in self.finished if not path.exists()]
        return problems + rowless(self.folder)


def records_in(folder: Path) -> list[Path]:
    """Return the records of runs and references, without `**`, which fails if a folder is removed meanwhile."""
    return [path for depth in ("*", "references/*") for path in folder.glob(f"sweep/{depth}/record.json")]


def rowless(folder: Path) -> list[str]:
    """Return the runs that were started and have no record, whatever became of their command."""
    started = {path.parents[1] for depth in ("*", "references/*") for path in folder.glob(f"sweep/{depth}/ranks/*")}
    return sorted(f"{path.name} was begun and has no row" for path in started if not RunFolder(path).record.exists())


def moment(folder: Path) -> str:
    """Return the state of the sweep: between runs, or the phase of an unfinished run."""
    paths = records_in(folder)
    for path in paths:
        try:
            status = json.loads(path.read_text())["row"]["status"]
        except (OSError, ValueError, KeyError):
            continue
        if status == "interrupted":
            beat = RunFolder(path.parent).read_heartbeat(0)
            return beat.phase if beat else "starting ranks"
    return "between runs" if paths else "before the first run"


def litter(folder: Path) -> list[str]:
    """Return the files that no command may leave behind after its end."""
    patterns = ("*.tmp", ".writable*", ".reserve", "command-*")
    return sorted(str(path.relative_to(folder)) for pattern in patterns for path in (folder / "sweep").rglob(pattern))


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """Return where the final table differs from the undisturbed sweep's; each combination has one row in both."""
    expected, actual = ({r.row["run_id"]: r.row for r in read_all(f / "sweep").records} for f in (undisturbed, folder))
    problems = [f"{run_id} has no row" for run_id in expected.keys() - actual.keys()]
    problems += [f"{run_id} should not be" for run_id in actual.keys() - expected.keys()]
    for run_id in expected.keys() & actual.keys():
        before, after = stable(expected[run_id]), stable(actual[run_id])
        for column in sorted(before.keys() | after.keys()):
            value, other = before.get(column), after.get(column)
            near = pytest.approx(value, rel=NEARLY[column]) if value and column in NEARLY else value
            if other != near:
                problems.append(f"{run_id}: {column} is {other}, undisturbed {value}")
    listed = [row["run_id"] for row in read_table(folder / "sweep" / "runs.csv")]
    if sorted(listed) != sorted(expected):
        problems.append(f"runs.csv lists {listed}")
    return problems
