"""Declarative experiment sweeps over distributed training strategies, each one measured and proven.

`import harness` offers `load`, `estimate_memory`, `RunConfig`, `Layout`, `MemoryEstimate` and `UserError` of
harness.api. They are imported when they are first used, so that `harness --help` imports neither Hydra nor pandas.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_API = ("Layout", "MemoryEstimate", "RunConfig", "UserError", "estimate_memory", "load")


def __getattr__(name: str) -> Any:
    """Return a part of the API, which harness/__init__.pyi lists with its types."""
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.api"), name)


def __dir__() -> list[str]:
    """Return the names of the API beside those of the module."""
    return sorted({*globals(), *_API})
