"""harness status results/NAME: how far its commands are, seen from any shell while they run or after."""

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
from harness.records.schema import Record
from harness.records.store import LoadedRecords, read_all
from harness.sweep import command_file
from harness.sweep.command_file import CommandFile
from harness.sweep.display import format_duration
from harness.sweep.slurm.mailbox import running_jobs
from harness.util.errors import run_command
from harness.util.text import sanitize

WIDE = 120  # columns, where there is no terminal to ask


@dataclass(frozen=True)
class Status:
    """What a folder says of itself."""

    found: LoadedRecords
    jobs: dict[str, str]  # Slurm's, by run: their state
    commands: list[tuple[CommandFile, bool]]  # with whether each is alive


def read_status(folder: Path) -> Status:
    """Raises UserError if there is no such folder."""
    found = read_all(folder)
    return Status(found, running_jobs(folder), command_file.read_commands(folder))


def status_lines(folder: Path, seen: Status) -> Iterator[str]:
    counts = Counter(record["row"]["status"] for record in seen.found.records)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "no run recorded"
    yield f"{folder}: {told}" + (f", {len(seen.found.running)} running" if seen.found.running else "")
    for record in seen.found.running:
        yield f"  {run_line(folder, record)}"
    for run, state in seen.jobs.items():
        yield f"  {run}: Slurm says {state.lower()}"
    for command, is_alive in seen.commands:
        yield from command_line(command, is_alive, seen)
    for record in seen.found.records:
        row = record["row"]
        if row["status"] not in ("ok", "refused"):
            yield f"  {row['run_id']} {row['status']}: {sanitize(row['reason'])}"
    yield from (f"  {problem}" for problem in seen.found.problems)


def run_line(folder: Path, record: Record) -> str:
    """Where its ranks are: the one furthest behind."""
    row = record["row"]
    ranks = range(row.get("world_size") or 1)
    beats = [beat for rank in ranks if (beat := heartbeat.read_heartbeat(folder / row["run_id"], rank))]
    if not beats:
        return f"{row['run_id']}: starting"
    behind = min(beats, key=lambda beat: beat.step)
    held = max((beat.allocated_bytes or 0 for beat in beats), default=0)
    memory = f", {held / 2**20:,.0f} MiB on its fullest rank" if held else ""
    train = record["config"]["train"]
    of_all = train["warmup_steps"] + train["steps"] + TRACED_STEPS + PROFILED_STEPS
    return f"{row['run_id']}: {behind.phase}, step {behind.step} of {of_all}{memory}"


def command_line(command: CommandFile, is_alive: bool, seen: Status) -> Iterator[str]:
    """What it was to run, what of it is done, and how long the rest may take."""
    rows = {record["row"]["run_id"]: record["row"] for record in seen.found.records}
    done = [one for one in command.runs if one.run_id in rows and rows[one.run_id]["status"] != "interrupted"]
    where = f"command {command.pid} on {command.host}, begun {format_duration(max(0.0, time.time() - command.started_at))} ago"
    count = f"{len(done)} of {len(command.runs)} runs have their row"
    if not is_alive:
        yield f"{where}, is gone: {count}; the same command goes on"
        return
    made = [(one.cost, seconds) for one in done if (seconds := rows[one.run_id].get("seconds"))]
    left = [one.cost for one in command.runs if one not in done]
    seconds_left = command_file.seconds_left(made, left, command.max_parallel)
    about = f"; about {format_duration(seconds_left)} left" if seconds_left and left else ""
    yield f"{where}, is at work: {count}{about}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `harness status` and return its exit status."""
    about = "Show how far the commands of a comparison are, while they run or after."
    parser = argparse.ArgumentParser(prog="harness status", description=about)
    parser.add_argument("folder", type=Path, metavar="results/NAME", help="the folder of one comparison")
    folder = parser.parse_args(arguments).folder
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)

    def show() -> None:
        for line in status_lines(folder, read_status(folder)):
            console.print(line, markup=False, soft_wrap=True)

    return run_command(show)
