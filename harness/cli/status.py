"""harness status results/NAME: the progress of a comparison's commands, from any shell while they run or after."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from harness.config.schema import PROFILED_STEPS, TRACED_STEPS
from harness.records import heartbeat
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.records.store import LoadedRecords, read_all
from harness.sweep.command_file import CommandFile, read_commands, seconds_left
from harness.sweep.display import format_duration
from harness.sweep.slurm.commands import running_jobs
from harness.util.errors import run_command
from harness.util.text import sanitize

WIDTH = 120  # columns, where the output is not a terminal


@dataclass(frozen=True)
class ComparisonStatus:
    """The state of a comparison at one moment."""

    loaded: LoadedRecords
    jobs: dict[str, str]  # Slurm's state by run
    commands: list[tuple[CommandFile, bool]]  # each with whether it is alive


def read_status(comparison: ComparisonFolder) -> ComparisonStatus:
    """Return the state of a comparison. Raises UserError if there is no such folder."""
    loaded = read_all(comparison.path)
    return ComparisonStatus(loaded, running_jobs(comparison), read_commands(comparison))


def status_lines(comparison: ComparisonFolder, status: ComparisonStatus) -> Iterator[str]:
    """Yield the lines of `harness status`."""
    loaded = status.loaded
    counts = Counter(record.status for record in loaded.records)
    summary = ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "no run is recorded"
    yield f"{comparison.path}: {summary}" + (f", {len(loaded.running)} running" if loaded.running else "")
    for record in loaded.running:
        yield f"  {run_line(comparison, record)}"
    for run, state in status.jobs.items():
        yield f"  {run}: its Slurm job is {state.lower()}"
    for command, is_alive in status.commands:
        yield command_line(command, is_alive, loaded)
    for record in loaded.records:
        if record.status not in ("ok", "refused"):
            yield f"  {record.run_id} {record.status}: {sanitize(record.row['reason'])}"
    yield from (f"  {problem}" for problem in loaded.problems)


def run_line(comparison: ComparisonFolder, record: Record) -> str:
    """Return the progress of a running run: the step and phase of the rank that is furthest behind."""
    folder = comparison.run(record.run_id).path
    ranks = range(record.row.get("world_size") or 1)
    beats = [beat for rank in ranks if (beat := heartbeat.read_heartbeat(folder, rank))]
    if not beats:
        return f"{record.run_id}: starting"
    behind = min(beats, key=lambda beat: beat.step)
    allocated_bytes = max((beat.allocated_bytes or 0 for beat in beats), default=0)
    memory = f", {allocated_bytes / 2**20:,.0f} MiB on its fullest rank" if allocated_bytes else ""
    train = record.config["train"]
    total_steps = train["warmup_steps"] + train["steps"] + TRACED_STEPS + PROFILED_STEPS
    return f"{record.run_id}: {behind.phase}, step {behind.step} of {total_steps}{memory}"


def command_line(command: CommandFile, is_alive: bool, loaded: LoadedRecords) -> str:
    """Return how many of a command's runs are recorded, and how long the rest may take."""
    rows = {record.run_id: record.row for record in loaded.records}
    done = [run for run in command.runs if run.run_id in rows and rows[run.run_id]["status"] != "interrupted"]
    age = format_duration(max(0.0, time.time() - command.started_at))
    name = f"command {command.pid} on {command.host}, started {age} ago"
    count = f"{len(done)} of {len(command.runs)} runs are recorded"
    if not is_alive:
        return f"{name}, has exited: {count}; the same command continues with the others"
    finished = [(run.cost, seconds) for run in done if (seconds := rows[run.run_id].get("duration_seconds"))]
    left = [run.cost for run in command.runs if run not in done]
    estimate = seconds_left(finished, left, command.max_parallel)
    about = f"; about {format_duration(estimate)} left" if estimate and left else ""
    return f"{name}, is running: {count}{about}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `harness status` and return its exit status."""
    about = "Show how far the commands of a comparison are, while they run or after."
    parser = argparse.ArgumentParser(prog="harness status", description=about)
    parser.add_argument("folder", type=Path, metavar="results/NAME", help="the folder of one comparison")
    comparison = ComparisonFolder(parser.parse_args(arguments).folder)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)

    def show() -> None:
        for line in status_lines(comparison, read_status(comparison)):
            console.print(line, markup=False, soft_wrap=True)

    return run_command(show)
