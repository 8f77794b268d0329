"""The rows of plans as comma-separated values: for format=csv, and for the table beside the report of a search."""

import csv
import io
from collections.abc import Sequence

from harness.planner.row import planned_row
from harness.planner.search import SearchResult
from harness.records.columns import COLUMN_NAMES
from harness.records.runs_csv import csv_cell
from harness.records.schema import Row

# The columns of plans.csv before those of a planned row. A layout may have a place in one of the lists or in both.
PLACE_COLUMNS = {
    "place_among_best": "The place among the fastest layouts that fit, from 1; empty for all others.",
    "place_on_front": "The place on the front of memory against speed, from 1; empty for all others.",
}


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as a table of comma-separated values."""
    text = io.StringIO()
    writer, names = csv.writer(text, lineterminator="\n"), _columns_of(rows)
    writer.writerow(names)
    writer.writerows([csv_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def _columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns that these rows have: places, those of runs.csv in their order, and those beyond it."""
    names = dict.fromkeys(name for row in rows for name in row)
    first = [name for name in (*PLACE_COLUMNS, *COLUMN_NAMES) if name in names]
    return first + [name for name in names if name not in first]


def rows_of_search(result: SearchResult) -> list[Row]:
    """Return a row for each of the best layouts and of those on the front, each once, with its places."""
    entries = {id(entry): entry for entry in (*result.best, *result.front)}
    best, front = ({id(entry): place for place, entry in enumerate(shown, 1)} for shown in (result.best, result.front))
    return [
        {"place_among_best": best.get(key), "place_on_front": front.get(key)} | planned_row(entry)
        for key, entry in entries.items()
    ]
