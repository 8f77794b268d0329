"""Claims and peers: the parts of a record that a claim needs, the run to compare with, and their agreement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.command import read_run_config
from harness.config.from_dict import from_dict
from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.records.schema import Record, Row
from harness.report.comparability import claim_key
from harness.report.frame import column_values, records_frame
from harness.util.errors import UserError

COUNTED = "counted as in"  # precedes a source by whose method the cost model counts

EXACT, TIMED = 0.05, 0.20  # relative tolerances: of bytes, counts and operations, and of seconds


@dataclass(frozen=True)
class Claim:
    """One figure that the literature gives for a run, and the run's own; both are a ratio or both a count."""

    label: str
    claim: str
    source: str
    expected: float  # at this layout
    limit: str
    measured: float
    agrees: bool
    reason: str
    required: bool  # proven by every row that is ok: a run that does not agree is an error


@dataclass(frozen=True)
class ClaimRun:
    """A run that is ok, as claims need it."""

    label: str
    record: Record
    setting: str  # equal in runs that may be compared, see `claim_key`

    @property
    def row(self) -> Row:
        """The run's row."""
        return self.record.row

    def number(self, name: str) -> float | None:
        """Return a column's value if it is a number."""
        value = self.row.get(name)
        return value if isinstance(value, (int, float)) else None

    def options(self) -> dict[str, Any]:
        """Return the engine's options of the strategy."""
        options: dict[str, Any] = (self.record.config.get("strategy") or {}).get("options") or {}
        return options

    def degree(self, name: str) -> int:
        """Return a whole number of the row, such as a parallel degree; 0 where it is unknown."""
        return self.row.get(name) or 0

    def config(self) -> RunConfig | None:
        """Return the configuration, None if this version cannot read it. No claim depends on the training text."""
        values = self.record.config | {"data": {"name": "any", "kind": "synthetic"}}
        try:
            return read_run_config(values)
        except UserError:
            return None

    def layout(self) -> Layout | None:
        """Return the layout, None if this version cannot read it."""
        try:
            layout = from_dict(Layout, self.record.layout or {})
        except UserError:
            return None
        return layout

    @property
    def zero_by_deepspeed(self) -> bool:
        """Whether DeepSpeed implements ZeRO in this run."""
        layout = self.layout()
        return layout is not None and layout.uses_deepspeed_zero


def ratio(upper: ClaimRun | None, lower: ClaimRun | None, name: str) -> float | None:
    """Return one run's value of a column over another's, None where either is unknown."""
    if upper is None or lower is None:
        return None
    above, below = upper.number(name), lower.number(name)
    return above / below if above is not None and below else None


def ok_runs(records: Sequence[Record], labels: Sequence[str] | None = None) -> list[ClaimRun]:
    """Return the records that are ok as claims need them, under the given labels or else their own."""
    if labels is None:
        labels = column_values(records_frame(records), "label") if records else []
    return [
        ClaimRun(label, record, claim_key(record))
        for label, record in zip(labels, records, strict=True)
        if record.status == "ok"
    ]


def peer(run: ClaimRun, runs: Sequence[ClaimRun], shared: Sequence[str] = (), **required: object) -> ClaimRun | None:
    """Return a run of the same setting with the required values that has the run's own values of the shared columns.

    Among several the one with the same options is returned, else the first with the fewest: variants come after what
    they vary.
    """
    values = {name: run.row.get(name) for name in shared} | required
    peers = [
        other
        for other in runs
        if other.setting == run.setting and all(other.row.get(name) == value for name, value in values.items())
    ]
    return min(peers, key=lambda other: (other.options() != run.options(), len(other.options())), default=None)


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
    """Yield the claim if both figures are known.

    Args:
        run: The run that the claim is about.
        claim: What is compared.
        source: The paper and where in it.
        expected: The paper's figure at this run's layout.
        limit: The paper's own figure or formula.
        measured: The run's figure.
        reason: Why the two may differ; shown only if they do.
        remark: A note that is shown in any case.
        within: The relative difference up to which they agree.
        required: Whether every row that is ok has proven it.
    """
    if expected is None or measured is None:
        return
    agrees = abs(measured - expected) <= within * expected
    notes = [note for note in (remark, "" if agrees else reason) if note]
    yield Claim(run.label, claim, source, expected, limit, measured, agrees, "; ".join(notes), required)


def ddp_of(run: ClaimRun, runs: Sequence[ClaimRun]) -> ClaimRun | None:
    """Return the DDP run to compare with, PyTorch's own if there is one."""
    by_torch = peer(run, runs, ("world_size", "checkpointing"), strategy="ddp", engine="torch")
    return by_torch or peer(run, runs, ("world_size", "checkpointing"), strategy="ddp")
