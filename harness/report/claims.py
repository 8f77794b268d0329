"""Claims and peers: the figures that papers give for runs, and the run that a run is compared with.

What the papers say is in claims.toml, and `claims` applies it to records.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from harness.metrics.formulas import ENVIRONMENT, EXACT, Quantities, quantities, text_of, value_of
from harness.report.comparability import PARTITION_COLUMNS, claim_key, group_by
from harness.report.lines import Line
from harness.report.speeds import is_undisturbed
from harness.report.text import sentence

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


TIMED = 0.20  # the relative tolerance of seconds


def claims(lines: Iterable[Line]) -> list[Claim]:
    """Return the claims on every line that is ok that apply to it and have a peer among the lines."""
    runs = ok_runs(lines)
    by_setting = group_by(runs, itemgetter("setting"))
    rules = [(rule, run) for run in runs for rule in TABLE["claims"] if value_of(rule["if"], run)]
    candidates = (_claim(rule, run, by_setting[run["setting"]]) for rule, run in rules)
    return [claim for claim in candidates if claim is not None]


def _claim(rule: dict[str, Any], run: Quantities, runs: Sequence[Quantities]) -> Claim | None:
    """Return the claim on a run of an entry of the table that applies to it; None if a figure is not known."""
    peers = (peer(run, runs, **TABLE["peers"][name]) for name in rule.get("peers", ()))
    known = run | {"run": run, "peer": next(filter(None, peers), None)}
    cases = (case for case in rule.get("cases", ()) if value_of(case["if"], known))
    entry = TABLE["defaults"] | rule | next(cases, {})
    expected, measured = (value_of(entry[name], known) for name in ("expected", "measured"))
    if expected is None or measured is None:
        return None
    known |= {"expected": expected, "measured": measured}
    agrees = abs(measured - expected) <= entry.get("within", EXACT) * expected
    notes = [*entry["remarks"], *(() if agrees else entry["reasons"])]
    texts = [text_of(text, known) for text in _holding(notes, known)]
    return Claim(
        run["line"].label,
        entry["subject"],
        text_of(entry["claim"], known),
        entry["source"],
        expected,
        text_of(entry["limit"], known),
        measured,
        agrees,
        "; ".join(filter(None, texts)),
        bool(value_of(entry["required"], known)),
    )


def _holding(entries: Sequence[tuple[str, str]], known: Quantities) -> Iterator[str]:
    """Yield the formulas or texts whose condition holds."""
    return (text for condition, text in entries if value_of(condition, known))


def state_widths(run: Quantities, whose: str = "") -> Iterator[str]:
    """Yield a phrase for each kind of state whose bytes differ from the paper's, with the cause if it is known."""
    for kind, entry in TABLE["state"].items():
        size, paper = (value_of(entry[name], run) for name in ("size", "paper"))
        if size and abs(size - paper) > EXACT * paper:
            cause = next(_holding(entry["causes"], run | {"size": size}), "")
            yield sentence("state_width", whose=whose, state=kind, size=size, paper=paper, cause=cause)


def layer_ratio(run: Quantities, other: Quantities) -> str:
    """Return how often larger the activations of the other run's layer are than the run's by the paper's formulas."""
    formulas = [next(_holding(TABLE["layer"], known), "none") for known in (other, run)]
    sizes = [value_of(formula, known) for formula, known in zip(formulas, (other, run), strict=True)]
    ratio = None if None in sizes else sizes[0] / sizes[1]
    return sentence("layer_ratio", ratio=ratio, formulas=[formula.replace("*", "") for formula in formulas])


ENVIRONMENT.globals |= {"is_undisturbed": is_undisturbed, "state_widths": state_widths, "layer_ratio": layer_ratio}


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

    It has the run's adapters too, unless others are required.

    Among several the one with the same options is returned, else the first with the fewest: variants come after what
    they vary.
    """
    values = (
        {name: run.get(name) for name in ("setting", "adapters")} | {name: run.get(name) for name in same} | required
    )
    peers = [other for other in runs if all(other.get(name) == value for name, value in values.items())]
    return min(peers, key=lambda other: (other["options"] != run["options"], len(other["options"])), default=None)
