"""The table of datasheets in devices.toml: what a device can do, by the name that CUDA reports or a shorter one."""

import difflib
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from harness.config.from_dict import GroupValues
from harness.config.locations import files_in
from harness.util.text import UserError

MOST_SUGGESTIONS = 5

MAKERS = ("nvidia", "geforce", "tesla", "amd", "instinct")  # words that say little of a device

FIGURES = ("memory", "memory_bandwidth", "intra_node_bandwidth")


@cache
def datasheets() -> dict[str, dict[str, Any]]:
    """Return what the table says of every device, by its exact name, in the order of the table."""
    groups = tomllib.loads(Path(__file__).with_name("devices.toml").read_text("utf-8"))["device"]
    return {name: group | device for group in groups for name, device in group.pop("names").items()}


def words_of(name: str) -> list[str]:
    """Return the words of a device's name in lower case; 4090 and RTX-4090 are words of NVIDIA GeForce RTX 4090."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=rtx)(?=\d)", " ", name.lower()))


def device_named(name: str) -> str:
    """Return the exact name of the first device in the table that has all words of a name. Raises UserError."""
    words = words_of(name)
    for device, sheet in datasheets().items():
        if words and set(words) <= set(words_of(f"{device} {sheet.get('words', '')}")):
            return device
    spellings = {" ".join(word for word in words_of(device) if word not in MAKERS): device for device in datasheets()}
    close = difflib.get_close_matches(" ".join(words), spellings, MOST_SUGGESTIONS, 0.4)
    known = ", ".join(spellings[spelling] for spelling in close) or "a device such as RTX 4090"
    raise UserError(
        f"cluster.hardware.device_name={name} has no datasheet here: choose {known}, or give its figures in a file of"
        " conf/cluster"
    )


def with_datasheet(cluster: GroupValues) -> GroupValues:
    """Return the values of a cluster with what a datasheet says in the place of null, under the device's name.

    What no datasheet has is that of the cluster with the nearest architecture. A cluster whose hardware has all figures
    stays as it is. Raises UserError for a device that is not in the table.
    """
    hardware = cluster.get("hardware")
    if not isinstance(hardware, dict) or None not in (hardware.get(key, "") for key in (*FIGURES, "fitted")):
        return cluster
    if hardware["device_name"] is None:
        raise UserError(
            "cluster=gpu needs the name of a GPU: add cluster.hardware.device_name=4090, or choose cluster=local for"
            " this machine"
        )
    name = device_named(str(hardware["device_name"]))
    sheet = datasheets()[name]
    nearest = yaml.safe_load(files_in("cluster")[sheet["like"]].read_text())["hardware"]
    known = {key: sheet[key] for key in (*FIGURES, "host_bandwidth")} | {
        "compute_capability": int(sheet["capability"].partition(".")[0]) if "capability" in sheet else None,
        "sources": sheet["sources"],
        "fitted": nearest["fitted"],
        "fitted_to": f"not measured on this device: as {sheet['like']}.yaml, the nearest architecture",
    }
    filled = hardware | {key: known.get(key) for key, value in hardware.items() if value is None}
    filled = {key: value for key, value in filled.items() if value is not None} | {"device_name": name}
    return cluster | {"name": cluster.get("name") or name, "hardware": filled}
