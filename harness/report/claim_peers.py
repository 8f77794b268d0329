"""Claims and peers: the figures that papers give for runs, and the run that a run is compared with."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.metrics.formulas import Quantities, quantities
from harness.report.comparability import PARTITION_COLUMNS, claim_key
from harness.report.lines import Line

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


def ok_runs(lines: Iterable[Line]) -> list[Quantities]:
    """Return the quantities of the lines that are ok, the `line`, and `setting`, equal where they may be compared."""
    return [
        quantities(line.record, TABLE["quantities"]) | {"line": line, "setting": claim_key(line.record)}
        for line in lines
        if line.ok
    ]


def peer(
    run: Quantities, runs: Sequence[Quantities], same: Sequence[str] = PARTITION_COLUMNS, **required: object
) -> Quantities | None:
    """Return a run of the same setting with the required values that has the run's own values of the columns `same`.

    Among several the one with the same options is returned, else the first with the fewest: variants come after what
    they vary.
    """
    values = {"setting": run["setting"]} | {name: run.get(name) for name in same} | required
    peers = [other for other in runs if all(other.get(name) == value for name, value in values.items())]
    return min(peers, key=lambda other: (other["options"] != run["options"], len(other["options"])), default=None)
