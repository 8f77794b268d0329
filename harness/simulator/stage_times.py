"""The wait of pipeline stages for each other: their steps played together, or the planner's bubble for one of them.

A rank's own step is a program of segments between the points at which it meets other stages: launches of transfers,
waits for them, and collectives along the pipeline. Where every stage was simulated, these programs are played against
each other by the rules of harness.simulator.nccl_timeline. Where only one was, all stages are taken to be as long as
it, and the share of its passes that the schedule's formula gives is added.
"""

import dataclasses
from collections.abc import Sequence

from harness.cost_model.pipeline import bubble_ratio
from harness.layout.layout import Layout
from harness.simulator.kernel_work import Collective, Transfers
from harness.simulator.nccl_timeline import InitMode, Kernel, timed_kernels
from harness.simulator.operator_stream import Launch
from harness.simulator.pipeline_program import Meeting, Program, Segment, Transfer, TransferLaunch, TransferWait
from harness.simulator.step_timing import TimedStep

# Process groups bind no device, so that pairs of ranks have communicators of their own (harness.worker.process_group).
INIT_MODE: InitMode = "lazy"

MAIN = "stream 0"

WITHOUT_PASSES = ("norm", "optimizer")  # the phases of a step that do not belong to a micro-batch


def with_stage_waits(layout: Layout, micro_batches: int, steps: Sequence[TimedStep]) -> list[TimedStep]:
    """Return the steps of a layout's simulated ranks with the time in which they wait for other stages."""
    if not layout.pp_enabled:
        return list(steps)
    stage_ranks = layout.world_size // layout.pp
    if [step.rank for step in steps] == list(range(0, layout.world_size, stage_ranks)):
        return played_together(steps, stage_ranks)
    ratio = bubble_ratio(layout, micro_batches)
    return [with_planned_bubble(step, ratio) for step in steps]


def with_planned_bubble(step: TimedStep, ratio: float) -> TimedStep:
    """Return a step with the bubble of a pipeline whose other stages take as long as this one."""
    own = step.summary
    passes = own.step_seconds - sum(own.phase_seconds.get(name, 0.0) for name in WITHOUT_PASSES)
    return with_wait(step, ratio * passes, is_planned=True)


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
    programs = [StageProgram(step, stage_ranks) for step in steps]
    kernels = timed_kernels([program.entries for program in programs], INIT_MODE)
    end = max(kernel.end or 0.0 for of_rank in kernels for kernel in of_rank)
    return [
        with_wait(program.shifted(of_rank), end - program.step.summary.step_seconds, is_planned=False)
        for program, of_rank in zip(programs, kernels, strict=True)
    ]


class StageProgram:
    """A rank's step as segments between the points at which it meets other stages."""

    def __init__(self, step: TimedStep, stage_ranks: int) -> None:
        self.step = step
        self.entries: Program = []
        self.starts: list[float] = []  # of each entry, in the time of the rank's own step
        self.entry_of_launch: list[int] = []
        self._stage_ranks = stage_ranks
        self._now = self._main_end = 0.0
        self._meetings: set[int] = set()
        self._transfers: dict[int, int] = {}  # the entries of transfers, by number of launch
        for number, launch in enumerate(step.launches):
            self._add(number, launch)
        self._end_segment(step.schedule.step_seconds)

    def _add(self, number: int, launch: Launch) -> None:
        """Add a launch to the present segment, and end the segment where the launch meets other stages."""
        ends = self.step.schedule.ends
        for other in launch.after:
            if other in self._transfers:
                self._end_segment(self._main_end)
                self._append(TransferWait(self._transfers.pop(other)))
                self._now = max(self._now, ends[other])
        if isinstance(launch.work, Transfers):
            self._end_segment(self._main_end)
            self._transfers[number] = len(self.entries)
            self._append(self._transfer(number, launch.work))
        elif isinstance(launch.work, Collective) and self._spans_stages(launch.work.ranks):
            start = self.step.schedule.starts[number]
            self._end_segment(start)
            self._append(Meeting(ends[number] - start))
            self._now = self._main_end = ends[number]
            self._meetings.add(number)
        is_entry = number in self._transfers or number in self._meetings
        self.entry_of_launch.append(len(self.entries) - is_entry)  # others are in the segment that ends next
        if launch.stream == MAIN:
            self._main_end = ends[number]

    def _append(self, entry: Segment | Meeting | TransferLaunch | TransferWait) -> None:
        self.entries.append(entry)
        self.starts.append(self._now)

    def _end_segment(self, end: float) -> None:
        """End the segment that began at the last meeting; transfers that no launch depends on do not end it later."""
        self._append(Segment(max(0.0, end - self._now)))
        self._now = max(self._now, end)

    def _transfer(self, number: int, work: Transfers) -> TransferLaunch:
        schedule, is_batch = self.step.schedule, not self.step.launches[number].stream.startswith("pair")
        transfers = tuple(Transfer(direction, peer // self._stage_ranks) for direction, peer, _ in work.parts)
        return TransferLaunch(transfers, is_batch, schedule.ends[number] - schedule.starts[number])

    def _spans_stages(self, ranks: Sequence[int]) -> bool:
        return len({rank // self._stage_ranks for rank in ranks}) > 1

    def shifted(self, kernels: Sequence[Kernel]) -> TimedStep:
        """Return the step with its launches moved to when their segments run beside the other stages."""
        moves = [
            (kernel.end or 0.0) - kernel.seconds - start for kernel, start in zip(kernels, self.starts, strict=True)
        ]
        schedule = self.step.schedule
        by_launch = [moves[entry] for entry in self.entry_of_launch]
        moved = dataclasses.replace(
            schedule,
            starts=[start + move for start, move in zip(schedule.starts, by_launch, strict=True)],
            ends=[end + move for end, move in zip(schedule.ends, by_launch, strict=True)],
        )
        return dataclasses.replace(self.step, schedule=moved)
