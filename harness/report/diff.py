"""Two folders of results in the terminal: side by side with the ratio of each figure, or against a baseline."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from harness.records.schema import COLUMNS, Record, Row
from harness.report.columns import UNSETTLED_MARK, WORDS, ShownColumn, abbreviations, write
from harness.report.folder_changes import (
    MISSING,
    SPEED,
    Change,
    Changes,
    Pair,
    changes,
    configuration_changes,
    environment,
    origin,
    pairs,
)
from harness.report.tables import fit_width, rich_table
from harness.report.text import RATIO, deviation_text, format_numbers, sentence
from harness.util.files import JsonObject
from harness.util.text import count_text, sanitize

EXACT = 0.01  # the relative tolerance of figures that a machine's load does not change

_EXACT_COLUMNS = ("_bytes", "_flops", "in_flight_micro_batches", "_retries", "_ooms")  # the ends of their names

# These have columns of their own; the last depends on what else a process imported.
_SHOWN = {"peak_allocated_bytes", "communication_bytes", "peak_rss_bytes"}

# A run is defined by these parts of its configuration. All others may differ between two folders and leave runs to
# compare, if they differ for all of them.
_DEFINING = ("model.", "strategy.", "checkpointing.")

# The figures of the table: column, word of its header, kind, and when A's column and that of the ratio are left out.
_FIGURES = (
    (SPEED, "tokens", "number", 7, 0),
    ("peak_allocated_bytes", "peak", "bytes", 5, 10),
    ("communication_bytes", "sent", "sent", 1, 9),
)

_DEVIATIONS = (("loss_deviation", "loss", 3), ("grad_deviation", "gradient", 4))


def print_names(sides: Mapping[str, Sequence[Record]], out: Console) -> None:
    """Print the names of both sides, which say what is A and what is B, with the number of their runs."""
    _print_notes(
        {f"{name}, {count_text(len(records), 'run')}": True for name, records in sides.items()}, out, soft_wrap=True
    )


def print_comparison(first: Sequence[Record], second: Sequence[Record], out: Console) -> None:
    """Print what differs between two folders, called A and B: versions and settings, pairs of runs, and other runs.

    Args:
        first: The records of A.
        second: The records of B.
        out: Where to print.
    """
    configuration = configuration_changes(first, second)
    for title, part_of in (("Versions", origin), ("Environment", environment)):
        _print_changes(title, changes([*map(part_of, first)], [*map(part_of, second)]), out)
    _print_changes("Configuration shared by all runs", configuration, out)
    ignored = [key for key, values in configuration.items() if not key.startswith(_DEFINING) or "-" in values]
    _print_pairs(pairs(first, second, ignored), out)


def _print_changes(title: str, differences: Changes, out: Console) -> None:
    if not differences:
        out.print(Text(f"{title}: no difference"))
        return
    headers = (Column(Text(header), overflow="fold") for header in (title, "A", "B"))
    table = Table(*headers, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for key, values in sorted(differences.items()):
        table.add_row(*(Text(sanitize(text)) for text in (key, *values)))
    out.print(table)


def _print_pairs(lines: Sequence[Pair], out: Console) -> None:
    """Print the table of the pairs, its legend, notes on the pairs, and the lines without a pair."""
    matched = [pair for pair in lines if MISSING not in (pair.first, pair.second)]
    columns, left_out = fit_width(_columns(matched), out.width)
    if matched:
        out.print(rich_table(columns))
    unranked = [pair.label for pair in matched if not pair.speeds and pair.ratio(SPEED)]
    legend = {
        sentence("no_pairs"): not matched,
        sentence("left_out", width=out.width, titles=[shown.title for shown in left_out]): left_out,
        abbreviations(columns): abbreviations(columns),
        sentence("ratio_of_sides"): matched,
        sentence("uncertain", mark=UNSETTLED_MARK): any(pair.is_unsettled for pair in matched),
        sentence("unranked_pairs", labels=unranked, total=len(matched)): unranked,
    }
    _print_notes(legend, out)
    for pair in matched:
        _print_notes(_notes(pair), out)
    alone = {
        "A": [f"{pair.label} {_status(pair.first.row)}" for pair in lines if pair.second is MISSING],
        "B": [f"{pair.label} {_status(pair.second.row)}" for pair in lines if pair.first is MISSING],
    }
    _print_notes({sentence("only_in", side=side, runs=runs): runs for side, runs in alone.items()}, out)


def _print_notes(notes: Mapping[str, object], out: Console, soft_wrap: bool = False) -> None:
    """Print a line for each note, if what stands under it is true."""
    for note, is_needed in notes.items():
        if is_needed:
            out.print(Text(sanitize(note)), soft_wrap=soft_wrap)


def _columns(matched: Sequence[Pair]) -> list[ShownColumn]:
    """Return the columns of both values and of B over A, without those that are empty throughout.

    Where width is short, A's value is left out before B's.
    """
    columns = [
        ShownColumn("run", [sanitize(pair.label) for pair in matched], number=False),
        ShownColumn("status", [_change(*map(_status, pair.rows)) for pair in matched], number=False),
    ]
    for key, word, kind, drop, drop_ratio in _FIGURES:
        title, values = WORDS[word].short, [row.get(key) for pair in matched for row in pair.rows]
        (both,) = write([ShownColumn(f"{title} {{unit}}", values, kind)])
        mark = UNSETTLED_MARK if key == SPEED else ""
        ratios = [format_numbers([pair.ratio(key)], RATIO)[0] + mark * pair.is_unsettled for pair in matched]
        columns += [
            *(ShownColumn(f"{both.title}\n{side}", both.cells[n::2], drop=drop + n) for n, side in enumerate("AB")),
            ShownColumn(f"×\n{title}", ratios, drop=drop_ratio),
        ]
    for key, word, drop in _DEVIATIONS:
        cells = [_change(*(deviation_text(row.get(key)) for row in pair.rows)) for pair in matched]
        columns.append(ShownColumn(f"{WORDS[word].on_one_line}\nA → B", cells, drop=drop))
    return [shown for shown in columns if shown.is_known]


def _change(before: str, after: str) -> str:
    """Return the texts of A and of B, once where they are the same."""
    return before if before == after else f"{before or '-'} → {after or '-'}"


def _status(row: Row) -> str:
    """Return the status, followed by how many repeats have it if not all do, as in "ok 2/3"."""
    return str(row["status"]) + ("" if row["runs_alike"] == row["runs"] else f" {row['runs_alike']}/{row['runs']}")


def _notes(pair: Pair) -> dict[str, object]:
    """Return notes on other figures that changed, on the world size, on failures and on noise, and which are needed."""
    figures = _other_figures(*pair.rows) if pair.is_ok else {}
    sizes = [row.get("world_size") for row in pair.rows]
    notes: dict[str, object] = {
        sentence("other_figures", pair=pair, figures=figures): figures,
        sentence("world_sizes", pair=pair, sizes=sizes): None not in sizes and sizes[0] != sizes[1],
    }
    for side, row, other in zip("AB", pair.rows, reversed(pair.rows), strict=True):
        is_worse = row["status"] not in ("ok", other["status"])
        notes[sentence("failed_side", side=side, pair=pair, row=row)] = is_worse
        notes[sentence("noisy_side", side=side, pair=pair, row=row)] = row.get("noise_warning")
    return notes


def _other_figures(first: Row, second: Row) -> dict[str, tuple[Any, Any]]:
    """Return the figures of A and of B that no column shows and that differ by more than EXACT, by their columns."""
    names = [name for name in sorted(first) if name.endswith(_EXACT_COLUMNS) and name not in _SHOWN]
    both = {name: (first[name], second.get(name)) for name in names}
    return {name: (a, b) for name, (a, b) in both.items() if None not in (a, b) and abs(b - a) > EXACT * abs(a)}


def print_regressions(check: JsonObject, out: Console) -> None:
    """Print one line for each change, worst first, then what was compared, and whether the baseline is held."""
    limit, regressed = _limit_text(check), {change.run for change in check["changes"] if change.verdict == "regressed"}
    notes = {
        sentence("regressed", runs=regressed, check=check, limit=limit): regressed,
        sentence("holds", limit=limit): check["holds"],
    }
    _print_check(check, notes, out)


def print_reproduction(check: JsonObject, other_ends: Sequence[Pair], out: Console) -> bool:
    """Print what differs between a comparison and its repetition, and return whether nothing does beyond the limit.

    Args:
        check: What changed, by folder_changes.compare().
        other_ends: The runs that did not end ok the first time, and end otherwise now.
        out: Where to print.
    """
    beyond = [change.run for change in check["changes"] if abs(change.growth) > check["limit"]]
    labels = [*dict.fromkeys([*beyond, *(pair.label for pair in other_ends)])]
    notes = {
        sentence("other_ends", pairs=other_ends): other_ends,
        sentence("not_reproduced", labels=labels): labels,
        sentence("reproduced", limit=_limit_text(check)): not labels,
    }
    _print_check(check, notes, out)
    return not labels


def _limit_text(check: JsonObject) -> str:
    return f"{100 * check['limit']:g} %"


def _print_check(check: JsonObject, conclusion: Mapping[str, object], out: Console) -> None:
    """Print one line for each change, what was compared, and the conclusion."""
    settings = {sentence("other_setting", key=key, values=of): True for key, of in check["configuration"].items()}
    _print_notes(settings, out, soft_wrap=True)
    rows = [
        (
            change.verdict.replace("limit", _limit_text(check)),
            sanitize(change.run),
            COLUMNS[change.column].title,
            _growth_text(change),
            sanitize(sentence("figure", name=change.column, figure=change.before)),
            sanitize(sentence("figure", name=change.column, figure=change.after)),
        )
        for change in check["changes"]
    ]
    if rows:
        cells = zip(("verdict", "run", "figure", "change", "A", "B"), zip(*rows, strict=True), strict=True)
        columns = [ShownColumn(header, texts, number=header == "change") for header, texts in cells]
        out.print(rich_table(fit_width(columns, out.width)[0]))
    notes = {
        sentence("judged", check=check): True,
        **{
            sentence("unjudged_speeds", labels=labels, check=check, reason=reason): labels
            for reason, labels in check["unjudged_speeds"].items()
        },
        sentence("unjudged_runs", labels=check["new"]): check["new"],
        **conclusion,
    }
    _print_notes(notes, out, soft_wrap=True)


def _growth_text(change: Change) -> str:
    """Return the change relative to the baseline in percent, with enough decimals to show a small one."""
    if math.isinf(change.growth):
        return ""
    share = -change.growth if change.column == SPEED else change.growth
    return f"{100 * share:+.{1 if abs(share) >= 0.0005 else 4}f} %"
