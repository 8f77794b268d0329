"""The file runs.parquet: the rows of runs.csv with their types."""

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
    """Write runs.parquet, with one row per run, and return its path.

    Unknown values are null. Text is on one line, as in runs.csv but without its quotes.
    """
    columns = {name: _column(name, values) for name, values in columns_of(rows).items()}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    path = ComparisonFolder(results_dir).runs_parquet
    atomic_write_bytes(path, sink.getvalue().to_pybytes())
    return path


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    """Return a column with its declared type, else with the one type that its values share, else as text."""
    dtype = column_type(name)
    if dtype is None:
        types = {type(value) for value in values if value is not None}
        dtype = types.pop() if len(types) == 1 else float if types == {int, float} else str
    if dtype is float:
        values = [None if value is None else float(value) for value in values]
    if dtype is str:
        texts = {text: sanitize(text) for text in {str(value) for value in values if value is not None}}
        values = [None if value is None else texts[str(value)] for value in values]
    return pa.array(values, type=_TYPES[dtype])
