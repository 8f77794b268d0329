"""The meters compared with arithmetic: bytes of the allocator, of collectives, and of tensors saved for backward."""

import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.config.strategy import StrategyConfig
from harness.layout.layout import resolve_layout
from harness.layout.rank_groups import group_axes
from harness.measure.activations import ActivationMeter
from harness.measure.collective_rules import NAMESPACES, RULES, SENDS_NOTHING
from harness.measure.communication import CommunicationCounter, UncountedCollectiveError
from harness.measure.gradient_fingerprint import CHUNK_ELEMENTS, Fingerprinter
from harness.measure.memory import DeviceMemory
from harness.measure.memory_ownership import OwnershipRecorder
from harness.measure.native_allocator import Allocator, build_allocator, load_allocator
from harness.measure.step_timer import garbage_collection_disabled
from harness.records.rank_report import Traffic
from harness.simulator.process_group import fake_process_group
from harness.tensors.shard import Shard
from harness.tensors.storage import storage_bytes
from harness.util.native_build import compiler_problem
from harness.util.text import UserError
from tests.support.commands import compose_config

WORLD = 4

CPU = torch.device("cpu")

EARLIER = [torch.ones(1000)]  # allocated before the counting allocator is there

# ---------------------------------------------------------------- allocator


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Allocator:
    """Build the allocator from two callers at once: the compiler must run once and leave nothing half-made."""
    cache = tmp_path_factory.mktemp("cache")
    log, compiler = cache / "log", cache / "compiler"
    compiler.write_text(f'#!/bin/sh\necho run >> {log}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("CXX", str(compiler))
        built = set(pool.map(build_allocator, [cache, cache]))
    assert log.read_text().count("run") == 1
    assert [path.suffix for path in cache.glob("allocator/*/*.[!l]*")] == [".so"]
    return load_allocator(built.pop())


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "free", "resize", "view"]), st.integers(0, 5000), st.integers(0, 99)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_allocator_agrees_with_a_model(allocator: Allocator, actions: list[tuple[str, int, int]]) -> None:
    """For any history of tensors, live and peak are the plain sums to the byte; data stays aligned and intact."""
    tensors: list[tuple[Tensor, list[int]]] = []  # a tensor, and the size of its storage, shared with its views
    start, most = allocator.live_bytes(), 0
    allocator.reset_peak()

    def live() -> int:
        return sum({id(size): size[0] for _, size in tensors}.values())

    for action, size, index in actions:
        if action == "allocate":
            tensors.append((torch.full((size,), 7, dtype=torch.uint8), [size]))
            assert tensors[-1][0].data_ptr() % 64 == 0
        elif tensors and action == "free":
            tensors.pop(index % len(tensors))
        elif tensors and action == "view":
            tensors.append((tensors[index % len(tensors)][0][:0], tensors[index % len(tensors)][1]))
        elif tensors and action == "resize":
            most = max(most, live() + size)  # torch takes the new block before it frees the old one
            tensors[index % len(tensors)][0].untyped_storage().resize_(size)
            tensors[index % len(tensors)][1][0] = size
        most = max(most, live())
        assert allocator.live_bytes() - start == live()
    assert allocator.peak_bytes() - start == most


