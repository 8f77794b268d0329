"""The kind of the installed torch, determined without the second that importing it takes."""

import importlib.util
import runpy
from importlib.metadata import version
from pathlib import Path


def is_built_for_gpus() -> bool:
    """Return whether the installed torch is a build for GPUs, by the file that states its version."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True  # importing it says what is wrong
    versions = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return versions.get("cuda") is not None or versions.get("hip") is not None


def torch_release() -> tuple[int, int]:
    """Return the first two numbers of the installed torch's version."""
    major, minor, *_ = version("torch").split(".")
    return int(major), int(minor)
