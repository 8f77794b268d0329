"""One rank of a larger world that runs alone, with real tensors and kernels: the worker's own code from end to end."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.futures import Future

from harness.config.strategy import AXES
from harness.engines.torch import expert_parallel
from harness.engines.torch.pipeline_parallel import TiedTable
from harness.layout.layout import Layout
from harness.records.heartbeat import HeartbeatWriter
from harness.records.run_folder import RunFolder, RunSpec, read_run_spec
from harness.simulator.deepspeed_process import filled_parts
from harness.simulator.process_group import communication_hook, completed, fake_process_group, pipeline_stages
from harness.simulator.stand_ins import around
from harness.worker.batches import Batches
from harness.worker.main import report_rank
from harness.worker.process_group import prepare_device

PROCESS_RANK = 0  # by which the launcher knows the process


def run_next_rank(directory: Path) -> None:
    """Run the first of the run file's ranks that has no report yet, and write its report.

    Raise StopIteration if all have one. A failure is reported and then raised.
    """
    spec, folder = read_run_spec(directory), RunFolder(directory)
    rank = next(rank for rank in spec.simulated_ranks if not folder.rank_report(rank).exists())
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(spec.layout.world_size))
    report_rank(directory, rank, HeartbeatWriter(directory, PROCESS_RANK), join_virtual_ranks)


@contextmanager
def join_virtual_ranks(spec: RunSpec) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Return a context in which this process is one rank of a world; yield the mesh of the world, and its device."""
    device, layout, rank = prepare_device(spec), spec.layout, int(os.environ["RANK"])
    with (
        own_tokens(spec.config.model.vocab_size, layout, rank),
        communication_hook(keep_bucket),
        pipeline_stages(),
        around(PipelineStage, "get_fwd_recv_ops", partial(receives_filled, RECEIVED_HIDDEN_STATE)),
        around(PipelineStage, "get_bwd_recv_ops", partial(receives_filled, RECEIVED_GRADIENT)),
        around(TiedTable, "exchange", exchange_filled),
        around(schedules, "_batch_p2p", start_and_hold),
        around(dist, "reduce_scatter_tensor", scatter_own_part),
        around(expert_parallel, "all_to_all_single", receive_own_counts),
        filled_parts(device) if layout.uses_deepspeed_zero else nullcontext(),
        fake_process_group(rank, layout.world_size),
    ):
        yield init_device_mesh(spec.device, layout.mesh_shape, mesh_dim_names=AXES), device


def keep_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Return a bucket as the average over ranks that all have the gradients of this one, after its all-reduce."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    return completed(buffer)


def scatter_own_part(scatter: Any, output: Tensor, input: Tensor, *arguments: Any, **keywords: Any) -> Any:
    """Reduce and scatter a tensor; before torch 2.13 the fake group does not write the output."""
    output.copy_(input.flatten()[: output.numel()].view_as(output))
    return scatter(output, input, *arguments, **keywords)


def receive_own_counts(exchange: Any, counts: Tensor, *arguments: Any) -> Tensor:
    """Exchange the numbers of tokens for experts with ranks that all have as many as this one, by balanced routing.

    The fake group copies what this rank sends to the first ranks in the order of senders.
    """
    group = arguments[-1]
    received = exchange(counts, *arguments)
    received.copy_(counts.view(group.size(), -1)[group.rank()].repeat(group.size()))
    return received  # type: ignore[no-any-return]


def own_vocabulary(vocab_size: int, layout: Layout, rank: int) -> range:
    """Return the token ids whose rows of embedding and head the rank holds: equal parts, the last ones shorter."""
    part = -(-vocab_size // layout.vocabulary_tp)
    place = layout.coordinates(rank)["tp"] if layout.vocabulary_tp > 1 else 0
    return range(vocab_size)[place * part : (place + 1) * part]


def own_tokens(vocab_size: int, layout: Layout, rank: int) -> AbstractContextManager[Any]:
    """Return a context in which all batches have tokens of the rank's own vocabulary, if it has any."""
    own = own_vocabulary(vocab_size, layout, rank)

    def sequence(read_sequence: Any, *arguments: Any) -> Any:
        tokens = read_sequence(*arguments)
        return own.start + tokens % len(own) if len(own) else tokens

    return around(Batches, "sequence", sequence)


RECEIVED_HIDDEN_STATE = 0.02  # of the size of an embedding's initial weights, which are what the first layer gets

RECEIVED_GRADIENT = 2.0**-10  # products of it are no subnormal numbers in float16, and sums over tokens do not overflow


class HeldMessages:
    """A handle of messages that keeps their tensors, as one of a real process group does.

    Gloo's keeps them until it is dropped, NCCL's until it was waited for.
    """

    def __init__(self, works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self.works, self.tensors = works, [*tensors]

    def wait(self) -> None:
        """Wait for the messages, which takes no time."""
        for work in self.works:
            work.wait()
        if any(tensor.is_cuda for tensor in self.tensors):
            self.tensors.clear()


def start_and_hold(start: Any, operations: list[dist.P2POp], desc: str | None = None) -> list[HeldMessages]:
    """Start messages, and return one handle of them all."""
    return [HeldMessages(start(operations, desc), [operation.tensor for operation in operations])]


def receives_filled(size: float, create_receives: Any, stage: Any, micro_batch: int) -> list[dist.P2POp]:
    """Return the receives that a stage creates, whose tensors have numbers of one size already."""
    operations: list[dist.P2POp] = create_receives(stage, micro_batch)
    for operation in operations:
        fill_received(operation.tensor, size)
    return operations


def exchange_filled(exchange: Any, table: TiedTable, sent: Tensor) -> Tensor:
    """Return a gradient of numbers of one size in the place of that of a tied table's other end."""
    received: Tensor = exchange(table, sent)
    fill_received(received, RECEIVED_GRADIENT)
    return received


def fill_received(tensor: Tensor, size: float) -> None:
    """Fill a tensor with numbers of one size and of alternating sign, whose mean is 0, in place of a message.

    Autograd does not see it, as it does not see a message.
    """
    values = tensor.data
    values[..., ::2] = size
    values[..., 1::2] = -size
