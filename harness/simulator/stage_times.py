"""The wait of pipeline stages for each other: their steps played together, or the planner's bubble for one of them.

A rank's own step consists of segments between the points at which it meets other stages: launches of transfers, waits
for them, and collectives along the pipeline. Where every stage was simulated, these are kernels that are played against
each other. Where only one was, all stages are taken to be as long as it, and the share of its passes that the
schedule's formula gives is added.

The rules are those of torch's ProcessGroupNCCL (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, pointToPoint and
startCoalescing) up to version 2.13:

- Kernels of one stream run in the order of their launch. A transfer's stream first waits for what the current stream
  was given before the launch (syncStream); the current stream waits for a transfer at Work.wait().
- A batch (batch_isend_irecv) is one kernel. "For batch P2P, we need to treat it like a collective when selecting
  communicator": it runs on the stream of the group's communicator.
- A single send or receive depends on how the group was initialized. Without a device_id, as here
  (harness.worker.process_group), "In lazy initialization mode, this will result in a new 2-rank NCCL communicator to be
  created", whose key has both ranks and no direction: there is a stream for each pair of ranks. With a device_id, "In
  eager initialization mode, unbatched P2P ops are treated as independent collective ops, and are thus serialized with
  all other ops on this ProcessGroup": all use one stream.
- The n-th send from a rank to another over a communicator meets the n-th receive there. Both kernels run until the
  transfer is over, which takes its time from when the later of the two runs.

Left out are the time in which the host launches kernels, the sharing of links and of multiprocessors between kernels,
and that small messages are sent into buffers without a receiver.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import chain

from harness.cost_model.pipeline import bubble_ratio
from harness.layout.layout import Layout
from harness.simulator.kernel_work import Collective, TransferPart, Transfers
from harness.simulator.operator_stream import PAIR, Launch
from harness.simulator.stream_schedule import TimedStep

MAIN = "stream 0"
WITHOUT_PASSES = ("norm", "optimizer")  # the phases of a step that do not belong to a micro-batch


class DeadlockError(RuntimeError):
    """The error that kernels wait for each other for ever."""


@dataclass(eq=False)
class StageKernel:
    """A kernel, or a wait, on a stream of a stage's rank, that is ready when the stream reaches it."""

    rank: int
    stream: str
    seconds: float = 0.0
    after: tuple["StageKernel", ...] = ()  # on other streams of the rank
    transfers: tuple[TransferPart, ...] = ()
    is_meeting: bool = False  # a collective of all stages
    peers: list["StageKernel"] = field(default_factory=list)  # the other side of each transfer, or those of a meeting
    own_start: float = 0.0  # in the time of the rank's own step
    end: float = 0.0


def with_stage_waits(layout: Layout, micro_batches: int, steps: Sequence[TimedStep]) -> list[TimedStep]:
    """Return the steps of a layout's simulated ranks with the time in which they wait for other stages."""
    if not layout.pp_enabled:
        return list(steps)
    stage_ranks = layout.world_size // layout.pp
    if [step.rank for step in steps] == list(range(0, layout.world_size, stage_ranks)):
        return played_together(steps, stage_ranks)
    ratio, planned = bubble_ratio(layout, micro_batches), []
    for step in steps:
        own = step.summary
        passes = own.step_seconds - sum(own.phase_seconds.get(name, 0.0) for name in WITHOUT_PASSES)
        planned.append(with_wait(step, ratio * passes, is_planned=True))
    return planned


def with_wait(step: TimedStep, seconds: float, is_planned: bool) -> TimedStep:
    """Return a step that is idle for so many more seconds."""
    own = step.summary
    summary = dataclasses.replace(
        own,
        step_seconds=own.step_seconds + seconds,
        idle_seconds=own.idle_seconds + seconds,
        bubble_seconds=seconds,
        bubble_is_planned=is_planned,
    )
    return dataclasses.replace(step, summary=summary)


def played_together(steps: Sequence[TimedStep], stage_ranks: int) -> list[TimedStep]:
    """Return the steps of one rank of every stage as they run beside each other."""
    stages = [StageStep(step, stage_ranks) for step in steps]
    end = play_kernels([stage.kernels for stage in stages])
    return [with_wait(stage.moved(), end - stage.step.summary.step_seconds, is_planned=False) for stage in stages]


