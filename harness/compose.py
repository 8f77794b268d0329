"""Between Hydra and the harness: what composition starts from, and plain values of what was composed."""

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import yaml

from harness.config import ModelConfig, RunConfig
from harness.errors import UserError, one_line
from harness.redact import holders
from harness.typed import from_dict

ROOT = Path(__file__).resolve().parents[1]


def defaults_of(kind: type) -> dict[str, Any]:
    """A group's keys that have a default, so that the command line may set those that no YAML file mentions."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        entry = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found[name] = defaults_of(hint)
        elif entry.default is not dataclasses.MISSING:
            found[name] = entry.default
        elif entry.default_factory is not dataclasses.MISSING:
            found[name] = entry.default_factory()
    return found


def register() -> None:
    """Makes the dataclasses' defaults what conf/config.yaml starts from, under the name `defaults_of_groups`.

    In a file ${harness.root:} is where this project lies, and ${harness.most:2,${cluster.nodes}} the larger of both.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("harness.root", lambda: str(ROOT), replace=True)
    OmegaConf.register_new_resolver("harness.most", max, replace=True)

    ConfigStore.instance().store(name="defaults_of_groups", node=defaults_of(RunConfig))


def plain(composed: Any) -> dict[str, Any]:
    """What Hydra composed as plain values, every interpolation resolved. Raises UserError where one cannot be."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(one_line(error)) from None
    return values


def run_config(values: dict[str, Any]) -> RunConfig:
    """The configuration of these values; a model from outside is asked what it is.

    Raises UserError if there can be none, or if it would write down a secret.
    """
    for key in holders(values):
        raise UserError(f"{key} holds a secret, which run and record would keep: give it to the library in its own way")
    model = values.get("model")
    if isinstance(model, dict) and model.get("family") == "hf" and not model.get("asked"):
        from harness import huggingface

        train = dict(values.get("train") or {})
        found = huggingface.filled(model, train.get("seq_len"))
        if train.get("seq_len") is None:
            train["seq_len"] = found["context_length"]
        values = values | {"model": found, "train": train}
    made: RunConfig = from_dict(RunConfig, values)
    return made


def models() -> list[ModelConfig]:
    """The models there are files of, for saying which would fit."""
    found = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "conf" / "model").glob("*.yaml"))]
    return [from_dict(ModelConfig, values) for values in found if values["family"] != "hf"]  # of a size yet unknown


def folder_of(values: dict[str, Any]) -> Path:
    """Where the runs of a comparison go. Raises UserError for a name that would lead elsewhere."""
    name = str(values.get("name"))
    rule = "cannot name a folder of results: choose letters, digits, '.', '_' and '-', first a letter or digit"
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is None:
        raise UserError(f"name={name} {rule}")
    return Path(str(values.get("results_dir"))) / name
