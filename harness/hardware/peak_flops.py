"""Peak FLOP/s of devices, by the exact name that CUDA reports; peak_flops.toml has the figures and their sources."""

import tomllib
from functools import cache
from pathlib import Path


@cache
def peaks() -> dict[str, dict[str, float]]:
    """Return the FLOP/s of every known device by torch's dtype."""
    devices = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["device"]
    return {name: device["flops"] for device in devices for name in device["names"]}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of one device in a dtype by torch's name, or None if this exact device is unknown.

    Drivers before 470 leave out the maker of the newer boards: A100-SXM4-40GB.
    """
    known = peaks().get(device_name) or peaks().get(f"NVIDIA {device_name}") or {}
    return known.get(dtype)