class StageStep:
    """A rank's step as kernels: segments, and the points between them at which it meets other stages."""

    def __init__(self, step: TimedStep, stage_ranks: int) -> None:
        self.step, self.stage_ranks = step, stage_ranks
        self.kernels: list[StageKernel] = []
        self.kernel_of_launch: list[StageKernel] = []
        self._segment = StageKernel(step.rank, MAIN)  # the present one, which began at the last meeting
        self._now = self._main_end = 0.0
        self._transfers: dict[int, StageKernel] = {}  # that nothing has waited for, by number of launch
        for number, launch in enumerate(step.launches):
            self._add(number, launch)
        self._meet(step.summary.step_seconds, StageKernel(step.rank, MAIN))  # the step's end

    def _add(self, number: int, launch: Launch) -> None:
        """Add a launch to the present segment, and end the segment where the launch meets other stages."""
        work, rank, start, end = launch.work, self.step.rank, self.step.starts[number], self.step.ends[number]
        for other in launch.after:
            if other in self._transfers:
                self._meet(self._main_end, StageKernel(rank, MAIN, after=(self._transfers.pop(other),)))
                self._now = max(self._now, self.step.ends[other])
        kernel = self._segment
        if isinstance(work, Transfers):
            stream = launch.stream if launch.stream.startswith(PAIR) else "group"
            kernel = self._transfers[number] = StageKernel(rank, stream, end - start, (self._segment,), work.parts)
            self._meet(self._main_end, kernel)
        elif isinstance(work, Collective) and len({other // self.stage_ranks for other in work.ranks}) > 1:
            kernel = StageKernel(rank, MAIN, end - start, is_meeting=True)
            self._meet(start, kernel)
            self._now = self._main_end = end
        self.kernel_of_launch.append(kernel)
        if launch.stream == MAIN:
            self._main_end = end

    def _meet(self, end: float, kernel: StageKernel) -> None:
        """End the segment, and add what follows; transfers that no launch depends on do not end a segment later."""
        self._segment.own_start, self._segment.seconds = self._now, max(0.0, end - self._now)
        self._now = kernel.own_start = max(self._now, end)
        self.kernels += [self._segment, kernel]
        self._segment = StageKernel(self.step.rank, MAIN)

    def moved(self) -> TimedStep:
        """Return the step with its launches moved to when their segments run beside the other stages."""
        moves = [kernel.end - kernel.seconds - kernel.own_start for kernel in self.kernel_of_launch]
        starts = [start + move for start, move in zip(self.step.starts, moves, strict=True)]
        ends = [end + move for end, move in zip(self.step.ends, moves, strict=True)]
        return dataclasses.replace(self.step, starts=starts, ends=ends)


def play_kernels(stages: Sequence[Sequence[StageKernel]]) -> float:
    """Set when the kernels of every stage run, which are in the order of their launch; return when the last one ends.

    Raise DeadlockError if kernels wait for each other, or if a transfer has no other side.
    """
    kernels = list(chain.from_iterable(stages))
    connect_transfers(kernels)
    for met in zip(*([kernel for kernel in stage if kernel.is_meeting] for stage in stages), strict=True):
        for kernel in met:
            kernel.peers.extend(met)
    last: dict[tuple[int, str], StageKernel] = {}
    before: dict[StageKernel, list[StageKernel]] = {}
    for kernel in kernels:
        stream = (kernel.rank, kernel.stream)
        before[kernel] = [*kernel.after, *([last[stream]] if stream in last else [])]
        last[stream] = kernel
    waits = {kernel: [other for side in (kernel, *kernel.peers) for other in before[side]] for kernel in kernels}
    try:
        for kernel in TopologicalSorter(waits).static_order():
            kernel.end = max((other.end for other in waits[kernel]), default=0.0) + kernel.seconds
    except CycleError as error:
        stuck = sorted({f"rank {kernel.rank} ({kernel.stream})" for kernel in error.args[1]})
        raise DeadlockError(f"the schedule waits for itself on {', '.join(stuck)}") from None
    return max(kernel.end for kernel in kernels)


def connect_transfers(kernels: Sequence[StageKernel]) -> None:
    """Give every transfer's kernel its peers. Raise DeadlockError if a send has no receive or the reverse."""
    sides: defaultdict[tuple[str, int, int], dict[str, list[StageKernel]]]
    sides = defaultdict(lambda: {"send": [], "receive": []})
    for kernel in kernels:
        for direction, peer, _ in kernel.transfers:
            source, target = (kernel.rank, peer) if direction == "send" else (peer, kernel.rank)
            sides[kernel.stream, source, target][direction].append(kernel)
    for (stream, source, target), both in sorted(sides.items()):
        sends, receives = both["send"], both["receive"]
        if len(sends) != len(receives):
            raise DeadlockError(
                f"rank {source} sends {len(sends)} times to rank {target} on the stream {stream}, which receives"
                f" {len(receives)} times"
            )
        for send, receive in zip(sends, receives, strict=True):
            send.peers.append(receive)
            receive.peers.append(send)
