"""Models of Hugging Face's transformers library, from a local configuration and with random weights: never a network.

The parent asks a model once, built of fake tensors, for its shapes, plan and operations; ranks build it from the same
configuration, parameters without memory and buffers (rotary frequencies, masks) with their values.
"""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.config import ModelConfig
from harness.errors import UserError, one_line

ATTENTION = {"flash": "sdpa", "eager": "eager"}
# Keys of our own families, which a configuration of the library's says in its own words.
OWN_KEYS = ("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "initializer_range")


def library() -> Any:
    """Raises UserError if it is not there."""
    try:
        import transformers
    except ImportError:
        raise UserError("model=hf needs the transformers library: pip install 'harness[hf]'") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers


def filled(model: dict[str, Any], seq_len: int | None) -> dict[str, Any]:
    """The values of conf/model/hf.yaml with all that the model at `path` says of itself.

    Raises UserError if there is none, or if it is no causal language model.
    """
    from harness.asking import ask

    path = model.get("path")
    if not path:
        raise UserError("model.path is missing: name a folder with a config.json, or such a file")
    values = read(Path(str(path)).expanduser())
    for key in ("tie_word_embeddings", "vocab_size", "num_hidden_layers"):
        if model.get(key) is not None:
            values[key] = model[key]
    config = configuration(values, path)
    if model.get("dropout") is not None:
        set_dropout(config, float(model["dropout"]), path)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(ModelConfig)}
    for key in OWN_KEYS:
        if model.get(key, defaults[key]) != defaults[key]:
            raise UserError(
                f"model.{key}={model[key]} is no key of model=hf: choose it in the file at model.path={path}"
            )
    sizes = {key: getattr(config, key, None) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    for key, value in sizes.items():
        if not isinstance(value, int):
            raise UserError(f"model.path={path}: its configuration says no {key}, choose a decoder that has it")
    context = model.get("context_length") or getattr(config, "max_position_embeddings", None) or seq_len
    if not isinstance(context, int):
        raise UserError(f"model.path={path} says no max_position_embeddings: give model.context_length a value")
    attention = model.get("attention") or "flash"
    asked = ask(config, ATTENTION.get(attention, attention), seq_len or context, path)
    count = sum(torch.Size(shape).numel() for shape in asked.shapes.values())
    return {
        **sizes,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "context_length": context,
        "initializer_range": float(getattr(config, "initializer_range", 0.02)),
        "parameters": count,
        "source": f"its own configuration, of the type {config.model_type}",
        "family": "hf",
        "attention": attention,
        "path": str(path),
        "name": model.get("name") or name_of(Path(str(path)).expanduser(), values, count),
        "dropout": max(dropouts(config).values(), default=0.0),
        "asked": vars(asked),
    }


def read(path: Path) -> dict[str, Any]:
    """A config.json, by itself or in a folder."""
    if not path.exists():
        raise UserError(f"model.path={path} does not exist: name a folder with a config.json, or such a file")
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path} holds no readable config.json ({one_line(error)}): name one") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(f"model.path={path} says no model_type: name the config.json of a Hugging Face model")
    return values


def configuration(values: dict[str, Any], path: object) -> Any:
    """The library's own configuration object."""
    transformers = library()
    try:
        config = transformers.AutoConfig.for_model(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        known = f"transformers {transformers.__version__}"
        raise UserError(f"model.path={path} is no configuration that {known} takes: {one_line(error)}") from None
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping or getattr(
        config, "is_encoder_decoder", False
    ):
        raise UserError(
            f"model.path={path} with model_type={config.model_type} is no causal language model: choose one"
        )
    return config


def dropouts(config: Any) -> dict[str, float]:
    """Every share of something that the model drops, above 0."""
    named = ((key, value) for key, value in config.to_dict().items() if re.search(r"dropout|pdrop|layerdrop", key))
    ends = ("classifier", "summary")  # of heads for other purposes
    shares = {key: value for key, value in named if not key.startswith(ends) and isinstance(value, (int, float))}
    return {key: float(value) for key, value in shares.items() if value > 0}


def set_dropout(config: Any, share: float, path: object) -> None:
    found = dropouts(config)
    if share and not found:
        raise UserError(
            f"model.dropout={share}: model.path={path} says of nothing that it is dropped, choose null or 0"
        )
    for key in found:
        setattr(config, key, share)


def name_of(path: Path, values: dict[str, Any], parameters: int) -> str:
    """The folder's name, or what the configuration calls itself, or its type and size."""
    given = path.name if path.is_dir() else str(values.get("_name_or_path") or "").rstrip("/").rsplit("/")[-1]
    size = next(
        f"{parameters / unit:.3g}{mark}"
        for unit, mark in ((1e9, "b"), (1e6, "m"), (1e3, "k"), (1, ""))
        if parameters >= unit
    )
    return re.sub(r"[^A-Za-z0-9._-]", "_", given) or f"{values['model_type']}_{size}"


def made(config: Any, attention: str, path: object) -> nn.Module:
    """A model of the library whose call takes token ids and gives logits.

    Raises UserError if it has no such attention.
    """
    from transformers.initialization import no_init_weights

    transformers = library()
    with no_init_weights():
        try:
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32
            )
        except ValueError as error:
            if attention not in str(error) and "attention implementation" not in str(error):
                raise
            other = next(ours for ours, theirs in ATTENTION.items() if theirs != attention)
            reason = f"{config.model_type} has no {attention} attention in transformers"
            raise UserError(f"model.path={path}: {reason}, choose model.attention={other}") from None
    model.tie_weights()
    model.__class__ = decoder(type(model))  # type: ignore[arg-type]
    return model  # type: ignore[no-any-return]


def build(model: ModelConfig) -> nn.Module:
    """The model a run trains: parameters on the meta device, buffers as the library makes them, on the host."""
    from accelerate import init_empty_weights

    assert model.asked is not None
    config = configuration(model.asked.config, model.path)
    with init_empty_weights(include_buffers=False):
        built = made(config, ATTENTION[model.attention], model.path)
    built.tie_weights()  # type: ignore[operator]  # inside, every assignment made another parameter
    return built


@functools.cache
def decoder(base: type) -> type:
    """The library's class with what the harness asks of a model (harness.model.Decoder)."""

    class CausalLM(base):  # type: ignore[misc]
        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = super().forward(input_ids=tokens, use_cache=False).logits
            return logits

        def blocks(self) -> dict[int, nn.Module]:
            return dict(enumerate(decoder_layers(self)[1]))

        def ends(self) -> list[list[nn.Module]]:
            if self.config.tie_word_embeddings:
                return [[]]
            return [[self.get_input_embeddings()], [self.get_output_embeddings()]]

    CausalLM.__name__ = base.__name__
    return CausalLM


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of layers that hold most of the model, and its path."""
    lists = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return max(lists, key=lambda found: sum(parameter.numel() for parameter in found[1].parameters()))
