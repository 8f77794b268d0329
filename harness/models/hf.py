"""Models of Hugging Face's transformers library, from a local configuration and with random weights, without a network.

The parent traces a model once, built of fake tensors, which need neither memory nor compute, for its shapes,
tensor-parallel plan and operations. Ranks build it from the same configuration, with parameters on the meta device and
with the values of its buffers (rotary frequencies, masks).
"""

import dataclasses
import itertools
import json
import re
import sys
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.config.from_dict import GroupValues, require
from harness.config.model import HFModelInfo, ModelConfig
from harness.config.model_files import config_file
from harness.cost_model.flops import BACKWARD
from harness.layout.layer_spec import MATRIX_DIMS, SHARD_DIM
from harness.layout.partition import is_expert_weight
from harness.models.activation_checkpoint import checkpoint_block
from harness.models.flop_trace import count_flops
from harness.models.hf_library import ATTENTION_IMPLEMENTATIONS, decoder_layers, instantiate, load_hf_config
from harness.models.layer_trace import trace_layers
from harness.util.text import UserError, one_line, run_command

# The styles of harness.layout.layer_spec by the library's names (transformers/distributed/tensor_parallel.py).
STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
}


# Keys of the built-in families, for which a configuration of the library has its own keys.
MODEL_KEYS = (
    *("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "initializer_range"),
    *("norm_topk_prob", "routing", "router_aux_loss_coef"),
)


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")


def fill_model_config(model: GroupValues, seq_len: int | None) -> GroupValues:
    """Return the values of conf/model/hf.yaml, filled with those of the model at `path`.

    Raise UserError if there is no such model, or if it is not a causal language model.
    """
    path = model.get("path")
    if not path:
        raise UserError("model.path is missing: name a config.json, a folder that has one, or a model in the hub")
    values = read_config_json(str(path))
    config = load_hf_config(values, path)
    changes = {key: model[key] for key in ("tie_word_embeddings", "vocab_size", "num_hidden_layers") if model.get(key)}
    if changes:
        config = load_hf_config(changed_values(config, changes), path)
    if model.get("dropout") is not None:
        set_dropout(config, float(model["dropout"]), path)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(ModelConfig)}
    for key in MODEL_KEYS:
        value, rule = model.get(key, defaults[key]), "cannot be set for model=hf: set it in the file at model.path"
        require(value == defaults[key], f"model.{key}", value, f"{rule}={path}")
    of_model = config.to_dict()
    sizes = {key: of_model.get(config.attribute_map.get(key, key)) for key in SIZES}
    for key, value in sizes.items():
        if not isinstance(value, int):
            raise UserError(f"model.path={path}: its configuration has no {key}; choose a decoder that has it")
    context = model.get("context_length") or getattr(config, "max_position_embeddings", None) or seq_len
    if not isinstance(context, int):
        raise UserError(f"model.path={path} has no max_position_embeddings: set model.context_length")
    attention = model.get("attention") or "flash"
    hf_info = trace_model(config, ATTENTION_IMPLEMENTATIONS.get(attention, attention), seq_len or context, path)
    count = sum(torch.Size(shape).numel() for shape in hf_info.shapes.values())
    experts = expert_count(hf_info)
    width = of_model.get("intermediate_size") or 4 * config.hidden_size  # of each layer in some
    width = of_model.get("moe_intermediate_size", width) if experts else width
    return {
        **sizes,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "intermediate_size": max(width) if isinstance(width, list) else width,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "context_length": context,
        "initializer_range": float(getattr(config, "initializer_range", 0.02)),
        "num_experts": experts,
        "num_experts_per_tok": config.num_experts_per_tok if experts else 0,
        "parameters": count,
        "source": f"the Hugging Face configuration of model type {config.model_type}",
        "family": "hf",
        "adapter": model.get("adapter", {}),
        "attention": attention,
        "path": str(path),
        "name": model.get("name") or default_model_name(str(path), values, count),
        "dropout": max(dropout_fields(config).values(), default=0.0),
        "hf_info": dataclasses.asdict(hf_info),
    }


