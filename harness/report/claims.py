"""The report's section on the literature: the figures of papers at this layout, compared with the measurement.

What the papers say is in claims.toml, and `claims` applies it to records.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.records.schema import Record
from harness.report.charts.expected import measured_against_papers
from harness.report.claim_peers import TABLE, Claim, ClaimRun, ok_runs, peer
from harness.report.comparability import group_by
from harness.report.document import Paragraph, Section, Table, section
from harness.report.formulas import ENVIRONMENT, EXACT, text_of, value_of
from harness.report.frame import column_values
from harness.report.view import View

TIMED = 0.20  # the relative tolerance of seconds

_DEFAULTS: dict[str, Any] = {"expected": "none", "required": "false", "within": EXACT, "remarks": (), "reasons": ()}


def claims(records: Sequence[Record], labels: Sequence[str] | None = None) -> list[Claim]:
    """Return the claims on every record that is ok that apply to it and have a peer among the records."""
    runs = ok_runs(records, labels)
    by_setting = group_by(runs, lambda run: run.setting)
    return [claim for run in runs for rule in TABLE["claims"] for claim in _claim(rule, run, by_setting[run.setting])]


def _claim(rule: dict[str, Any], run: ClaimRun, runs: Sequence[ClaimRun]) -> Iterator[Claim]:
    """Yield the claim of an entry of the table on a run if it applies and both figures are known."""
    if not value_of(rule["if"], run.quantities):
        return
    peers = (peer(run, runs, **TABLE["peers"][name]) for name in rule.get("peers", ()))
    known = run.quantities | next(({"peer": other.quantities} for other in peers if other is not None), {})
    cases = (case for case in rule.get("cases", ()) if value_of(case["if"], known))
    entry = _DEFAULTS | rule | next(cases, {})
    expected, measured = (value_of(entry[name], known) for name in ("expected", "measured"))
    if expected is None or measured is None:
        return
    known |= {"expected": expected, "measured": measured}
    agrees = abs(measured - expected) <= entry["within"] * expected
    notes = [*entry["remarks"], *(() if agrees else entry["reasons"])]
    texts = [text_of(text, known) for condition, text in notes if value_of(condition, known)]
    yield Claim(
        run.label,
        entry["subject"],
        text_of(entry["claim"], known),
        entry["source"],
        expected,
        text_of(entry["limit"], known),
        measured,
        agrees,
        "; ".join(text for text in texts if text),
        bool(value_of(entry["required"], known)),
    )


def state_widths(run: ClaimRun, whose: str = "") -> str:
    """Return a phrase for each kind of state whose bytes differ from the paper's, with the cause if it is known."""
    phrases = []
    for kind, entry in TABLE["state"].items():
        size, paper = (value_of(entry[name], run.quantities) for name in ("size", "paper"))
        if size and abs(size - paper) > EXACT * paper:
            known = run.quantities | {"size": size}
            cause = next((f" ({text})" for holds, text in entry["causes"] if value_of(holds, known)), "")
            phrases.append(f"{whose}{kind} at {size:.3g} bytes a parameter, not {paper}{cause}")
    return "; ".join(phrases)


def layer_ratio(run: ClaimRun, other: ClaimRun) -> str:
    """Return how often larger the activations of the other run's layer are than the run's by the paper's formulas."""
    sizes, texts = [], []
    for known in (other.quantities, run.quantities):
        formula = next((formula for holds, formula in TABLE["layer"] if value_of(holds, known)), "none")
        sizes.append(value_of(formula, known))
        texts.append(formula.replace("*", ""))
    if None in sizes:
        return "not given for these runs"
    return f"{sizes[0] / sizes[1]:.3g}× for the paper's block ({texts[0]} over {texts[1]})"


ENVIRONMENT.globals |= {"state_widths": state_widths, "layer_ratio": layer_ratio}


def literature(view: View) -> list[Section]:
    """Return the section with a table of one row per claim."""
    view_claims = claims(view.lines, column_values(view.line_medians, "label"))
    if not view_claims:
        return []
    header = ["run", "claim", "source", "paper's figure", "verdict", "expected at this layout", "measured"]
    rows = [
        [
            *(claim.label, claim.claim, claim.source, claim.limit, _verdict(claim)),
            *(f"{figure:.3g}" for figure in (claim.expected, claim.measured)),
        ]
        for claim in view_claims
    ]
    free = [claim for claim in view_claims if not (claim.required and claim.agrees)]
    return section(
        "Comparison with the literature",
        measured_against_papers(view, view_claims),
        Table(header, rows, label_columns=5),
        Paragraph(
            f"{sum(claim.agrees for claim in free)} of the {len(free)} claims that are not marked as proven agree:"
            f" within {EXACT:.0%} for bytes and operations and {TIMED:.0%} for times. What is marked as proven is part"
            " of the proof that its row has passed. Times are compared where nothing disturbed them. Bytes sent are"
            " counted under ring algorithms on both sides. The paper's figure is for its own model or in its limit; the"
            " figure expected at this layout is for this model and these dtypes. For activations and operations it is"
            " the cost model's count by the paper's method. Each run is compared with a run of the same model,"
            " training, precision, batch, checkpointing and versions."
        ),
    )


def _verdict(claim: Claim) -> str:
    word = ("proven" if claim.required else "agrees") if claim.agrees else "DIFFERS"
    return word + (f": {claim.reason}" if claim.reason else "")
