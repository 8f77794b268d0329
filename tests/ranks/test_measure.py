"""The meters compared with arithmetic: bytes of the allocator, of collectives, and of tensors saved for backward."""

import dataclasses
import gc
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from harness.config.strategy import StrategyConfig
from harness.launcher.forkserver import start_forkserver
from harness.layout.layout import Layout, group_axes, resolve_layout
from harness.measure.activations import ActivationMeter
from harness.measure.collective_rules import RULES, SENDS_NOTHING
from harness.measure.communication import CommunicationCounter, UncountedCollectiveError, bytes_sent
from harness.measure.gradient_fingerprint import CHUNK_ELEMENTS, Fingerprinter
from harness.measure.memory import CPU, DeviceMemory
from harness.measure.memory_ownership import OwnershipRecorder
from harness.measure.native_allocator import Allocator, build_allocator, load_allocator
from harness.tensors.shard import Shard
from harness.tensors.storage import storage_bytes
from harness.util.errors import UserError
from harness.util.native_build import compiler_problem
from tests.support.commands import compose_config

WORLD = 4

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

    def churn() -> None:
        for size in range(300):
            torch.empty(size, dtype=torch.uint8)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    allocator.reset_peak()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert allocator.live_bytes() == start
    assert 299 <= allocator.peak_bytes() - start <= 4 * 299


class NoState(SimpleNamespace):
    """An engine without parameters."""

    model = nn.Module()

    def local_shards(self, kind: str) -> list[Shard]:
        return []

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
    threads = [threading.Thread(target=churn, args=(size,)) for size in (12, 128)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(30):
            recorder = OwnershipRecorder(NoState(), DeviceMemory(CPU, allocator))  # type: ignore[arg-type]
            recorder.start()
            for _ in range(50):
                with recorder.pause():
                    torch.empty(1000, dtype=torch.uint8)
            recorder.end()
            peak = recorder.at_peak(None)  # raises an error if the two differ
            assert peak is not None and peak.bytes == sum(part.bytes for part in peak.parts) >= storage_bytes([kept])
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)


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
    assert memory.peak_reserved_bytes() is None
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
    fingerprinter.updates(OneShard(shard))
    of_update = allocator.peak_bytes() - before
    assert of_update < 4 * shard.local.numel() + 2.01 * chunk  # and a chunk of it is widened


