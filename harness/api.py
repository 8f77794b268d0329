"""The API of `import harness` for notebooks and scripts: recorded runs as a table, and the memory a run needs."""

from pathlib import Path
from typing import Any

import pandas as pd

from harness.config.from_dict import from_dict
from harness.config.hydra import compose_values
from harness.config.schema import ClusterConfig, Device, RunConfig
from harness.cost_model.memory import MemoryEstimate
from harness.cost_model.memory import estimate_memory as estimate_config_memory
from harness.engines.base import load_engine
from harness.hardware.machine import CPU_RANKS
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout, resolve_layout
from harness.records.bundle import unpacked
from harness.records.schema import column_type
from harness.records.store import columns_of, read_runs, rows_of
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.util.text import UserError

__all__ = ["Layout", "MemoryEstimate", "RunConfig", "UserError", "estimate_memory", "load"]

DTYPES: dict[type | None, str] = {str: "string", bool: "boolean", int: "Int64", float: "Float64"}


def load(folder: str | Path) -> pd.DataFrame:
    """Return the runs of a comparison, such as "results/quickstart", with one row per run.

    The columns are those of runs.csv, in pandas' nullable types: an unknown value is NA. Records that cannot be read
    are left out; their problems are in `.attrs["problems"]`. A folder without records, as a published one, is read from
    its runs.csv, and a bundle of `harness report --bundle` as it is. Raises UserError if there is no such folder.
    """
    with unpacked(Path(folder)) as folders:
        loaded = read_runs(*folders)
    columns = columns_of(rows_of(loaded.records))
    table = pd.DataFrame({name: _typed_column(name, values) for name, values in columns.items()})
    table.attrs["problems"] = loaded.problems
    return table


def estimate_memory(*overrides: str) -> MemoryEstimate:
    """Return the memory that the cost model predicts for the rank with the highest peak, in bytes.

    `overrides` are those of the command line, such as `"model=7b", "strategy=zero3", "world_size=8"`. This function
    neither imports torch nor examines this machine: a cluster that does not name its devices counts as one CPU with
    two ranks. Raises UserError for a configuration that is impossible.
    """
    config, device = compose_run_config(*overrides)
    cluster = config.cluster
    ranks_per_node = cluster.gpus_per_node or CPU_RANKS
    layout = resolve_layout(config.strategy, config.world_size or cluster.nodes * ranks_per_node)
    for problem in incompatibilities(config, layout):
        raise UserError(problem)
    widths = load_engine(layout.engine).state_widths(config, layout)
    return estimate_config_memory(config, layout, widths, device)


def compose_run_config(*overrides: str) -> tuple[RunConfig, Device]:
    """Return the configuration that a command line with these overrides has, and its device. Raises UserError.

    A cluster that names GPUs has devices that compute in bfloat16; one that names nothing is a CPU.
    """
    values = compose_values(*overrides)
    cluster = from_dict(ClusterConfig, values["cluster"], "cluster")
    has_gpus = cluster.device == "cuda" or (cluster.device == "auto" and cluster.gpus_per_node is not None)
    device: Device = "cuda" if has_gpus else "cpu"
    return resolve_run_config(resolve_auto(values, device)), device


def _typed_column(name: str, values: list[Any]) -> Any:
    """Return the values of a column as a pandas array; an unregistered column has the type that its values suggest."""
    dtype: Any = DTYPES.get(column_type(name))
    return pd.array(values, dtype=dtype) if dtype else pd.Series(values, dtype=object).convert_dtypes()
