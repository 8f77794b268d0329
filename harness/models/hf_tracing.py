"""What a model of a library is asked, once, in the parent: of fake tensors, which take neither memory nor work."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config.hf_model_info import HFModelInfo
from harness.cost_model.flops import BACKWARD
from harness.models.activation_checkpoint import checkpoint_block
from harness.models.hf_library import decoder_layers, instantiate
from harness.models.loss import loss_function
from harness.tensors.flops import operator_flops
from harness.util.errors import UserError
from harness.util.text import one_line

# The library's names for ways of cutting (transformers/distributed/tensor_parallel.py) that DTensor does here.
STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
}


def trace_model(config: Any, attention: str, seq_len: int, path: object) -> HFModelInfo:
    """One sequence forth and back through a model of fake tensors, which take neither memory nor work."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            model = instantiate(config, attention, path)
            layers_path, layers = decoder_layers(model)
            once, _, undropped = count_flops(model.eval(), layers, seq_len)  # no kernel of a CPU drops
            forward, in_layers, step = count_flops(model.train(), layers, seq_len)
            finished = checkpoint_layers(layers)
            _, _, again = count_flops(model, layers, seq_len)
    except UserError:
        raise
    except Exception as error:  # whatever a library's model can raise
        raise UserError(
            f"model.path={path}: this model cannot be asked for its operations with model.attention={attention}"
            f" ({one_line(error)}): choose another model or attention"
        ) from None
    paths = [f"{layers_path}.{index}" for index in range(len(layers))]
    unfinished = {
        f"{layers_path}.{name}": module
        for name, module in layers.named_modules()
        if module._parameters and module not in finished
    }
    return HFModelInfo(
        config=json.loads(config.to_json_string()) | {"tie_word_embeddings": bool(config.tie_word_embeddings)},
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        layers=tuple(paths),
        head=next(name for name, module in model.named_modules() if module is model.get_output_embeddings()),  # type: ignore[operator]
        tensor_plan=expand_tensor_plan(model),
        unfinished=tuple(unfinished),
        unfinished_are_linear=all(isinstance(module, nn.Linear) for module in unfinished.values()),
        forward_flops=forward,
        layers_flops=in_layers,
        step_flops=step,
        remade_flops=undropped - (1 + BACKWARD) * once,
        again_flops=again - step,
    )


def expand_tensor_plan(model: nn.Module) -> dict[str, str]:
    """The model's own plan for tensor parallelism, its patterns spelt out; styles not known here as they are called."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    return {
        path: STYLES.get(style, style)
        for path, _ in model.named_modules()
        for pattern, style in plan.items()
        if fnmatchcase(path, pattern) and path.count(".") == pattern.count(".")
    }


class FlopCounterMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up operators as the profiled step of a run does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += operator_flops(func, args, kwargs or {}, result)
        return result


def count_flops(model: nn.Module, layers: nn.ModuleList, seq_len: int) -> tuple[int, int, int]:
    """Of one sequence: forward, forward of the layers, forward and backward."""
    tokens = torch.zeros((1, seq_len), dtype=torch.int64)
    with FlopCounterMode() as counted, count_layer_flops(layers, counted) as in_layers:
        loss = loss_function(model(tokens), tokens)
        forward, of_layers = counted.flops, sum(in_layers)
        loss.backward()  # type: ignore[no-untyped-call]
    return forward, of_layers, counted.flops


@contextmanager
def count_layer_flops(layers: nn.ModuleList, counted: FlopCounterMode) -> Iterator[list[int]]:
    """The operations of each call of a layer."""
    found: list[int] = []
    began: list[int] = []
    handles = []
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(lambda *_: began.append(counted.flops)))
        handles.append(layer.register_forward_hook(lambda *_: found.append(counted.flops - began[-1])))
    yield found
    for handle in handles:
        handle.remove()


def checkpoint_layers(layers: nn.ModuleList) -> set[nn.Module]:
    """Checkpoints every layer; the set returned fills with modules whose second forward runs to its end."""
    finished: set[nn.Module] = set()
    again: list[bool] = []

    @contextmanager
    def second() -> Iterator[None]:
        again.append(True)
        try:
            yield
        finally:
            again.pop()

    def note(module: nn.Module, *_: Any) -> None:
        if again:
            finished.add(module)

    for layer in layers:
        checkpoint_block(layer, lambda: (nullcontext(), second()))
    for module in layers.modules():
        module.register_forward_hook(note)
    return finished
