"""A run among its peers: what of a record a claim needs, what it is held against, and whether the two agree."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.from_dict import from_dict
from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.records.schema import Record, Row
from harness.report import frame
from harness.util.errors import UserError

COUNTED = "counted as in"  # before a source whose method the planner counts by

EXACT, TIMED = 0.05, 0.20  # relative; bytes, counts and operations, or seconds

# What has to be the same for a claim to be about one difference alone.
_SETTING = (
    "model",
    "parameters",
    "precision",
    "global_batch",
    "micro_batch",
    "seq_len",
    "measured_on",
    "launch",
    "offload_activations",
)

DIVISION = (
    *("strategy", "engine", "zero_stage", "world_size", "dp_replicate", "dp_shard", "tp", "cp", "pp"),
    *("schedule", "virtual_stages", "layers_per_stage", "sequence_parallel", "offload"),
    *("data_parallel", "vocabulary_parallel"),
)


@dataclass(frozen=True)
class Claim:
    """One figure that the literature gives for a run, and the run's own; both a ratio or both a count."""

    label: str
    claim: str
    source: str
    expected: float  # at this layout
    limit: str
    measured: float
    agrees: bool
    reason: str
    required: bool  # a run that does not agree is an error and no row that claims are made of


@dataclass(frozen=True)
class ClaimRun:
    """A record whose run ended well, as claims are looked for in it."""

    label: str
    row: Row
    groups: dict[str, Any]  # the configuration's, as recorded
    degrees: dict[str, Any]  # the layout, as recorded
    environment: dict[str, Any]
    setting: str  # the same in runs that are held against each other

    def number(self, name: str) -> float | None:
        value = self.row.get(name)
        return value if isinstance(value, (int, float)) else None

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = (self.groups.get("strategy") or {}).get("options") or {}
        return options

    def degree(self, name: str) -> int:
        """0 where it is unknown."""
        return self.row.get(name) or 0

    def config(self) -> RunConfig | None:
        """None for a configuration that this version cannot read. Which text was read changes no claim."""
        values = self.groups | {"data": {"name": "any", "kind": "synthetic"}}
        config: RunConfig | None = _read(RunConfig, values)
        return config

    def layout(self) -> Layout | None:
        layout: Layout | None = _read(Layout, self.degrees)
        return layout

    @property
    def zero_by_deepspeed(self) -> bool:
        layout = self.layout()
        return layout is not None and layout.uses_deepspeed_zero


def _read(kind: type, values: dict[str, Any]) -> Any:
    try:
        return from_dict(kind, values)
    except UserError:
        return None


def ratio(upper: ClaimRun | None, lower: ClaimRun | None, name: str) -> float | None:
    """Of one figure of two runs; None where either is unknown."""
    if upper is None or lower is None:
        return None
    above, below = upper.number(name), lower.number(name)
    return above / below if above is not None and below else None


def ok_runs(records: Sequence[Record], labels: Sequence[str] | None = None) -> list[ClaimRun]:
    """Of records by their labels, those that claims are made of."""
    if labels is None:
        labels = frame.values(frame.records_frame(records), "label") if records else []
    return [
        ClaimRun(
            label,
            record["row"],
            record.get("config") or {},
            record.get("layout") or {},
            record.get("environment") or {},
            _setting(record),
        )
        for label, record in zip(labels, records, strict=True)
        if record["row"]["status"] == "ok"
    ]


def _setting(record: Record) -> str:
    """Columns, model, training, versions and text."""
    row, groups = record["row"], record.get("config") or {}
    columns = [row.get(name) for name in _SETTING]
    alike = [columns, groups.get("model"), groups.get("train"), record.get("versions"), record.get("corpus")]
    return json.dumps(alike, sort_keys=True, default=str)


def by_setting(runs: Sequence[ClaimRun]) -> dict[str, list[ClaimRun]]:
    found: dict[str, list[ClaimRun]] = {}
    for run in runs:
        found.setdefault(run.setting, []).append(run)
    return found


def peer(run: ClaimRun, runs: Sequence[ClaimRun], alike: Sequence[str] = (), **wanted: object) -> ClaimRun | None:
    """A run of the same setting that has what is wanted, and the same columns `alike`.

    Of several the one with the same options, else the first with fewest: variants come after what they vary.
    """
    mine = {name: run.row.get(name) for name in alike} | wanted
    found = [
        other
        for other in runs
        if other.setting == run.setting and all(other.row.get(name) == value for name, value in mine.items())
    ]
    return min(found, key=lambda other: (other.options() != run.options(), len(other.options())), default=None)


def compare_claim(
    run: ClaimRun,
    claim: str,
    source: str,
    expected: float | None,
    limit: str,
    measured: float | None,
    reason: str = "",
    remark: str = "",
    within: float = EXACT,
    required: bool = False,
) -> Iterator[Claim]:
    """The claim, if both figures are known; the reason is one to differ, the remark is made in any case."""
    if expected is None or measured is None:
        return
    agrees = abs(measured - expected) <= within * expected
    said = [part for part in (remark, "" if agrees else reason) if part]
    yield Claim(run.label, claim, source, expected, limit, measured, agrees, "; ".join(said), required)


def ddp_of(run: ClaimRun, runs: Sequence[ClaimRun]) -> ClaimRun | None:
    """DDP, by PyTorch itself where that is among the runs."""
    torchs = peer(run, runs, ("world_size", "checkpointing"), strategy="ddp", engine="torch")
    return torchs or peer(run, runs, ("world_size", "checkpointing"), strategy="ddp")