def read_config_json(path: str) -> dict[str, Any]:
    """Return the values of a model's configuration file; raise UserError if it cannot be read."""
    try:
        values = json.loads(config_file(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path={path} has no readable config.json ({one_line(error)}): name a folder that has one"
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(f"model.path={path} has no model_type: name the config.json of a Hugging Face model")
    return values


def dropout_fields(config: Any) -> dict[str, float]:
    """Return every dropout probability above 0 in the library's configuration, by its key."""
    other_heads = ("classifier", "summary")  # a causal language model has none of these heads
    return {
        key: float(value)
        for key, value in config.to_dict().items()
        if re.search(r"dropout|pdrop|layerdrop", key) and not key.startswith(other_heads)
        if isinstance(value, (int, float)) and value > 0
    }


def set_dropout(config: Any, probability: float, path: object) -> None:
    """Set every dropout probability of the library's configuration; raise UserError if it has none to set."""
    fields = dropout_fields(config)
    if probability and not fields:
        raise UserError(f"model.dropout={probability}: model.path={path} has no dropout of its own; choose null or 0")
    for key in fields:
        setattr(config, key, probability)


def changed_values(config: Any, changes: GroupValues) -> dict[str, Any]:
    """Return the values of a configuration with changes; its lists with an entry for each layer have as many then."""
    values: dict[str, Any] = config.to_dict()
    before, layers = config.num_hidden_layers, changes.get("num_hidden_layers")
    lists = {
        key: list(itertools.islice(itertools.cycle(entries), layers))
        for key, entries in values.items()
        if layers and "layer" in key and isinstance(entries, list) and len(entries) == before
    }
    return values | lists | changes


def default_model_name(path: str, values: dict[str, Any], parameters: int) -> str:
    """Return the name in the hub, or the folder's, or the configuration's own name, or its type and size."""
    local = Path(path).expanduser()
    of_config = str(values.get("_name_or_path") or "").rstrip("/").rsplit("/")[-1]
    name = of_config if local.is_file() else local.resolve().name
    size = next(
        f"{parameters / unit:.3g}{suffix}"
        for unit, suffix in ((1e9, "b"), (1e6, "m"), (1e3, "k"), (1, ""))
        if parameters >= unit
    )
    return re.sub(r"[^A-Za-z0-9._-]", "_", name) or f"{values['model_type']}_{size}"


def trace_model(config: Any, attention: str, seq_len: int, path: object) -> HFModelInfo:
    """Run one sequence forward and backward through a model of fake tensors, and return its shapes, plan and FLOPs.

    Raise UserError if the model cannot run in this way.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            model = instantiate(config, attention, path)
            layers_path, layers = decoder_layers(model)
            require_alike_experts(config, layers, path)
            modules_in_order = record_order(model)
            # No fused attention of a CPU supports dropout, so its recomputation shows in evaluation mode only.
            of_eval, eval_step = count_flops(model.eval(), seq_len)
            of_modules, step = count_flops(model.train(), seq_len)
            recomputed = checkpoint_layers(layers)
            _, checkpointed_step = count_flops(model, seq_len)
            traced_layers = trace_layers(config, attention, seq_len, path)
    except UserError:
        raise
    except Exception as error:  # a library's model can raise anything
        raise UserError(
            f"model.path={path}: this model cannot be traced with model.attention={attention} ({one_line(error)}):"
            " choose another model or attention"
        ) from None
    not_recomputed = {
        f"{layers_path}.{name}": module
        for name, module in layers.named_modules()
        if module._parameters and module not in recomputed
    }
    plan = expand_tensor_plan(model)
    whole = {key: flops for key, flops in of_eval.items() if is_repeated(model.get_submodule(key[0]), key[0], plan)}
    whole_in_layers = {name: flops for (name, _), flops in whole.items() if name.startswith(f"{layers_path}.")}
    in_layers = sum(flops for (name, _), flops in of_modules.items() if name.startswith(f"{layers_path}."))
    divided_kernels = sum(flops for key, flops in of_eval.items() if key[1] and key not in whole)
    scores = eval_step - (1 + BACKWARD) * of_eval.total()
    return HFModelInfo(
        config=json.loads(config.to_json_string()) | {"tie_word_embeddings": bool(config.tie_word_embeddings)},
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        layers=tuple(f"{layers_path}.{index}" for index in range(len(layers))),
        head=next(name for name, module in model.named_modules() if module is model.get_output_embeddings()),  # type: ignore[operator]
        tensor_plan=plan,
        not_recomputed_modules=tuple(not_recomputed),
        not_recomputed_are_linear=all(isinstance(module, nn.Linear) for module in not_recomputed.values()),
        forward_flops=of_modules.total(),
        layers_flops=in_layers,
        step_flops=step,
        attention_recompute_flops=scores,
        checkpoint_recompute_flops=checkpointed_step - step,
        repeated_flops=(
            sum(whole.values()),
            scores - divided_kernels // 2,  # one of a kernel's two products
            sum(flops for name, flops in whole_in_layers.items() if name not in not_recomputed),
        ),
        modules_in_order=tuple(modules_in_order),
        traced_layers=traced_layers,
    )


def require_alike_experts(config: Any, layers: nn.ModuleList, path: object) -> None:
    """Raise UserError for a mixture of experts of another kind than is trained here: stacked ones, in all layers alike.

    Its attention is ordinary: it has neither latent vectors nor sinks.
    """
    shapes = [{name: parameter.shape for name, parameter in layer.named_parameters()} for layer in layers]
    stacked = [name for name, shape in shapes[-1].items() if is_expert_weight(name) and len(shape) > MATRIX_DIMS]
    names = {**shapes[0], **shapes[-1]}  # the first layers may be dense, or all where these are few
    if not (stacked or getattr(config, "n_routed_experts", None) or any("expert" in name for name in names)):
        return
    reasons = {
        "latent attention (model type {0}, kv_lora_rank)": bool(getattr(config, "kv_lora_rank", None)),
        "attention sinks (model type {0})": any(name.endswith("sinks") for name in shapes[-1]),
        "layers of several kinds (model type {0})": any(each != shapes[-1] for each in shapes),
        "experts that are not stacked (model type {0})": not stacked,
        "no num_experts_per_tok (model type {0})": not isinstance(getattr(config, "num_experts_per_tok", None), int),
    }
    for reason, holds in reasons.items():
        rule = f"is a mixture of experts with {reason.format(config.model_type)}: choose a dense model or mixtral_8x7b"
        require(not holds, "model.path", path, rule)


def expert_count(info: HFModelInfo) -> int:
    """Return the number of experts of each layer; 0 for a dense model."""
    stacked = (shape for name, shape in info.shapes.items() if is_expert_weight(name) and len(shape) > MATRIX_DIMS)
    return next((shape[0] for shape in stacked), 0)


def record_order(model: nn.Module) -> dict[str, None]:
    """Return the paths of the modules with parameters of their own, which forwards will fill in their order."""
    order: dict[str, None] = {}
    for path, module in model.named_modules():
        if module._parameters:
            module.register_forward_pre_hook(lambda *_, path=path: order.setdefault(path))
    return order


def expand_tensor_plan(model: nn.Module) -> dict[str, str]:
    """Return the tensor-parallel style of every module in the model's own plan, by path.

    A style that STYLES lacks keeps the library's name.
    """
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    return {
        path: STYLES.get(style, style)
        for path, _ in model.named_modules()
        for pattern, style in plan.items()
        if fnmatchcase(path, pattern) and path.count(".") == pattern.count(".")
    }


def is_repeated(module: nn.Module, path: str, plan: dict[str, str]) -> bool:
    """Return whether every tensor-parallel rank multiplies what a module itself multiplies.

    They are the module's own matrix if it is whole, else products of what is computed by the modules in it.
    """
    if any(parameter.dim() >= MATRIX_DIMS for parameter in module.parameters(recurse=False)):
        return plan.get(path) not in SHARD_DIM
    return not any(style == "column" and other.startswith(f"{path}.") for other, style in plan.items())


def checkpoint_layers(layers: nn.ModuleList) -> set[nn.Module]:
    """Checkpoint every layer, and return a set that backward fills with the modules it recomputes completely."""
    recomputed: set[nn.Module] = set()

    def record_module(module: nn.Module, *_: Any) -> None:
        if torch._C._current_graph_task_id() >= 0:  # a module that ends its forward within backward is recomputed
            recomputed.add(module)

    for layer in layers:
        checkpoint_block(layer, lambda: (nullcontext(), nullcontext()))
    for module in layers.modules():
        module.register_forward_hook(record_module)
    return recomputed


def trace() -> None:
    """Print the values of the model on standard input, filled in from its trace, as JSON. Raises UserError.

    `harness plan` starts a process for it (`python -m harness.models.hf`), so that it never imports torch itself.
    """
    request = json.load(sys.stdin)
    print(json.dumps(fill_model_config(request["model"], request["seq_len"])))


if __name__ == "__main__":
    sys.exit(run_command(trace))
