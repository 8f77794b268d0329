"""Claims and peers: the quantities of a run that a claim names, and the run that it is compared with."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.records.schema import Record, Row
from harness.report.comparability import PARTITION_COLUMNS, claim_key
from harness.report.formulas import Quantities, value_of
from harness.report.frame import column_values, records_frame
from harness.report.setting import recorded_config, recorded_layout

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("claims.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Claim:
    """One figure that the literature gives for a run, and the run's own; both are a ratio or both a count."""

    label: str
    subject: str  # what it is about, in a word or two
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

    @cached_property
    def quantities(self) -> Quantities:
        """What a formula may name of the run, without what is unknown."""
        record = self.record
        known = self.row | {"run": self, "record": record}
        known |= {"config": recorded_config(record), "layout": recorded_layout(record)}
        known = {name: value for name, value in known.items() if value is not None}
        for name, formula in TABLE["quantities"].items():
            value = value_of(formula, known)
            known |= {} if value is None else {name: value}
        return known

    def options(self) -> dict[str, Any]:
        """Return the engine's options of the strategy."""
        return dict((self.record.config.get("strategy") or {}).get("options") or {})


def ok_runs(records: Sequence[Record], labels: Sequence[str] | None = None) -> list[ClaimRun]:
    """Return the records that are ok as claims need them, under the given labels or else their own."""
    if labels is None:
        labels = column_values(records_frame(records), "label") if records else []
    return [
        ClaimRun(label, record, claim_key(record))
        for label, record in zip(labels, records, strict=True)
        if record.status == "ok"
    ]


def peer(
    run: ClaimRun, runs: Sequence[ClaimRun], same: Sequence[str] = PARTITION_COLUMNS, **required: object
) -> ClaimRun | None:
    """Return a run of the same setting with the required values that has the run's own values of the columns `same`.

    Among several the one with the same options is returned, else the first with the fewest: variants come after what
    they vary.
    """
    values = {name: run.row.get(name) for name in same} | required
    peers = [
        other
        for other in runs
        if other.setting == run.setting and all(other.row.get(name) == value for name, value in values.items())
    ]
    return min(peers, key=lambda other: (other.options() != run.options(), len(other.options())), default=None)
