"""The world of a simulated rank, whose other ranks do not exist: its process group, and what asks them for answers."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as reducer
from torch._C._distributed_c10d import GradBucket
from torch.distributed.pipelining import schedules
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.cost_model.expert_communication import balanced_rows
from harness.engines.torch import expert_parallel
from harness.engines.torch.expert_parallel import ExchangedExperts
from harness.simulator.cuda_api import current_stream
from harness.simulator.stand_ins import around

# The second argument must be called `bucket`.
CommunicationHook = Callable[[dist.ProcessGroup, GradBucket], Future[Tensor]]


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Play one rank of a world by torch's fake process group: its collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def pipeline_stages() -> AbstractContextManager[Any]:
    """Return a context in which stages do not ask the other ranks for their votes, which no rank would send.

    They do so since torch 2.13.
    """
    return mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", decide_inference_mode, create=True)


def decide_inference_mode(schedule: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
    """Give every stage the mode that it votes for, as _PipelineSchedule._warmup_p2p does if all ranks vote alike."""
    from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined]

    for stage in stages:
        needs_dynamic = InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        stage._inference_mode = InferenceMode.DYNAMIC if needs_dynamic else InferenceMode.STATIC


@contextmanager
def launched_process(rank: int, world_size: int) -> Iterator[None]:
    """Return a context whose environment is that of a launched rank, alone on its node, for libraries that read it.

    Accelerate keeps what it reads for the life of a process: at the end it forgets the rank.
    """
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with mock.patch.dict("os.environ", ranks):
        try:
            yield
        finally:
            if state := sys.modules.get("accelerate.state"):
                state.AcceleratorState._reset_state(reset_partial_state=True)
                state.GradientState._reset_state()


@contextmanager
def ddp_reducer() -> Iterator[None]:
    """Return a context in which DistributedDataParallel, whose reducer is C++, wraps models of fake tensors.

    The reducer's rebuilding of buckets in the order in which gradients arrive reads values. Instead they have from the
    start the sizes that it would give them, in the reverse order of the parameters. Its comparison of the shapes of all
    ranks, in C++ too, is left out.
    """
    with (
        mock.patch.object(distributed, "_verify_param_shape_across_processes", lambda group, parameters: None),
        communication_hook(all_reduce_bucket),
        around(DistributedDataParallel, "_ddp_init_helper", init_with_rebuilt_buckets),
        mock.patch.object(reducer.Reducer, "_rebuild_buckets", lambda self: False),
    ):
        yield


def init_with_rebuilt_buckets(init_helper: Any, ddp: Any, *arguments: Any, **keywords: Any) -> Any:
    """Create DDP's reducer with the buckets that it would rebuild after the first step."""
    first_bytes = dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap  # type: ignore[attr-defined]
    assign = partial(assign_as_rebuilt, [first_bytes, ddp.bucket_bytes_cap])
    with around(dist, "_compute_bucket_assignment_by_size", assign):
        return init_helper(ddp, *arguments, **keywords)


def assign_as_rebuilt(rebuilt: list[int], assign: Any, parameters: list[Tensor], limits: Any, *arguments: Any) -> Any:
    """Return the parameters of every bucket, and its limit, where `rebuilt` are the first one's and that of all others.

    Until it rebuilds them DDP has all gradients in a single bucket, for which it asks by a limit of sys.maxsize.
    """
    if list(limits) != [sys.maxsize]:
        return assign(parameters, limits, *arguments)
    indices, sizes = assign(parameters[::-1], rebuilt, *arguments)
    last = len(parameters) - 1
    return [[last - index for index in bucket] for bucket in indices][::-1], sizes[::-1]  # DDP reverses both


def even_exchange() -> AbstractContextManager[Any]:
    """Return a context in which every rank has as many tokens for each expert as model.routing=balanced gives it."""
    return around(ExchangedExperts, "__call__", exchange_evenly)


def exchange_evenly(call: Any, experts: ExchangedExperts, rows: Tensor, *arguments: Tensor) -> Tensor:
    """Exchange rows by numbers that the host knows, for which it waits as for those of a real device."""
    ranks, place = experts.group.size(), experts.group.rank()

    def rows_by_rank(_: Any, own: Tensor, others: Tensor) -> list[list[int]]:
        torch.stack((own.sum(1), others.sum(1))).cpu()
        current_stream().synchronize()
        sent = balanced_rows(len(rows), own.numel(), ranks)
        return [sent, [sent[place]] * ranks]

    with around(expert_parallel, "rows_by_rank", rows_by_rank):
        result: Tensor = call(experts, rows, *arguments)
        return result


def communication_hook(hook: CommunicationHook) -> AbstractContextManager[Any]:
    """Return a context in which DistributedDataParallel reduces buckets by a hook where it has none of its own."""
    return around(DistributedDataParallel, "_pre_forward", partial(forward_with_hook, hook))


def forward_with_hook(hook: CommunicationHook, pre_forward: Any, ddp: Any, *arguments: Any, **keywords: Any) -> Any:
    """Begin DDP's forward, with this hook unless it has one."""
    if not ddp._comm_hooks:
        ddp.register_comm_hook(ddp.process_group, hook)
    return pre_forward(ddp, *arguments, **keywords)


def all_reduce_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Sum a bucket over the group, as the reducer does by itself; the fake group's own future has no tensor.

    The reducer divides gradients while it copies them to the bucket. It waits for the future of the work when backward
    ends, and asks for it as this does.
    """
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return completed(buffer)


def completed(value: Tensor) -> Future[Tensor]:
    """Return a future that has this value already."""
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future
