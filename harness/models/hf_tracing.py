"""A trace of a Hugging Face model with fake tensors, which need neither memory nor compute: its shapes and FLOPs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config.model import HFModelInfo
from harness.cost_model.flops import BACKWARD
from harness.models.activation_checkpoint import checkpoint_block
from harness.models.decoder import loss_function
from harness.models.hf_library import decoder_layers, instantiate
from harness.tensors.flops import operator_flops
from harness.util.errors import UserError
from harness.util.text import one_line

# The styles of harness.layout.layer_spec by the library's names (transformers/distributed/tensor_parallel.py).
STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
}


def trace_model(config: Any, attention: str, seq_len: int, path: object) -> HFModelInfo:
    """Run one sequence forward and backward through a model of fake tensors, and return its shapes, plan and FLOPs.

    Raise UserError if the model cannot run in this way.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            model = instantiate(config, attention, path)
            layers_path, layers = decoder_layers(model)
            # No fused attention of a CPU supports dropout, so its recomputation shows in evaluation mode only.
            eval_forward, _, eval_step = count_flops(model.eval(), layers, seq_len)
            forward, in_layers, step = count_flops(model.train(), layers, seq_len)
            recomputed = checkpoint_layers(layers)
            _, _, checkpointed_step = count_flops(model, layers, seq_len)
    except UserError:
        raise
    except Exception as error:  # a library's model can raise anything
        raise UserError(
            f"model.path={path}: this model cannot be traced with model.attention={attention} ({one_line(error)}):"
            " choose another model or attention"
        ) from None
    paths = [f"{layers_path}.{index}" for index in range(len(layers))]
    not_recomputed = {
        f"{layers_path}.{name}": module
        for name, module in layers.named_modules()
        if module._parameters and module not in recomputed
    }
    return HFModelInfo(
        config=json.loads(config.to_json_string()) | {"tie_word_embeddings": bool(config.tie_word_embeddings)},
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        layers=tuple(paths),
        head=next(name for name, module in model.named_modules() if module is model.get_output_embeddings()),  # type: ignore[operator]
        tensor_plan=expand_tensor_plan(model),
        not_recomputed_modules=tuple(not_recomputed),
        not_recomputed_are_linear=all(isinstance(module, nn.Linear) for module in not_recomputed.values()),
        forward_flops=forward,
        layers_flops=in_layers,
        step_flops=step,
        attention_recompute_flops=eval_step - (1 + BACKWARD) * eval_forward,
        checkpoint_recompute_flops=checkpointed_step - step,
    )


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


class FlopCounterMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that adds up FLOPs by the same formulas as the profiled step of a run.

    torch.utils.flop_counter.FlopCounterMode lacks the formula of attention on a CPU (see harness.tensors.flops).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += operator_flops(func, args, kwargs or {}, result)
        return result


def count_flops(model: nn.Module, layers: nn.ModuleList, seq_len: int) -> tuple[int, int, int]:
    """Return the FLOPs of one sequence: of forward, of forward in the layers, of forward and backward."""
    tokens = torch.zeros((1, seq_len), dtype=torch.int64)
    with FlopCounterMode() as counter, count_layer_flops(layers, counter) as per_call:
        loss = loss_function(model(tokens), tokens)
        forward, in_layers = counter.flops, sum(per_call)
        loss.backward()  # type: ignore[no-untyped-call]
    return forward, in_layers, counter.flops


@contextmanager
def count_layer_flops(layers: nn.ModuleList, counter: FlopCounterMode) -> Iterator[list[int]]:
    """Return a context whose value is a list that gets the FLOPs of each call of a layer."""
    per_call: list[int] = []
    at_start: list[int] = []
    handles = []
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(lambda *_: at_start.append(counter.flops)))
        handles.append(layer.register_forward_hook(lambda *_: per_call.append(counter.flops - at_start[-1])))
    yield per_call
    for handle in handles:
        handle.remove()


def checkpoint_layers(layers: nn.ModuleList) -> set[nn.Module]:
    """Checkpoint every layer, and return a set that backward fills with the modules it recomputes completely."""
    recomputed: set[nn.Module] = set()
    depth: list[bool] = []  # not empty during a recomputation

    @contextmanager
    def recomputing() -> Iterator[None]:
        depth.append(True)
        try:
            yield
        finally:
            depth.pop()

    def record_module(module: nn.Module, *_: Any) -> None:
        if depth:
            recomputed.add(module)

    for layer in layers:
        checkpoint_block(layer, lambda: (nullcontext(), recomputing()))
    for module in layers.modules():
        module.register_forward_hook(record_module)
    return recomputed
