"""TODO harness.runner.resolve."""

import importlib
from collections.abc import Callable
from typing import Any

import yaml

from harness.config.from_dict import from_dict
from harness.config.locations import conf_folders, files_in
from harness.config.schema import ModelConfig, RunConfig
from harness.util.errors import UserError
from harness.util.redact import keys_holding_secrets


def resolve_run_config(values: dict[str, Any]) -> RunConfig:
    """The configuration of these values; a model from outside is asked what it is.

    Raises UserError if there can be none, or if it would write down a secret.
    """
    for key in keys_holding_secrets(values):
        raise UserError(f"{key} holds a secret, which run and record would keep: give it to the library in its own way")
    model = values.get("model")
    if isinstance(model, dict) and model.get("family") == "hf" and not model.get("asked"):
        train = dict(values.get("train") or {})
        found = _describe_hf_model()(model, train.get("seq_len"))
        if train.get("seq_len") is None:
            train["seq_len"] = found["context_length"]
        values = values | {"model": found, "train": train}
    made: RunConfig = from_dict(RunConfig, values)
    return made


def load_model_presets() -> list[ModelConfig]:
    """The models there are files of, for saying which would fit."""
    found = [yaml.safe_load(path.read_text()) for path in files_in(conf_folders(), "model").values()]
    return [from_dict(ModelConfig, values) for values in found if values["family"] != "hf"]  # of a size yet unknown


def _describe_hf_model() -> Callable[[dict[str, Any], int | None], dict[str, Any]]:
    """Return the function that fills the values of a Hugging Face model; it loads torch, so it is imported by name."""
    describe: Callable[[dict[str, Any], int | None], dict[str, Any]]
    describe = importlib.import_module("harness.models.hf").fill_model_config
    return describe
