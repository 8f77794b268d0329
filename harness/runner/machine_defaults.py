"""The settings that are `auto` until the machine of a run is known, and their values there.

A configuration has no `auto` in it: a run is identified and recorded by the values that it trains with.
"""

from typing import Any

import yaml

from harness.config.locations import conf_folders, files_in
from harness.config.schema import Device
from harness.config.values import ConfigValues

AUTO = "auto"

BF16_CAPABILITY = (8, 0)  # the first compute capability that computes in bfloat16

# The keys of train that may be auto. On GPUs a step of seven billion parameters then takes a few seconds on eight
# devices, enough for every device's energy counter and for a 95th percentile, and the batch divides evenly over 1, 2,
# 3, 4, 6, 8, 12, 16, 24 and 48 ranks, with six micro-batches for each of eight pipeline stages. The batch does not
# depend on the number of ranks, because runs over different numbers are compared as one training. micro_batch=auto is
# for small models: two CPU ranks take one micro-batch each, and the batch for GPUs divides evenly over up to 24 ranks.
TRAIN_DEFAULTS: dict[Device, dict[str, int]] = {
    "cpu": {"global_batch": 8, "micro_batch": 4, "steps": 10, "warmup_steps": 3},
    "cuda": {"global_batch": 48, "micro_batch": 2, "steps": 30, "warmup_steps": 5},
}


def computes_bf16(device: Device, compute_capability: tuple[int, int] | None) -> bool:
    """Return whether a device computes in bfloat16 at full speed.

    torch emulates it on NVIDIA's devices before Ampere (torch.cuda.is_bf16_supported), many times slower. AMD's devices
    have no compute capability. CPUs differ, so that none is expected to have it.
    """
    return device == "cuda" and (compute_capability is None or compute_capability >= BF16_CAPABILITY)


def resolve_auto(
    values: ConfigValues, device: Device, compute_capability: tuple[int, int] | None = None
) -> ConfigValues:
    """Return composed values with every `auto` replaced by its value on such a device.

    precision=auto is bf16_mixed where the device computes in bfloat16, else fp32.
    """
    resolved = values.copy()
    precision: Any = values.get("precision")
    if isinstance(precision, dict) and precision.get("name") == AUTO:
        name = "bf16_mixed" if computes_bf16(device, compute_capability) else "fp32"
        preset = yaml.safe_load(files_in(conf_folders(), "precision")[name].read_text())
        resolved["precision"] = precision | preset
    train: Any = values.get("train")
    if isinstance(train, dict):
        defaults = TRAIN_DEFAULTS[device]
        resolved["train"] = {key: defaults.get(key, value) if value == AUTO else value for key, value in train.items()}
    return resolved
