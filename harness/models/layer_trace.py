"""The memory of one decoder layer of a library's model, observed operator by operator on fake tensors."""

import itertools
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.config.model import TRACED_SEQUENCES, TracedLayer
from harness.config.schema import Checkpointing, CheckpointingConfig
from harness.models.activation_checkpoint import checkpoint_block, layer_contexts
from harness.models.decoder import loss_function
from harness.models.hf_library import decoder_layers, instantiate
from harness.probe import Probe
from harness.tensors.autograd import is_accumulation
from harness.tensors.flops import GROUPED_PRODUCT

_aten = torch.ops.aten

TRACED: tuple[Checkpointing, ...] = ("none", "full", "selective")

Live = dict[int, tuple[int, bool]]  # the bytes of storages by their number, and whether a forward has made each


def trace_layers(config: Any, attention: str, seq_len: int, path: object) -> dict[str, TracedLayer]:
    """Return the memory of a layer by the bytes of an element and the checkpointing, as HFModelInfo has it.

    One layer of each kind is traced, by the shapes of its parameters. The result keeps as much as the mean of all
    layers, and has the worst moments of the fullest one.
    """
    _, layers = decoder_layers(instantiate(config, attention, path))
    kinds = [tuple(tuple(weight.shape) for weight in layer.parameters()) for layer in layers]
    indices = {kind: index for index, kind in enumerate(kinds)}  # the last layer of each
    traced: dict[str, TracedLayer] = {}
    for dtype, checkpointing in itertools.product((torch.float32, torch.bfloat16), TRACED):
        of_kind = {
            kind: trace_layer(instantiate(config, attention, path, dtype), index, seq_len, checkpointing)
            for kind, index in indices.items()
        }
        fullest = max(of_kind.values(), key=lambda layer: max(saved + others for saved, others, *_ in layer.moments))
        saved = sum(of_kind[kind].saved_bytes for kind in kinds) // len(kinds)
        traced[f"{dtype.itemsize} {checkpointing}"] = replace(fullest, saved_bytes=saved)
    return traced


def trace_layer(model: nn.Module, index: int, seq_len: int, checkpointing: Checkpointing) -> TracedLayer:
    """Return the memory of one layer of a model, in forward and backward of the whole model."""
    layer = decoder_layers(model)[1][index]
    if checkpointing != "none":
        checkpoint_block(layer, layer_contexts(CheckpointingConfig(checkpointing), Probe()))
    tokens = torch.zeros((TRACED_SEQUENCES, seq_len), dtype=torch.int64)
    trace = LayerTrace(layer)
    with trace:
        loss_function(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    return trace.traced_layer()


def run_on_fakes(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operator's result; torch has no fake one of a product of groups but in bfloat16."""
    if getattr(func, "_overloadpacket", None) is not GROUPED_PRODUCT:
        return func(*args, **(kwargs or {}))
    left, right, ends = args[:3]
    shape = (len(left), right.shape[-1]) if right.dim() > left.dim() else (len(ends), len(left), right.shape[-1])
    return left.new_empty(shape)


class LayerTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that observes the storages of a layer in forward and backward.

    The gradients of its matrices are known by being added to those that the parameters have.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: Live = {}
        self.numbers: dict[int, int] = {}  # of live storages by their identity, which later ones may have again
        self.count = itertools.count()
        self.is_inside = self.is_backward = False
        self.saved_bytes = self.forward_bytes = 0
        self.moments: list[Live] = []  # what lives behind each operator of backward
        self.added: dict[int, tuple[int, int]] = {}  # by a gradient's number, when it is added and its elements
        # The identities of what is not the layer's, with the elements of matrices by their parameters' gradients.
        self.others: dict[int, int] = {}
        self.tables: list[Tensor] = []  # which the layer is called with; no other has their identity while they live
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
            self.others[parameter.untyped_storage()._cdata] = 0
            self.others[parameter.grad.untyped_storage()._cdata] = parameter.numel() * (parameter.dim() > 1)
        layer.register_forward_pre_hook(self.enter, with_kwargs=True)
        layer.register_forward_hook(self.leave)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_inside:
            return run_on_fakes(func, args, kwargs)
        is_sum = func is _aten.add.Tensor and is_accumulation(*args[:2])
        result = run_on_fakes(_aten.add_.Tensor if is_sum else func, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.observe(leaf)
        if func is _aten.add_.Tensor and (elements := self.others.get(args[0].untyped_storage()._cdata)):
            self.added[self.numbers[args[1].untyped_storage()._cdata]] = len(self.moments), elements
        if self.is_backward:
            self.moments.append(dict(self.live))
        else:
            self.forward_bytes = max(self.forward_bytes, total(self.live))
        return result

    def observe(self, tensor: Tensor) -> int:
        """Count a tensor's storage from now on, unless it is not the layer's; return its number."""
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self.others:
            return -1
        if identity not in self.numbers:
            number = self.numbers[identity] = next(self.count)
            self.live[number] = storage.nbytes(), torch.is_grad_enabled()
            weakref.finalize(storage, self.forget, identity).atexit = False
        return self.numbers[identity]

    def forget(self, identity: int) -> None:
        """Forget a storage that has ended."""
        self.live.pop(self.numbers.pop(identity), None)

    def enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin with the layer's input, whose gradient ends its backward."""
        hidden, *self.tables = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.others |= {table.untyped_storage()._cdata: 0 for table in self.tables}
        self.is_inside = True
        self.observe(hidden)
        hidden.register_hook(lambda _: setattr(self, "is_inside", False))  # type: ignore[no-untyped-call]

    def leave(self, layer: nn.Module, _: Any, result: Any) -> None:
        """End forward, whose result is kept by what follows, and which backward begins with its gradient."""
        hidden = next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.is_inside = False
        self.live.pop(self.observe(hidden), None)
        hidden.register_hook(self.begin_backward)  # type: ignore[no-untyped-call]

    def begin_backward(self, gradient: Tensor) -> None:
        """Begin backward with the gradient of the layer's output, beside what forward has left."""
        self.saved_bytes = total(self.live)
        self.is_inside = self.is_backward = True
        self.observe(gradient)

    def traced_layer(self) -> TracedLayer:
        """Return what was observed: of the moments between the same gradients of matrices the worst one."""
        worst: dict[tuple[int, int, bool], tuple[int, int]] = {}
        for index, live in enumerate(self.moments):
            done = sum(elements for moment, elements in self.added.values() if moment < index)
            computed = {number: self.added[number] for number in live if self.added.get(number, (-1,))[0] >= index}
            key = done, sum(elements for _, elements in computed.values()), index in [at for at, _ in computed.values()]
            others = [size for number, size in live.items() if number not in computed]
            saved = sum(size for size, of_forward in others if of_forward)
            sizes = saved, sum(size for size, _ in others) - saved
            worst[key] = max(worst.get(key, (0, 0)), sizes, key=sum)
        moments = tuple((*sizes, done, computed, int(adds)) for (done, computed, adds), sizes in worst.items())
        return TracedLayer(self.saved_bytes, self.forward_bytes, moments)


def total(live: Live) -> int:
    """Return the bytes of storages."""
    return sum(size for size, _ in live.values())