def test_allocator_edges(allocator: Allocator) -> None:
    """Earlier tensors are freed uncounted, failure is torch's own error, and threads lose nothing."""
    start = allocator.live_bytes()
    EARLIER.clear()
    with pytest.raises(torch.OutOfMemoryError, match="can't allocate memory"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert allocator.live_bytes() == start

    def churn(_: int) -> None:
        for size in range(300):
            torch.empty(size, dtype=torch.uint8)

    allocator.reset_peak()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert allocator.live_bytes() == start
    assert 299 <= allocator.peak_bytes() - start <= 4 * 299


class Holder:
    """An engine that holds only these parameters."""

    model = nn.Module()

    def __init__(self, *parameters: Shard) -> None:
        self.parameters = parameters

    def local_shards(self, kind: str) -> Sequence[Shard]:
        return self.parameters if kind == "parameters" else ()

    def named_buffers(self) -> list[tuple[str, str, Tensor]]:
        return []


def test_the_log_and_its_peak_agree_while_other_threads_allocate(allocator: Allocator) -> None:
    """Threads of a communication backend allocate and free at any moment, between the end of a pause and the next."""
    stopped, kept = threading.Event(), torch.empty(100)  # as in every step, some blocks are live at the start

    def churn(size: int) -> None:
        while not stopped.is_set():
            torch.empty(size, dtype=torch.uint8)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(2) as pool, ExitStack() as at_end:
        at_end.callback(stopped.set)
        at_end.callback(sys.setswitchinterval, interval)
        pool.map(churn, (12, 128))
        for _ in range(30):
            recorder = OwnershipRecorder(Holder(), DeviceMemory(CPU, allocator))  # type: ignore[arg-type]
            recorder.start()
            for _ in range(50):
                with recorder.pause():
                    torch.empty(1000, dtype=torch.uint8)
            recorder.end()
            peak = recorder.at_peak(None)  # raises an error if the two differ
            assert peak is not None and peak.bytes == sum(part.bytes for part in peak.parts) >= storage_bytes([kept])


def test_a_missing_compiler_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = compiler_problem()
    assert problem is not None and "c++" in problem and "\n" not in problem
    with pytest.raises(UserError):
        build_allocator(tmp_path)


def test_memory_of_a_cpu(allocator: Allocator) -> None:
    memory = DeviceMemory(torch.device("cpu"), allocator)
    memory.reset_peak()
    start = memory.allocated_bytes()
    tensor = torch.empty(100, dtype=torch.float32)
    assert start is not None and memory.peak_allocated_bytes() == start + 400
    assert memory.counters().peak_reserved_bytes is None
    unknown = DeviceMemory(torch.device("cpu"))
    unknown.reset_peak()
    assert unknown.peak_allocated_bytes() is None and unknown.allocated_bytes() is None
    freed = torch.empty(50)
    freed.untyped_storage().resize_(0)
    assert storage_bytes([tensor, tensor[:10], tensor.view(10, 10).t(), freed, torch.empty(9, device="meta")]) == 400


# ---------------------------------------------------------------- communication


def test_fingerprints_need_the_memory_of_a_chunk(allocator: Allocator) -> None:
    """Beside the tensor there are a chunk in fp64 and two numbers a row; an update has the initial value, too."""
    model = dataclasses.replace(compose_config().model, vocab_size=8192, hidden_size=512)
    fingerprinter = Fingerprinter(model, 0, CPU)
    shape = (model.vocab_size, model.hidden_size)
    shard = Shard("embed_tokens.weight", torch.ones(shape), shape, tuple((0, size) for size in shape))
    before = allocator.live_bytes()
    allocator.reset_peak()
    fingerprinter.fingerprint(shard, shape)
    of_state = allocator.peak_bytes() - before
    chunk = 8 * CHUNK_ELEMENTS["cpu"] + 2 * 8 * model.vocab_size
    assert chunk <= of_state < 1.01 * chunk + 10_000 < 4 * shard.local.numel() / 4
    allocator.reset_peak()
    for changed, initial in fingerprinter.changed(Holder(shard)):
        fingerprinter.fingerprint(changed, shape, initial)
    of_update = allocator.peak_bytes() - before
    assert of_update < 4 * shard.local.numel() + 2.01 * chunk  # and a chunk of it is widened


def test_every_collective_of_this_torch_has_a_rule() -> None:
    spaces = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
    operators = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.split("::")[0] in spaces}
    assert len(operators) > 30
    assert [name for name in sorted(operators) if name not in RULES and name not in SENDS_NOTHING] == []


def test_an_unknown_collective_is_refused() -> None:
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("invented_collective(Tensor input, str group_name) -> Tensor")
        library.impl("invented_collective", lambda tensor, group: tensor.clone(), "CPU")
        with pytest.raises(UncountedCollectiveError, match="invented_collective"):
            traffic_of(lambda: torch.ops._c10d_functional.invented_collective(torch.ones(2), "0"))


