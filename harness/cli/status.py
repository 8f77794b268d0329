"""harness status results/NAME: the progress of a comparison's commands, from any shell while they run or after."""

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

from rich.console import Console

from harness.config.schema import PROFILED_STEPS, TRACED_STEPS
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.records.store import LoadedRecords, read_all
from harness.sweep.command_file import CommandFile, read_commands, seconds_left
from harness.sweep.jobs.clusters import running_jobs
from harness.util.text import format_duration, sanitize

WIDTH = 120  # columns, where the output is not a terminal


def status_lines(comparison: ComparisonFolder) -> Iterator[str]:
    """Yield the lines of `harness status`."""
    loaded = read_all(comparison.path)
    counts = Counter(record.status for record in loaded.records)
    summary = ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "no run is recorded"
    yield f"{comparison.path}: {summary}" + (f", {len(loaded.running)} running" if loaded.running else "")
    for record in loaded.running:
        yield f"  {run_line(comparison, record)}"
    yield from (f"  {run}: {state}" for run, state in running_jobs(comparison))
    for queue, is_alive in read_commands(comparison):
        yield command_line(queue, is_alive, loaded)
    for record in loaded.records:
        if record.status not in ("ok", "refused"):
            yield f"  {record.run_id} {record.status}: {sanitize(record.row['reason'])}"
    yield from (f"  {problem}" for problem in loaded.problems)
    yield from (f"  {path} is damaged and has no effect: remove it" for path in comparison.damaged_files())


def run_line(comparison: ComparisonFolder, record: Record) -> str:
    """Return the progress of a running run: the step and phase of the rank that is furthest behind."""
    folder = comparison.run(record.run_id)
    ranks = range(record.row.get("world_size") or 1)
    beats = [beat for rank in ranks if (beat := folder.read_heartbeat(rank))]
    if not beats:
        return f"{record.run_id}: starting"
    behind = min(beats, key=lambda beat: beat.step)
    allocated_bytes = max((beat.allocated_bytes or 0 for beat in beats), default=0)
    memory = f", {allocated_bytes / 2**20:,.0f} MiB on its fullest rank" if allocated_bytes else ""
    train = record.config["train"]
    total_steps = train["warmup_steps"] + train["steps"] + TRACED_STEPS + PROFILED_STEPS
    return f"{record.run_id}: {behind.phase}, step {behind.step} of {total_steps}{memory}"


def command_line(queue: CommandFile, is_alive: bool, loaded: LoadedRecords) -> str:
    """Return how many of a command's runs are recorded, and how long the rest may take."""
    rows = {record.run_id: record.row for record in loaded.records}
    done = [run for run in queue.runs if run.run_id in rows and rows[run.run_id]["status"] != "interrupted"]
    age = format_duration(max(0.0, time.time() - queue.started_at))
    name = f"command {queue.pid} on {queue.host}, started {age} ago"
    count = f"{len(done)} of {len(queue.runs)} runs are recorded"
    if not is_alive:
        return f"{name}, has exited: {count}; the same command continues with the others"
    finished = [(run.cost, seconds) for run in done if (seconds := rows[run.run_id].get("duration_seconds"))]
    left = [run.cost for run in queue.runs if run not in done]
    estimate = seconds_left(finished, left, queue.max_parallel)
    about = f"; about {format_duration(estimate)} left" if estimate and left else ""
    return f"{name}, is running: {count}{about}"


def main(options: Namespace) -> None:
    """Print the state of a comparison. Raises UserError if there is no such folder."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for line in status_lines(ComparisonFolder(options.folder)):
        console.print(line, markup=False, soft_wrap=True)
