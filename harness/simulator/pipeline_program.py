"""What one rank of a pipeline enqueues on its device in a step, recorded from torch's own schedules.

The schedules run as they are: their loops or lowered action lists, and _batch_p2p, which decides what is sent and
received in one batch (torch/distributed/pipelining/schedules.py: "avoids coalescing for homogeneous batches (all-send
or all-recv)"). Only the stages compute nothing, and sends and receives are written down. The order does not depend on
time, because a rank's host never waits for its device within a step: Work.wait() of NCCL makes the current stream wait.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage

from harness.cost_model.pipeline import PassKind
from harness.engines.torch.pipeline_parallel import MULTI_STAGE_SCHEDULES, SINGLE_STAGE_SCHEDULES
from harness.layout.layout import Layout
from harness.simulator.process_group import fake_process_group, pipeline_stages


class StagePass(NamedTuple):
    """A pass of a micro-batch through a stage, which runs on the current stream."""

    kind: PassKind
    stage: int


class Segment(NamedTuple):
    """Anything that a rank does on its current stream without other stages, which takes so many seconds."""

    seconds: float


class Meeting(NamedTuple):
    """A collective of all stages on the current stream, which begins when the last one is there."""

    seconds: float


class Transfer(NamedTuple):
    """A send to a rank or a receive from it."""

    direction: Literal["send", "receive"]
    peer: int


@dataclass(frozen=True)
class TransferLaunch:
    """The launch of one kernel that carries out transfers; a batch of them is one kernel."""

    transfers: tuple[Transfer, ...]
    is_batch: bool
    seconds: float | None = None  # None means as long as all transfers of the pipeline


class TransferWait(NamedTuple):
    """The point at which the current stream waits for the transfers launched as the program's entry `launch`."""

    launch: int


Program = list[StagePass | Segment | Meeting | TransferLaunch | TransferWait]


def record_programs(layout: Layout, micro_batches: int) -> list[Program]:
    """Return what every rank of the layout's pipeline enqueues in one step."""
    return [record_program(layout, micro_batches, rank) for rank in range(layout.pp)]


def record_program(layout: Layout, micro_batches: int, rank: int) -> Program:
    """Return what one rank of the layout's pipeline enqueues in one step."""
    recorder = Recorder()
    with fake_process_group(rank, layout.pp):
        stages = [
            RecordedStage(rank + layout.pp * index, layout.num_stages, recorder)
            for index in range(layout.virtual_stages)
        ]
        schedule: Any
        if layout.schedule in SINGLE_STAGE_SCHEDULES:
            single: Any = SINGLE_STAGE_SCHEDULES[layout.schedule]
            schedule = single(stages[0], micro_batches, loss_fn=_loss, scale_grads=False)
        else:
            multi: Any = MULTI_STAGE_SCHEDULES[layout.schedule]
            schedule = multi(list(stages), micro_batches, loss_fn=_loss, scale_grads=False)
        with pipeline_stages(), recorder.transfers():
            rows = torch.zeros(micro_batches, 1)
            arguments = (rows,) if stages[0].is_first else ()
            schedule.step(*arguments, target=rows if stages[-1].is_last else None, return_outputs=False)
    return recorder.program


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


class Recorder:
    """A recorder of one rank's program, which takes the place of the process group's sends and receives."""

    def __init__(self) -> None:
        self.program: Program = []

    @contextmanager
    def transfers(self) -> Iterator[None]:
        """Return a context in which sends and receives are recorded and not carried out."""
        stand_ins = {"isend": self.isend, "irecv": self.irecv, "batch_isend_irecv": self.batch_isend_irecv}
        with ExitStack() as stack:
            for module in (dist, distributed_c10d):
                for name, stand_in in stand_ins.items():
                    stack.enter_context(mock.patch.object(module, name, stand_in))
            yield

    def isend(self, tensor: Tensor, *, group_dst: int, **_: Any) -> "RecordedWork":
        """Record a send."""
        return self._launch([Transfer("send", group_dst)], is_batch=False)

    def irecv(self, tensor: Tensor, *, group_src: int, **_: Any) -> "RecordedWork":
        """Record a receive."""
        return self._launch([Transfer("receive", group_src)], is_batch=False)

    def batch_isend_irecv(self, operations: Sequence[dist.P2POp]) -> list["RecordedWork"]:
        """Record sends and receives of one batch."""
        transfers = [
            Transfer("send" if operation.op == self.isend else "receive", operation.group_peer)
            for operation in operations
        ]
        return [self._launch(transfers, is_batch=True)]

    def _launch(self, transfers: Sequence[Transfer], is_batch: bool) -> "RecordedWork":
        self.program.append(TransferLaunch(tuple(transfers), is_batch))
        return RecordedWork(self.program, len(self.program) - 1)


class RecordedWork(NamedTuple):
    """The work that a send or receive returns."""

    program: Program
    launch: int

    def wait(self) -> None:
        """Record that the current stream waits for the transfers."""
        self.program.append(TransferWait(self.launch))


class RecordedStage(PipelineStage):
    """A stage that records its passes; every tensor between stages has one element."""

    def __init__(self, index: int, count: int, recorder: Recorder) -> None:
        self.recorder = recorder
        self.hidden = torch.zeros(1, 1, requires_grad=True)
        example = torch.empty(1, 1, device="meta", requires_grad=True)
        super().__init__(
            nn.Identity(), index, count, torch.device("cpu"), input_args=example, output_args=example, group=_world()
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Tensor:
        """Record a forward, and leave an output to send."""
        self._record("forward")
        self.fwd_cache[fwd_chunk_id] = ((self.hidden,), [])
        return self.hidden

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Record a backward, or its half for inputs, which the first stage leaves out; leave a gradient to send."""
        if full_backward or not self.is_first:
            self._record("backward" if full_backward else "inputs")
        self.fwd_cache.pop(bwd_chunk_id)
        self.bwd_cache[bwd_chunk_id] = (None if self.is_first else self.hidden.detach(),)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Record the half of a backward for weights, which is a whole backward in the first stage."""
        self._record("backward" if self.is_first else "weights")

    def _record(self, kind: PassKind) -> None:
        self.recorder.program.append(StagePass(kind, self.stage_index))


def _world() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    return distributed_c10d._get_default_group()