@pytest.mark.parametrize(
    ("degrees", "axes"),
    [
        (
            {"dp_replicate": 2, "dp_shard": 4},
            {
                (4, 5, 6, 7): "dp_shard",
                (1, 5): "dp_replicate",
                tuple(range(8)): "dp_replicate+dp_shard",
                (3,): "self",
            },
        ),
        (
            {"dp_shard": 2, "tp": 2, "pp": 2},
            {(0, 1): "tp", (0, 2): "dp_shard", (0, 4): "pp", (0, 1, 2, 3): "dp_shard+tp", tuple(range(8)): "world"},
        ),
    ],
)
def test_axes_are_named_by_the_layout(degrees: dict[str, Any], axes: dict[tuple[int, ...], str]) -> None:
    layout = resolve_layout(StrategyConfig(name="any", **degrees), 8)
    assert {ranks: group_axes(ranks, layout) for ranks in axes} == axes


class Block(nn.Module):
    """A block x + B gelu(A x), whose backward needs x, the input of gelu and its output."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.a = nn.Linear(hidden, inner, bias=False)
        self.b = nn.Linear(inner, hidden, bias=False)
        self.register_buffer("scale", torch.full((hidden,), 2.0))
        self.meter: ActivationMeter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.meter is None:
            return self.inner(x)
        contexts = (nullcontext(), self.meter.recompute())
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=lambda: contexts)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.b(gelu(self.a(x))) * self.scale


BATCH, HIDDEN, INNER, LAYERS = 8, 32, 96, 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(HIDDEN, INNER) for _ in range(LAYERS)])


def activation_bytes_of(model: nn.Module, checkpointed: bool = False) -> int:
    """Return the activation bytes of one forward and backward of a network."""
    meter = ActivationMeter(model)
    for block in model.children():
        block.meter = meter if checkpointed else None  # type: ignore[assignment]
    with meter.measure():
        model(torch.ones(BATCH, HIDDEN)).sum().backward()
    return meter.peak_bytes


class Counting(TorchDispatchMode):
    """A dispatch mode that counts the collectives of plain tensors, as the profiled step's does."""

    def __init__(self, counter: CommunicationCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in NAMESPACES:
            return self.counter.run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def traffic_of(action: Callable[[], object]) -> Sequence[Traffic]:
    counter = CommunicationCounter(lambda call, tensors: None)
    with Counting(counter):
        action()
    return counter.traffic()


MODEL_BYTES = 4 * LAYERS * 2 * HIDDEN * INNER

INPUT_BYTES, INNER_BYTES = 4 * BATCH * HIDDEN, 4 * BATCH * INNER

WHOLE = LAYERS * (INPUT_BYTES + 2 * INNER_BYTES)

CHECKPOINTED = LAYERS * INPUT_BYTES + 2 * INNER_BYTES  # the inputs of all blocks, and one block's own


@pytest.mark.parametrize(
    ("degrees", "sent"),
    [
        (
            {"dp_shard": 4},
            {"dp_shard all_gather": 2 * MODEL_BYTES * 3 / 4, "dp_shard reduce_scatter": MODEL_BYTES * 3 / 4},
        ),
        (
            {"dp_replicate": 2, "dp_shard": 2},
            {
                "dp_shard all_gather": 2 * MODEL_BYTES / 2,
                "dp_shard reduce_scatter": MODEL_BYTES / 2,
                "dp_replicate all_reduce": 2 * (MODEL_BYTES / 2) / 2,
            },
        ),
    ],
)
def test_sharding_sends_what_the_literature_says_and_saves_no_weights(
    degrees: dict[str, Any], sent: dict[str, float]
) -> None:
    """A shard group sends 3Ψ(G-1)/G and R replicas send 2(Ψ/G)(R-1)/R, exactly (arXiv 1910.02054).

    No gathered weight counts as saved for backward; checkpointing keeps the blocks' inputs and one block.
    """
    layout, model = resolve_layout(StrategyConfig(name="any", **degrees), WORLD), network()
    with fake_process_group(0, WORLD):
        mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        for part in (*model, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        step = partial(activation_bytes_of, model)
        step()  # in which modules are initialized
        traffic = traffic_of(step)
        assert {f"{group_axes(t.group_ranks, layout)} {t.operation}": t.bytes_sent for t in traffic} == sent
        assert storage_bytes(model.parameters()) == MODEL_BYTES / layout.dp_shard
        assert [step(checkpointed) for checkpointed in (False, True)] == [WHOLE, CHECKPOINTED]
    whole = network()
    assert [activation_bytes_of(whole, checkpointed) for checkpointed in (False, True)] == [WHOLE, CHECKPOINTED]


@pytest.mark.parametrize("rank", range(WORLD))
def test_bytes_of_each_operation(rank: int) -> None:
    """Four ranks send one tensor of 64 bytes, and each rank counts its own part."""
    tensor, parts = torch.ones(16), [torch.ones(16) for _ in range(WORLD)]
    root_parts = parts if rank == 0 else None
    operations: list[tuple[Callable[[], object], list[float]]] = [
        (lambda: dist.all_reduce(tensor), [96] * 4),
        (lambda: dist.all_gather(parts, tensor), [192] * 4),
        (lambda: dist.all_gather_into_tensor(torch.empty(64), tensor), [192] * 4),
        (lambda: dist.reduce_scatter_tensor(torch.empty(4), tensor), [48] * 4),
        (lambda: dist.all_to_all_single(torch.empty(16), tensor), [48] * 4),
        (lambda: dist.broadcast(tensor, 0), [48] * 4),
        (lambda: dist.reduce(tensor, 0), [48] * 4),
        (lambda: dist.scatter(tensor, root_parts, 0), [192, 0, 0, 0]),
        (lambda: dist.gather(tensor, root_parts, 0), [0, 64, 64, 64]),
        (lambda: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0), [64, 0, 0, 0]),
        (dist.barrier, [0] * 4),
    ]
    with fake_process_group(rank, WORLD):
        for action, sent in operations:
            assert sum(entry.bytes_sent for entry in traffic_of(action)) == sent[rank]


# ---------------------------------------------------------------- activations


@pytest.mark.parametrize("checkpointed", [False, True])
def test_micro_batches_add_up_only_when_they_are_in_flight_together(checkpointed: bool) -> None:
    model = network()
    meter = ActivationMeter(model)
    for block in model:
        block.meter = meter if checkpointed else None  # type: ignore[assignment]
    with garbage_collection_disabled():  # what is held must go with its last reference, not with the collector
        with meter.measure():
            for _ in range(3):
                model(torch.ones(BATCH, HIDDEN)).sum().backward()
            one_by_one = meter.peak_bytes
            losses = [model(torch.ones(BATCH, HIDDEN)).sum() for _ in range(2)]
            for loss in losses:
                loss.backward()
        del losses, loss
        assert meter.saved_bytes == 0
    assert one_by_one == (CHECKPOINTED if checkpointed else WHOLE)
    assert meter.peak_bytes == (CHECKPOINTED + LAYERS * INPUT_BYTES if checkpointed else 2 * WHOLE)


def test_an_activation_in_the_place_of_a_freed_weight_is_counted() -> None:
    """An engine frees gathered weights, and the identity of their storages is that of later ones."""
    layer = nn.Linear(8, 8, bias=False)
    with ActivationMeter(layer).measure() as meter:
        layer(torch.ones(2, 8, requires_grad=True)).sum().backward()  # saves the weight, too
        gathered, identity = meter.peak_bytes, layer.weight.untyped_storage()._cdata
        layer.weight.data = torch.empty(0)
        inputs: list[Tensor] = []
        while not inputs or inputs[-1].untyped_storage()._cdata != identity:
            inputs.append(torch.ones(50, requires_grad=True))
            assert len(inputs) < 10_000
        result = inputs[-1].square()
    assert gathered == 4 * 2 * 8 and meter.saved_bytes == 4 * 50 and result.requires_grad


def test_the_meter_leaves_autograd_as_it_was() -> None:
    """Gradients are the same to the bit, and changing a saved tensor in place is still an error."""
    model = network().to(torch.bfloat16)
    data = torch.ones(BATCH, HIDDEN, dtype=torch.bfloat16)
    plain = torch.autograd.grad(model(data).sum(), list(model.parameters()))
    with ActivationMeter(model).measure() as meter:
        measured = torch.autograd.grad(model(data).sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True))
        saved = torch.ones(4, requires_grad=True).exp()
        total = saved.sum()
        saved.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()  # type: ignore[no-untyped-call]
    assert meter.peak_bytes > 0
