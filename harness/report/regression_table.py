"""The comparison with a baseline as the terminal shows it, and as JSON."""

import dataclasses
import json
import math
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from harness.records.columns import COLUMN_TYPES, column
from harness.report.comparison_columns import Column
from harness.report.regressions import Change, Comparison, Figure
from harness.report.tables import fit_width, rich_table
from harness.report.text import bytes_text, flop_unit, format_numbers, pluralize
from harness.util.text import sanitize


def print_regressions(comparison: Comparison, out: Console) -> None:
    """Print one line for each change, worst first, then what was compared, and whether the baseline is held."""
    for key, (before, after) in comparison.configuration.items():
        out.print(Text(sanitize(f"configuration of all runs: {key} {before} → {after}")), soft_wrap=True)
    if comparison.changes:
        columns, _ = fit_width(_columns(comparison), out.width)
        out.print(rich_table(columns))
    for note in _notes(comparison):
        out.print(Text(sanitize(note)), soft_wrap=True)


def _columns(comparison: Comparison) -> list[Column]:
    changes, limit = comparison.changes, _percent(comparison.limit)
    verdicts = [f"within {limit}" if change.verdict == "within limit" else change.verdict for change in changes]
    texts = [[_figure_text(change.column, figure) for figure in (change.before, change.after)] for change in changes]
    return [
        Column(("verdict", ""), verdicts, number=False),
        Column(("run", ""), [sanitize(change.run) for change in changes], number=False),
        Column(("figure", ""), [_title(change.column) for change in changes], number=False),
        Column(("change", ""), [_growth_text(change) for change in changes]),
        Column(("A", ""), [before for before, _ in texts], number=False),
        Column(("B", ""), [after for _, after in texts], number=False),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _title(name: str) -> str:
    return column(name).title if name in COLUMN_TYPES else name


def _figure_text(name: str, figure: Figure) -> str:
    value = figure.value
    if value is None or isinstance(value, str):
        return sanitize("unknown" if value is None else value)
    if figure.range:
        return f"{value:,.0f} [{figure.range[0]:,.0f}, {figure.range[1]:,.0f}], n = {figure.runs}"
    if name.endswith("_bytes"):
        return bytes_text(value)
    unit = flop_unit([value])
    return f"{format_numbers([value], unit)[0]} {unit.name}s"


def _growth_text(change: Change) -> str:
    """Return the change relative to the baseline in percent, with enough decimals to show a small one."""
    if math.isinf(change.growth):
        return ""
    share = -change.growth if change.after.range else change.growth
    decimals = 1 if abs(share) >= 0.0005 else 4
    return f"{100 * share:+.{decimals}f} %"


def _notes(comparison: Comparison) -> Iterator[str]:
    """Yield what was compared and what was not, new configurations, and whether the baseline is held."""
    limit = _percent(comparison.limit)
    are_ok = f"{pluralize(comparison.compared, 'configuration')} that {'is' if comparison.compared == 1 else 'are'} ok"
    yield (
        f"compared {are_ok} in A: memory, bytes sent and FLOPs as exact figures,"
        f" and the speeds of {comparison.judged_speeds}"
    )
    for reason, labels in comparison.unjudged_speeds.items():
        names = "all" if len(labels) == comparison.compared else ", ".join(labels)
        yield f"speeds not judged for {names}: {reason}"
    if comparison.new:
        yield f"new in B and not judged: {', '.join(comparison.new)}"
    regressed = len({change.run for change in comparison.regressed})
    if regressed:
        yield f"REGRESSED: {regressed} of {pluralize(comparison.compared, 'configuration')} by more than {limit}"
    else:
        yield f"HOLDS: no configuration regressed by more than {limit}"


def regressions_json(comparison: Comparison) -> str:
    """Return the comparison as JSON; a growth of null has no number, as where a run is missing."""
    changes = [
        dataclasses.asdict(change)
        | {"before": change.before._asdict(), "after": change.after._asdict()}
        | {"growth": None if math.isinf(change.growth) else change.growth}
        for change in comparison.changes
    ]
    values = dataclasses.asdict(comparison) | {"changes": changes, "holds": not comparison.regressed}
    return json.dumps(values, indent=2)