class OneShard:
    """An engine with one parameter."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def local_shards(self, kind: str) -> list[Shard]:
        return [self.shard] if kind == "parameters" else []


def test_every_collective_of_this_torch_has_a_rule() -> None:
    spaces = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
    operators = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.split("::")[0] in spaces}
    assert len(operators) > 30
    assert [name for name in sorted(operators) if name not in RULES and name not in SENDS_NOTHING] == []


def test_an_unknown_collective_is_refused() -> None:
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("invented_collective(Tensor input, str group_name) -> Tensor")
        library.impl("invented_collective", lambda tensor, group: tensor.clone(), "CPU")
        with CommunicationCounter(), pytest.raises(UncountedCollectiveError, match="invented_collective"):
            torch.ops._c10d_functional.invented_collective(torch.ones(2), "0")


def layout(world_size: int, **degrees: Any) -> Layout:
    return resolve_layout(StrategyConfig(name="any", **degrees), world_size)


def test_axes_are_named_by_the_layout() -> None:
    hybrid = layout(8, dp_replicate=2, dp_shard=4)
    assert group_axes((4, 5, 6, 7), hybrid) == "dp_shard"
    assert group_axes((1, 5), hybrid) == "dp_replicate"
    assert group_axes(range(8), hybrid) == "dp_replicate+dp_shard"
    assert group_axes((3,), hybrid) == "self"
    deep = layout(8, dp_shard=2, tp=2, pp=2)
    assert [group_axes(ranks, deep) for ranks in ((0, 1), (0, 2), (0, 4), (0, 1, 2, 3), range(8))] == [
        "tp",
        "dp_shard",
        "pp",
        "dp_shard+tp",
        "world",
    ]


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
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False, context_fn=lambda: contexts)
        return result

    def inner(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.b(gelu(self.a(x))) * self.scale
        return result


BATCH, HIDDEN, INNER, LAYERS = 8, 32, 96, 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(HIDDEN, INNER) for _ in range(LAYERS)])


def activation_bytes_of(model: nn.Module, blocks: nn.Module, checkpointed: bool = False) -> int:
    """Return the activation bytes of one forward and backward of the model that wraps these blocks."""
    meter = ActivationMeter(model)
    for block in blocks.children():
        block.meter = meter if checkpointed else None  # type: ignore[assignment]
    with meter:
        model(torch.ones(BATCH, HIDDEN)).sum().backward()
    return meter.peak_bytes


def counted(action: Callable[[], object]) -> list[dict[str, Any]]:
    with CommunicationCounter() as counter:
        action()
    return [{**vars(entry), "total": bytes_sent(counter.traffic())} for entry in counter.traffic()]


def on_a_rank(rank: int, folder: str) -> None:
    """Write every figure that one of four real ranks counts to a file."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    data = torch.ones(BATCH, HIDDEN)
    figures: dict[str, Any] = {"operations": {}}

    ddp = nn.parallel.DistributedDataParallel(network(), broadcast_buffers=False)
    for name in ("ddp first", "ddp rebuilds buckets", "ddp"):
        figures[name] = counted(lambda: ddp(data).sum().backward())
    with ddp.no_sync():
        figures["ddp unsynchronised"] = counted(lambda: ddp(data).sum().backward())
    figures["saved by ddp"] = [activation_bytes_of(ddp, ddp.module, ck) for ck in (False, True)]

    meshes = {
        "fsdp": init_device_mesh("cpu", (WORLD,)),
        "hybrid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")),
    }
    for name, mesh in meshes.items():
        model = network()
        for part in (*model, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        for _ in range(2):
            figures[name] = counted(lambda model=model: model(data).sum().backward())  # type: ignore[misc]
        figures[f"saved by {name}"] = [activation_bytes_of(model, model, ck) for ck in (False, True)]
        figures[f"parameters of {name}"] = storage_bytes(model.parameters())

    tensor, parts = torch.ones(16), [torch.ones(16) for _ in range(WORLD)]
    root = rank == 0
    operations: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_gather": lambda: dist.all_gather(parts, tensor),
        "all_gather_into": lambda: dist.all_gather_into_tensor(torch.empty(64), tensor),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(4), tensor),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(16), tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "reduce": lambda: dist.reduce(tensor, 0),
        "scatter": lambda: dist.scatter(tensor, parts if root else None, 0),
        "gather": lambda: dist.gather(tensor, parts if root else None, 0),
        "send": lambda: dist.send(tensor, 1) if root else dist.recv(tensor, 0) if rank == 1 else None,
        "barrier": dist.barrier,
    }
    for name, action in operations.items():
        figures["operations"][name] = sum(entry["bytes_sent"] for entry in counted(action))
    Path(folder, f"{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    start_forkserver("cpu")  # it has imported torch
    start_processes(on_a_rank, (str(folder),), nprocs=WORLD, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


MODEL_BYTES = 4 * LAYERS * 2 * HIDDEN * INNER


def test_volumes_are_exactly_those_of_the_literature(ranks: list[dict[str, Any]]) -> None:
    """DDP sends 2Ψ(n-1)/n and full sharding 3Ψ(n-1)/n, exactly, and nothing unsent is counted (arXiv 1910.02054)."""
    for figures in ranks:
        assert sum(entry["bytes_sent"] for entry in figures["ddp"]) == 2 * MODEL_BYTES * 3 / 4
        assert figures["ddp unsynchronised"] == []
        sent = {entry["operation"]: entry["bytes_sent"] for entry in figures["fsdp"]}
        assert sent == {"all_gather": 2 * MODEL_BYTES * 3 / 4, "reduce_scatter": MODEL_BYTES * 3 / 4}
        assert figures["parameters of fsdp"] == MODEL_BYTES / WORLD


def test_hybrid_sharding_splits_by_axis(ranks: list[dict[str, Any]]) -> None:
    """A shard group sends 3Ψ(G-1)/G and R replicas send 2(Ψ/G)(R-1)/R, each under its own axis."""
    hybrid = layout(WORLD, dp_replicate=2, dp_shard=2)
    for figures in ranks:
        sent: dict[str, float] = {}
        for entry in figures["hybrid"]:
            axis = group_axes(entry["group_ranks"], hybrid)
            sent[axis] = sent.get(axis, 0.0) + entry["bytes_sent"]
        assert sent == {"dp_shard": 3 * MODEL_BYTES / 2, "dp_replicate": 2 * (MODEL_BYTES / 2) / 2}


def test_bytes_of_each_operation(ranks: list[dict[str, Any]]) -> None:
    """Four ranks send one tensor of 64 bytes, and each rank counts its own part."""
    expected = {
        "all_reduce": [96.0] * 4,
        "all_gather": [192.0] * 4,
        "all_gather_into": [192.0] * 4,
        "reduce_scatter": [48.0] * 4,
        "all_to_all": [48.0] * 4,
        "broadcast": [48.0] * 4,
        "reduce": [48.0] * 4,
        "scatter": [192.0, 0, 0, 0],
        "gather": [0, 64.0, 64.0, 64.0],
        "send": [64.0, 0, 0, 0],
        "barrier": [0] * 4,
    }
    assert {name: [figures["operations"][name] for figures in ranks] for name in expected} == expected


# ---------------------------------------------------------------- activations

INPUT_BYTES, INNER_BYTES = 4 * BATCH * HIDDEN, 4 * BATCH * INNER

WHOLE = LAYERS * (INPUT_BYTES + 2 * INNER_BYTES)

CHECKPOINTED = LAYERS * INPUT_BYTES + 2 * INNER_BYTES  # the inputs of all blocks, and one block's own


def test_saved_activations_are_the_same_under_every_wrapper(ranks: list[dict[str, Any]]) -> None:
    """No wrapper's weights count, gathered or not; checkpointing keeps the blocks' inputs and one block."""
    assert [activation_bytes_of(model := network(), model, ck) for ck in (False, True)] == [WHOLE, CHECKPOINTED]
    for figures in ranks:
        for name in ("ddp", "fsdp", "hybrid"):
            assert figures[f"saved by {name}"] == [WHOLE, CHECKPOINTED], name


@pytest.mark.parametrize("checkpointed", [False, True])
def test_micro_batches_add_up_only_when_they_are_in_flight_together(checkpointed: bool) -> None:
    model = network()
    meter = ActivationMeter(model)
    for block in model:
        block.meter = meter if checkpointed else None  # type: ignore[assignment]
    gc.disable()  # what is held must go with its last reference, not with the collector
    try:
        with meter:
            for _ in range(3):
                model(torch.ones(BATCH, HIDDEN)).sum().backward()
            one_by_one = meter.peak_bytes
            losses = [model(torch.ones(BATCH, HIDDEN)).sum() for _ in range(2)]
            for loss in losses:
                loss.backward()
        del losses, loss
        assert meter.saved_bytes == 0
    finally:
        gc.enable()
    assert one_by_one == (CHECKPOINTED if checkpointed else WHOLE)
    assert meter.peak_bytes == (CHECKPOINTED + LAYERS * INPUT_BYTES if checkpointed else 2 * WHOLE)


def test_an_activation_in_the_place_of_a_freed_weight_is_counted() -> None:
    """An engine frees gathered weights, and the identity of their storages is that of later ones."""
    layer = nn.Linear(8, 8, bias=False)
    with ActivationMeter(layer) as meter:
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
    with (meter := ActivationMeter(model)):
        measured = torch.autograd.grad(model(data).sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True))
        saved = torch.ones(4, requires_grad=True).exp()
        total = saved.sum()
        saved.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()  # type: ignore[no-untyped-call]
    assert meter.peak_bytes > 0
