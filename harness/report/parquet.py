"""runs.parquet: the rows of runs.csv with their types."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.records.columns import column_type
from harness.records.run_folder import ComparisonFolder
from harness.records.runs_csv import columns_of
from harness.records.schema import Row
from harness.util.files import atomic_write_bytes
from harness.util.text import sanitize

_TYPES: dict[type | None, pa.DataType] = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
}


def write_runs_parquet(results_dir: Path, rows: Sequence[Row]) -> Path:
    """Writes runs.parquet: a row a run, unknown values null, text on one line as in runs.csv but for its quote."""
    columns = {name: _column(name, [row.get(name) for row in rows]) for name in columns_of(rows)}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    path = ComparisonFolder(results_dir).runs_parquet
    atomic_write_bytes(path, sink.getvalue().to_pybytes())
    return path


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    """A row's own column has the type of its values where they share one, else it is text."""
    kind = column_type(name)
    if kind is None:
        kinds = {type(value) for value in values if value is not None}
        kind = kinds.pop() if len(kinds) == 1 else float if kinds == {int, float} else str
    if kind is float:
        values = [None if value is None else float(value) for value in values]
    if kind is str:
        values = [None if value is None else sanitize(value) for value in values]
    return pa.array(values, type=_TYPES[kind])
