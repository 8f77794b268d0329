"""The entry point of a virtual rank, in the place of the worker's: a rank whose other ranks do not exist."""

import importlib
from pathlib import Path


def virtual_entry(run_dir: str) -> None:
    """Run one rank of a virtual run. Its code is imported only here, because the parent does not need the imports."""
    importlib.import_module("harness.simulator.virtual_rank").run_next_rank(Path(run_dir))
