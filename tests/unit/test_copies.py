"""Copies: activations in side streams, masters to 16 bit by one operator, and pinned memory."""

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engines.torch.ddp import ReplicatedParams
from harness.models.activation_checkpoint import apply_checkpointing
from harness.models.activation_offload import CopyStreams, OffloadHooks
from harness.models.build import build_model
from harness.models.decoder import loss_function
from harness.models.init_weights import materialize
from harness.probe import Probe
from tests.support.commands import compose_config

CPU = torch.device("cpu")


class Operators(TorchDispatchMode):
    """A counter of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class LateCopy:
    """A copy that has not run. It keeps neither tensor alive, as a device's stream does not."""

    def __init__(self, target: Tensor, source: Tensor, products_before: int) -> None:
        self.target, self.source = weakref.ref(target), weakref.ref(source)
        self.bytes, self.products_before = source.nbytes, products_before


class LateStreams(CopyStreams):
    """Streams whose copies run when the computing waits for them, and not before."""

    def __init__(self) -> None:
        self.pending: list[LateCopy] = []
        self.copies, self.operators = 0, Operators()
        self.waits_at_once: Counter[int] = Counter()  # by the bytes of a copy

    @property
    def products(self) -> int:
        """How many matrix products have run."""
        return self.operators.counts["aten::mm"] + self.operators.counts["aten::bmm"]

    def copy(self, target: Tensor, source: Tensor) -> Any:
        self.copies += 1
        target.fill_(255)  # what a device's memory has before a copy has run
        self.pending.append(LateCopy(target, source, self.products))
        return self.pending[-1]

    def wait(self, event: Any) -> None:
        if event not in self.pending:
            return
        self.waits_at_once[event.bytes] += event.products_before == self.products
        target, source = event.target(), event.source()
        assert target is not None and source is not None, "memory was let go of before its copy had run"
        target.copy_(source)
        self.pending.remove(event)


def gradients_of(checkpointing: str, streams: CopyStreams | None) -> tuple[list[Tensor | None], int]:
    """Return the gradients of two micro-batches, and the number of layers' calls."""
    config = compose_config(f"checkpointing={checkpointing}", "train.seq_len=32", "model.num_hidden_layers=6")
    model = build_model(config.model)
    apply_checkpointing(model, config.checkpointing, Probe())
    if streams is not None:
        hooks = OffloadHooks(Probe(), streams)
        for block in model.layers_by_index().values():
            forward = block.forward

            def wrapped(*arguments: Tensor, block: Any = block, forward: Any = forward) -> Tensor:
                return hooks.wrap_forward(block, forward, *arguments)

            block.forward = wrapped  # type: ignore[method-assign]
    materialize(model, config.model, 0, CPU, torch.float32)
    for shift in range(2):
        tokens = (torch.arange(64).view(2, 32) * 7 + shift) % config.model.vocab_size
        loss_function(model(tokens), tokens).backward()
    return [parameter.grad for parameter in model.parameters()], 2 * config.model.num_hidden_layers


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_copies_that_run_late_change_no_gradient(checkpointing: str) -> None:
    """Whatever is read, or let go of, before its copy has run would be noticed here."""
    expected, _ = gradients_of(checkpointing, None)
    streams = LateStreams()
    gradients, calls = gradients_of(checkpointing, streams)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))  # type: ignore[arg-type]
    assert streams.copies >= 2 * calls and not streams.pending


def test_the_computing_waits_for_no_copy_that_has_just_begun() -> None:
    """Under full checkpointing a layer's input leaves during the next layer, and returns during the one after it.

    Only the input of the last layer of each of the two micro-batches comes back without a layer to run beside. The
    small tables of positions, which all layers share, are not counted.
    """
    streams = LateStreams()
    with streams.operators:
        _, calls = gradients_of("full", streams)
    assert streams.copies >= 2 * calls and streams.products > 10 * calls
    assert streams.waits_at_once[max(streams.waits_at_once)] == 2


def replicated(precision: str) -> ReplicatedParams:
    config = compose_config("strategy=single", f"precision={precision}", "model.num_hidden_layers=1")
    return ReplicatedParams([build_model(config.model)], config, torch.device("cpu"))


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_masters_have_the_values_that_a_model_had_before(adapter: str) -> None:
    """A script that loads a checkpoint trains what it loaded, and not the values of the run."""
    config = compose_config("precision=bf16_mixed", f"adapter={adapter}", "model.num_hidden_layers=1")
    model = build_model(config.model)
    materialize(model, config.model, config.train.seed + 1, CPU, torch.float32)
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    replicas = ReplicatedParams([model], config, CPU)
    replicas.sync_model_params()
    assert replicas.masters.keys() == {name for name in loaded if adapter == "none" or ".lora_" in name}
    assert all(torch.equal(master, loaded[name]) for name, master in replicas.masters.items())
    assert all(torch.equal(own, loaded[name].bfloat16()) for name, own in model.named_parameters())


def test_one_operator_copies_all_masters() -> None:
    params = replicated("bf16_mixed")
    assert len(params.masters) > 5
    with torch.no_grad():
        for master in params.masters.values():
            master.add_(torch.randn(master.shape))
            master.grad = torch.ones_like(master)
    with Operators() as operators:
        params.sync_model_params()
    assert operators.counts == {"aten::_foreach_copy_": 1}
    for name, master in params.masters.items():
        assert torch.equal(params.parameters[name], master.to(torch.bfloat16)) and master.grad is None


def test_gradients_that_are_bucket_views_are_zeroed_by_one_operator() -> None:
    params = replicated("fp32")
    params.accumulates_in_buckets = True
    for parameter in params.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with Operators() as operators:
        params.sync_model_params()
    assert operators.counts == {"aten::_foreach_zero_": 1}
    gradients: list[Tensor | None] = [parameter.grad for parameter in params.parameters.values()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_pinned_memory_is_rounded_to_powers_of_two_up_to_a_threshold() -> None:
    """If this changes, offloaded state no longer takes up to twice its bytes, and the notes on it are out of date."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "core" / "CachingHostAllocator.h"
    text = " ".join(header.read_text().split())
    assert "if (size <= pinned_max_round_threshold() &&" in text
    assert "return c10::llvm::PowerOf2Ceil(size);" in text
