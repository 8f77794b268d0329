"""The typed configuration of composed values; a Hugging Face model is traced for what the cost model needs."""

import importlib
from dataclasses import replace
from typing import Any

import yaml

from harness.config.command import read_run_config
from harness.config.from_dict import ConfigValues, GroupValues, from_dict
from harness.config.locations import files_in
from harness.config.model import ModelConfig
from harness.config.schema import Device, PrecisionConfig, RunConfig
from harness.config.strategy import StrategyConfig
from harness.util.redact import keys_holding_secrets
from harness.util.text import UserError


def resolve_run_config(values: ConfigValues) -> RunConfig:
    """Return what composed values measure; a model of model.family=hf is filled in from its own configuration.

    Raises UserError for impossible values, and for a secret, which the run file and the record would store.
    """
    for key in keys_holding_secrets(values):
        raise UserError(
            f"{key} holds a secret, which the run file and the record would store: set it in the library's"
            " own configuration"
        )
    if (values.get("strategy") or {}).get("name") == "search":
        raise UserError("strategy=search is searched by `harness plan`, which starts nothing: choose another strategy")
    if values.get("launch") == "script":
        raise UserError("launch=script is not known: choose hydra/launcher=slurm hydra.launcher.submit=false")
    model = values.get("model")
    if isinstance(model, dict) and model.get("family") == "hf" and not model.get("hf_info"):
        train = dict(values.get("train") or {})
        model = _fill_hf_model(model, train.get("seq_len"))
        if train.get("seq_len") is None:
            train["seq_len"] = model["context_length"]
        values = values | {"model": model, "train": train}
    return read_run_config(values)


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
