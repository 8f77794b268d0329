"""What need not be tried: the same layout ran out of memory at a smaller batch, and this needs no less."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import versions
from harness.config import RunConfig
from harness.engines import Widths
from harness.errors import UserError
from harness.identity import settling
from harness.layout import Layout
from harness.machine import Machine
from harness.plan.memory import estimate
from harness.records import RECORD_FILE, Record, read_record

_BATCH = ("micro_batch", "global_batch")


def reason(config: RunConfig, layout: Layout, widths: Widths, machine: Machine, run_dir: Path) -> str | None:
    """Which measured run says that this one cannot fit, in one line; None if there is none."""
    if not config.sweep.skip_dominated or config.force:
        return None
    for record in alike(config, run_dir):
        row = record["row"]
        if row["measured_on"] == machine.device_name and needs_no_less(config, layout, widths, machine.device, row):
            return (
                f"not tried: {row['run_id']} ran out of memory at train.micro_batch={row['micro_batch']} with the same"
                f" layout, and train.micro_batch={config.train.micro_batch} needs no less; sweep.skip_dominated=false"
                " tries it"
            )
    return None


def alike(config: RunConfig, run_dir: Path) -> Iterator[Record]:
    """The records of the comparison that this code made out of memory, and that differ from this run in batch alone."""
    names = run_dir.name.rpartition("-")[0]
    for path in sorted(run_dir.parent.glob(f"{names}-*/{RECORD_FILE}")):
        try:
            record = read_record(path.parent)
        except UserError:
            continue
        if record["row"]["status"] != "oom" or versions.is_stale(record, versions.versions()):
            continue
        if without_batch(record["config"]) == without_batch(config.to_dict()):
            yield record


def without_batch(values: dict[str, Any]) -> dict[str, Any]:
    kept = settling(values)
    train = {key: value for key, value in kept["train"].items() if key not in _BATCH}
    # As a record has it, lists for tuples; whichever repeat ran out of memory, the others would.
    plain: dict[str, Any] = _as_read(kept | {"train": train, "repeat": 0})
    return plain


def _as_read(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_read(entry) for key, entry in value.items()}
    return [_as_read(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def needs_no_less(config: RunConfig, layout: Layout, widths: Widths, device: str, row: dict[str, Any]) -> bool:
    """A larger micro-batch, and by the plan as much memory: a pipeline's larger ones can be fewer."""
    if not row["micro_batch"] < config.train.micro_batch:
        return False
    predicted = row.get("predicted_peak_bytes")
    if predicted is None:  # of compiled layers nothing is predicted
        return layout.pp == 1
    needed: int = estimate(config, layout, widths, device).peak_bytes
    return needed >= int(predicted)
