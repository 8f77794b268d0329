"""The simulated ranks of one layout, whose steps are timed together."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.records.heartbeat import HeartbeatWriter
from harness.records.rank_report import RankReport
from harness.records.run_folder import RunFolder, RunSpec
from harness.simulator.kernel_work import Collective, Transfers
from harness.simulator.operator_stream import Launch
from harness.simulator.process import StepRequest
from harness.simulator.rank import Progress, simulate_rank
from harness.simulator.stage_times import with_stage_waits
from harness.simulator.step_timing import TimedStep
from harness.util.files import atomic_write_json


def simulate_ranks_of_layout(
    requests: Sequence[StepRequest],
    report_progress: Progress = lambda phase, step: None,
    on_report: Callable[[RankReport], None] = lambda report: None,
    trace: Path | None = None,
) -> list[RankReport]:
    """Return the reports of ranks of one configuration and layout, and write a trace of their steps to a file.

    `on_report` is called with every report as soon as it exists, when the rank's step does not wait for other stages.
    """
    timed: list[TimedStep] = []
    reports = []
    for request in requests:
        reports.append(simulate_rank(request, report_progress, timed.append))
        on_report(reports[-1])
    if not timed:
        return reports
    config, layout = requests[0].config, requests[0].layout
    steps = with_stage_waits(layout, layout.grad_accumulation_steps(config.train), timed)
    if trace is not None:
        write_trace(trace, [event for step in steps for event in trace_events(step)])
    times = {step.rank: step.summary for step in steps}
    return [dataclasses.replace(report, simulated_time=times.get(report.rank)) for report in reports]


def simulate_ranks(spec: RunSpec, run_dir: Path) -> None:
    """Simulate the ranks that a run file names, one after another, and write the report of each and the trace of all.

    A report is written as soon as its rank was simulated, and again with the time for which it waits for other stages.
    """
    folder = RunFolder(run_dir)

    def write(report: RankReport) -> None:
        atomic_write_json(folder.rank_report(report.rank), report.to_json())

    requests = [
        StepRequest(spec.config, spec.layout, rank, spec.device, spec.device_name, spec.device_bytes)
        for rank in spec.simulated_ranks
    ]
    heartbeat = HeartbeatWriter(run_dir, 0)  # the launcher knows this process as rank 0
    for report in simulate_ranks_of_layout(requests, heartbeat, write, folder.trace):
        write(report)


Event = dict[str, Any]

MICROSECONDS = 1e6

PHASES = "phases"  # the name of the row that shows them


def trace_events(step: TimedStep) -> Iterator[Event]:
    """Yield the events of a rank's step, which is a process of the trace; its streams are threads."""
    rank, times = step.rank, zip(step.launches, step.starts, step.ends, strict=True)
    kernels = [(launch, start, end) for launch, start, end in times if launch.work is not None]
    streams = [PHASES, *sorted({launch.stream for launch, _, _ in kernels})]
    threads = {stream: number for number, stream in enumerate(streams)}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for stream, thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}}
    for phase, of_phase in groupby(kernels, key=lambda kernel: kernel[0].phase):
        _, starts, ends = zip(*of_phase, strict=True)
        yield _event(phase, rank, threads[PHASES], min(starts), max(ends))
    for launch, start, end in kernels:
        yield _event(launch.name, rank, threads[launch.stream], start, end) | {"args": _arguments(launch)}


def _event(name: str, rank: int, thread: int, start: float, end: float) -> Event:
    """Return an event with its times in microseconds, to a nanosecond."""
    times = {"ts": round(start * MICROSECONDS, 3), "dur": round((end - start) * MICROSECONDS, 3)}
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, **times}


def _arguments(launch: Launch) -> dict[str, Any]:
    """Return what the trace shows of a kernel when it is selected."""
    work: Any = launch.work
    values: dict[str, Any] = work._asdict()
    if isinstance(work, Collective):
        values["ranks"] = len(work.ranks)
    elif isinstance(work, Transfers):
        values = {"transfers": [" ".join(map(str, part)) for part in work.parts]}
    return values | ({"axis": launch.axis} if launch.axis else {})


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Write the events of all simulated ranks."""
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")))
