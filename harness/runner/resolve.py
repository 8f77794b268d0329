"""The typed configuration of composed values and the machine that they are for: the one at hand, or a described one.

No device of the machine at hand is initialized. A Hugging Face model is traced for what the cost model needs.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import yaml

from harness.config.command import read_run_config
from harness.config.from_dict import ConfigValues, GroupValues, from_dict
from harness.config.locations import files_in
from harness.config.model import ModelConfig
from harness.config.model_files import require_library
from harness.config.schema import ClusterConfig, Device, PrecisionConfig, RunConfig
from harness.config.strategy import StrategyConfig
from harness.hardware.cuda_devices import CudaDevice, find_cuda_devices, wait_for_release
from harness.hardware.machine import (
    CPU_RANKS,
    Machine,
    described_cluster,
    described_machine,
    is_built_for_gpus,
    lacks_driver,
    usable_cores,
)
from harness.util.redact import keys_holding_secrets
from harness.util.text import UserError, one_line


def resolve_run_config(values: ConfigValues) -> RunConfig:
    """Return what composed values measure; a model of model.family=hf is filled in from its own configuration.

    Raises UserError for impossible values, and for a secret, which the run file and the record would store.
    """
    for key in keys_holding_secrets(values):
        raise UserError(
            f"{key} holds a secret, which the record would store: set it in the library's own configuration"
        )
    if (values.get("strategy") or {}).get("name") == "search":
        raise UserError("strategy=search is searched by `harness plan` alone: choose another strategy")
    if values.get("launch") == "script":
        raise UserError("launch=script is not known: choose hydra/launcher=slurm hydra.launcher.submit=false")
    model = values.get("model")
    if isinstance(model, dict) and model.get("family") == "hf" and not model.get("hf_info"):
        train = dict(values.get("train") or {})
        model = _fill_hf_model(model, train.get("seq_len"))
        if train.get("seq_len") is None:
            train["seq_len"] = model["context_length"]
        values = values | {"model": model, "train": train}
    config = read_run_config(values)
    options = auto_options(config.strategy, config.model.hidden_size)
    return replace(config, strategy=replace(config.strategy, options=options))


def auto_options(strategy: StrategyConfig, hidden_size: int) -> dict[str, Any]:
    """Return the options of a strategy, with sizes in the place of those that are `auto` as the Trainer has them.

    They are elements (transformers/integrations/deepspeed.py: trainer_config_finalize), two of them of stage 3 alone.
    """
    sizes = {"reduce_bucket_size": hidden_size**2}
    if strategy.zero_stage == 3:
        sizes["stage3_prefetch_bucket_size"] = int(0.9 * hidden_size * hidden_size)
        sizes["stage3_param_persistence_threshold"] = 10 * hidden_size
    return {key: sizes.get(key, value) if value == AUTO else value for key, value in strategy.options.items()}


def preset_values(group: str, name: str) -> GroupValues:
    """Return the values of a file of conf/."""
    values: GroupValues = yaml.safe_load(files_in(group)[name].read_text())
    return values


def load_model_presets() -> list[ModelConfig]:
    """Return the models that have a file and a known size, to suggest one that would fit."""
    presets = (preset_values("model", name) for name in files_in("model"))
    return [from_dict(ModelConfig, values, "model") for values in presets if values["family"] != "hf"]


def load_strategy_preset(name: str) -> StrategyConfig:
    """Return the strategy of this name as its file in conf/strategy has it."""
    return from_dict(StrategyConfig, preset_values("strategy", name), "strategy")


def load_precision_preset(name: str) -> PrecisionConfig:
    """Return the precision of this name as its file in conf/precision has it."""
    return from_dict(PrecisionConfig, preset_values("precision", name), "precision")


def with_layers(config: RunConfig, layers: int) -> RunConfig:
    """Return the configuration with another number of layers; a Hugging Face model is traced again.

    Raises UserError if that model's own configuration is no longer at model.path.
    """
    model = replace(config.model, num_hidden_layers=layers)
    if model.family == "hf":
        values = {key: getattr(model, key) for key in _HF_KEYS}
        model = from_dict(ModelConfig, _fill_hf_model(values, config.train.seq_len), "model")
    return replace(config, model=model)


# What a user may set of a Hugging Face model; the rest of its values are those of its own configuration.
_HF_KEYS = (
    *("name", "path", "attention", "dropout", "context_length"),
    *("num_hidden_layers", "vocab_size", "tie_word_embeddings"),
)


def _fill_hf_model(model: GroupValues, seq_len: int | None) -> GroupValues:
    """Return all values of a Hugging Face model; what fills them loads torch, so it is imported by name."""
    require_library()
    filled: GroupValues = importlib.import_module("harness.models.hf").fill_model_config(model, seq_len)
    return filled


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
        resolved["precision"] = precision | preset_values("precision", name)
    train: Any = values.get("train")
    if isinstance(train, dict):
        defaults = TRAIN_DEFAULTS[device]
        resolved["train"] = {key: defaults.get(key, value) if value == AUTO else value for key, value in train.items()}
    return resolved


def machine_of_run(values: ConfigValues, detect: Callable[[ClusterConfig], Machine] | None = None) -> Machine:
    """Return the machine that composed values are for: the one at hand, which `detect` returns.

    A simulation is for the machine that its cluster describes, if it describes one. Raises UserError.
    """
    cluster = from_dict(ClusterConfig, values["cluster"], "cluster")
    if values.get("launch") == "simulated":
        return detect_machine(cluster) if cluster.hardware is None else described_machine(described_cluster(cluster))
    return (detect or detect_machine)(cluster)


def refresh_machine(machine: Machine, cluster: ClusterConfig) -> Machine:
    """Return the machine with the free memory and the devices that this process may use at this moment."""
    current = detect_machine(cluster)
    sharing = machine.sharing if machine.device == "cpu" else 1
    return replace(
        machine,
        free_bytes=tuple(size // sharing for size in current.free_bytes),
        devices=current.devices,
        device_names=current.device_names,
        host_free_bytes=current.host_free_bytes,
    )


def detect_machine(cluster: ClusterConfig) -> Machine:
    """Return this machine as one of the cluster's equal nodes.

    Raises UserError if the cluster wants a device that the machine does not have, if its devices cannot be used, or if
    Slurm gave GPUs to this job that a run on the CPU would leave idle.
    """
    count, is_rocm = count_gpus()
    cuda_devices: Sequence[CudaDevice] = ()
    if cluster.device != "cpu" and count:
        cuda_devices = find_cuda_devices(count, is_rocm)
    hardware, names = cluster.hardware, tuple(device.name for device in cuda_devices)
    if hardware is not None and hardware.device_name not in (names[:1] or ("cpu",)):
        raise UserError(
            f"cluster={cluster.name} describes {hardware.device_name}, and this machine has"
            f" {names[0] if names else 'none'}: type harness plan with the same settings, or choose cluster=local"
        )
    if cluster.device == "cuda" and not cuda_devices:
        raise UserError("cluster.device=cuda needs a CUDA device and this machine has none: choose cpu or auto")
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if cluster.device == "auto" and not cuda_devices and gpus not in ("", "0"):
        raise UserError(
            f"cluster.device=auto finds none of this Slurm job's {gpus} GPUs through torch: install a build of torch"
            " for them, or choose cluster.device=cpu"
        )
    host_free_bytes = psutil.virtual_memory().available
    capabilities = [device.compute_capability for device in cuda_devices]
    return Machine(
        device="cuda" if cuda_devices else "cpu",
        device_name=names[0] if names else "cpu",
        nodes=cluster.nodes,
        ranks_per_node=cluster.gpus_per_node or len(cuda_devices) or CPU_RANKS,
        devices=len(cuda_devices) or count,
        free_bytes=tuple(device.free_bytes for device in cuda_devices) or (host_free_bytes,),
        cores=len(usable_cores()),
        host_free_bytes=host_free_bytes,
        device_bytes=min((device.total_bytes for device in cuda_devices), default=None),
        device_names=names,
        compute_capability=min((number for number in capabilities if number is not None), default=None),
    )


def count_gpus() -> tuple[int, bool]:
    """Return how many GPUs torch counts, and whether it is built for AMD's.

    A build for CPUs sees none, nor one for CUDA without a driver: that is known without the second of importing torch.
    """
    if "torch" not in sys.modules and (not is_built_for_gpus() or lacks_driver()):
        return 0, False
    import torch

    # Without NVML it asks CUDA, which initializes no device either.
    return torch.cuda.device_count(), torch.version.hip is not None


def release_problem(machine: Machine, cluster: ClusterConfig) -> str | None:
    """Wait until this machine's GPUs are as free as before a run; return why they are not, None if they are.

    `machine` has the free memory from before the run.
    """
    if machine.device != "cuda":
        return None
    try:
        return wait_for_release(machine.free_bytes, lambda: detect_machine(cluster).free_bytes)
    except UserError as error:  # a device was lost
        return one_line(error)
