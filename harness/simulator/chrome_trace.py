"""A simulated step as a file that Perfetto and Chrome's tracing page read: a row for the phases and for each stream."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.simulator.kernel_work import Collective, Transfers
from harness.simulator.operator_stream import Launch
from harness.simulator.stream_schedule import Schedule

Event = dict[str, Any]

MICROSECONDS = 1e6

PHASES = "phases"  # the name of the row that shows them


def trace_events(rank: int, launches: Sequence[Launch], schedule: Schedule) -> Iterator[Event]:
    """Yield the events of a rank's step, which is a process of the trace; its streams are threads."""
    streams = [PHASES, *sorted({launch.stream for launch in launches if launch.work is not None})]
    threads = {stream: number for number, stream in enumerate(streams)}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for stream, thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}}
    kernels = [number for number, launch in enumerate(launches) if launch.work is not None]
    for phase, numbers in groupby(kernels, key=lambda number: launches[number].phase):
        of_phase = list(numbers)
        start = min(schedule.starts[number] for number in of_phase)
        yield _event(phase, rank, threads[PHASES], start, max(schedule.ends[number] for number in of_phase))
    for number in kernels:
        launch = launches[number]
        start, end = schedule.starts[number], schedule.ends[number]
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
