"""torch's own pipeline schedules with stages that compute nothing, as the simulator records and times their launches.

The schedules run as they are: their loops or lowered action lists, and _batch_p2p, which decides what is sent and
received in one batch (torch/distributed/pipelining/schedules.py: "avoids coalescing for homogeneous batches (all-send
or all-recv)"). The order does not depend on time, because a rank's host never waits for its device within a step.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config.hardware import FittedHardware
from harness.cost_model.pipeline import PassKind
from harness.engines.torch.pipeline_parallel import SCHEDULES
from harness.layout.layout import Layout
from harness.simulator.kernel_work import Movement, Transfers
from harness.simulator.operator_stream import Launch, StreamRecorder
from harness.simulator.process_group import fake_process_group, pipeline_stages
from harness.simulator.stage_times import MAIN, played_together
from harness.simulator.stream_schedule import Player, TimedStep

Steps = list[list[Launch]]  # of every rank


def rates(launch_seconds: float = 0.0, overlap_slowdown: float = 0.0) -> FittedHardware:
    """Return the host's seconds for a launch, and by how much communication slows down what computes."""
    others = dict.fromkeys((field.name for field in dataclasses.fields(FittedHardware)), 1.0)
    return FittedHardware(**others | {"launch_seconds": launch_seconds, "overlap_slowdown": overlap_slowdown})


class TransferMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that tells a recorder of sends and receives alone."""

    def __init__(self, recorder: StreamRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.recorder.on_operator(func, args, kwargs or {}, result)
        return result


class EmptyStage(PipelineStage):
    """A stage that launches one kernel for each pass; every tensor between stages has one element."""

    def __init__(self, index: int, count: int, recorder: StreamRecorder) -> None:
        self.recorder = recorder
        self.hidden = torch.zeros(1, 1, requires_grad=True)
        example = torch.empty(1, 1, device="meta", requires_grad=True)
        group = distributed_c10d._get_default_group()
        super().__init__(
            nn.Identity(), index, count, torch.device("cpu"), input_args=example, output_args=example, group=group
        )

    def launch(self, kind: PassKind) -> None:
        self.recorder.launch(kind, Movement(0), MAIN)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Tensor:
        self.launch("forward")
        self.fwd_cache[fwd_chunk_id] = ((self.hidden,), [])
        return self.hidden

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Launch a backward, or its half for inputs, which the first stage leaves out; leave a gradient to send."""
        if full_backward or not self.is_first:
            self.launch("backward" if full_backward else "inputs")
        self.fwd_cache.pop(bwd_chunk_id)
        self.bwd_cache[bwd_chunk_id] = (None if self.is_first else self.hidden.detach(),)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Launch the half of a backward for weights, which is a whole backward in the first stage."""
        self.launch("backward" if self.is_first else "weights")


def record_rank(layout: Layout, micro_batches: int, rank: int) -> list[Launch]:
    """Return what one rank of the layout's pipeline launches in one step."""
    recorder = StreamRecorder(layout, rank, "cpu")
    schedule_of_layout = SCHEDULES[layout.schedule]
    with fake_process_group(rank, layout.pp):
        stages = [EmptyStage(index, layout.num_stages, recorder) for index in layout.stage_indices(rank)]
        own: Any = stages if issubclass(schedule_of_layout, PipelineScheduleMulti) else stages[0]
        loss = lambda output, target: output.sum()  # noqa: E731
        schedule = schedule_of_layout(own, micro_batches, loss_fn=loss, scale_grads=False)
        rows = torch.zeros(micro_batches, 1)
        with pipeline_stages(), recorder.attach(), TransferMode(recorder):
            arguments = (rows,) if stages[0].is_first else ()
            schedule.step(*arguments, target=rows if stages[-1].is_last else None, return_outputs=False)
    return recorder.launches


def record_pipeline(layout: Layout, micro_batches: int) -> Steps:
    """Return what every rank of the layout's pipeline launches in one step."""
    return [record_rank(layout, micro_batches, rank) for rank in range(layout.pp)]


def step_seconds(steps: Steps, pass_seconds: Mapping[PassKind, float], transfer_seconds: float, eager: bool) -> float:
    """Return how long a step takes on all ranks; `eager` is a process group that is bound to devices."""
    timed = [timed_step(rank, step, pass_seconds, transfer_seconds, eager) for rank, step in enumerate(steps)]
    return played_together(timed, stage_ranks=1)[0].summary.step_seconds


def timed_step(
    rank: int, step: Sequence[Launch], pass_seconds: Mapping[Any, float], transfer_seconds: float, eager: bool
) -> TimedStep:
    is_sent = [isinstance(launch.work, Transfers) for launch in step]
    launches = [
        launch._replace(stream="communicator") if eager and sent else launch
        for launch, sent in zip(step, is_sent, strict=True)
    ]
    seconds = [
        transfer_seconds if sent else pass_seconds[launch.name] for launch, sent in zip(step, is_sent, strict=True)
    ]
    return Player(launches, seconds, rates()).play(rank)
