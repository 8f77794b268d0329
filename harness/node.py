"""python -m harness.node WORK.json: what a cluster job runs on each of its nodes, one combination from end to end."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from harness import compose, refused
from harness.budget import Budget
from harness.display import Display
from harness.errors import UserError
from harness.here import Here
from harness.items import Item
from harness.records import Record, atomic_write_json
from harness.sweep import Sweep
from harness.team import Team, meet

FIRST_PORT, PORTS = 20_000, 20_000  # where the nodes of a job meet, by its number
SPARE_SECONDS = 60.0  # before the job's end, to end and record a run


class Answers:
    """Tells the command that waits, in files beside the work's."""

    def __init__(self, work: Path, display: Display) -> None:
        self.work, self.display = work, display
        self.runs: list[str] = []

    def begins(self, item: Item) -> None:
        self.runs.append(item.name)
        self.write("begun")
        self.display.begins(item)

    def has(self, item: Item, record: Record, is_new: bool) -> None:
        self.display.ended(item, record, is_new)
        if item.name not in self.runs:
            self.runs.append(item.name)

    def say(self, line: str) -> None:
        self.display.say(line)

    def write(self, what: str) -> None:
        atomic_write_json(self.work.with_suffix(f".{what}.json"), {"runs": self.runs})


def main() -> int:
    work = Path(sys.argv[1])
    count, rank = int(os.environ.get("SLURM_NNODES", 1)), int(os.environ.get("SLURM_NODEID", 0))
    team = join(count, rank)
    if rank:
        team.follow()
        return 0
    try:
        lead(work, json.loads(work.read_text())["values"], team)
    except KeyboardInterrupt:  # cancelled or preempted: the run's record says so, and there is no answer yet
        return 130
    finally:
        team.dismiss()
    return 0


def join(count: int, rank: int) -> Team:
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    port = FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", 0)) % PORTS if count > 1 else 0  # 0: any, nobody comes
    end = os.environ.get("SLURM_JOB_END_TIME")
    return meet(count, rank, address, port, float(end) - SPARE_SECONDS if end else None)


def lead(work: Path, values: dict[str, Any], team: Team) -> None:
    """The first node's part: the runs of the combination, and the answer."""
    display = Display()
    answers = Answers(work, display)
    place = Here(compose.models(), display, team)
    try:
        item = place.item(values, 0)
    except UserError as error:
        record = refused.row_of(values, str(error))
        answers.runs.append(record["row"]["run_id"])
    else:
        display.expect([item], 1)
        Sweep(place, answers, Budget(), [item]).go()
    answers.write("answer")


if __name__ == "__main__":
    sys.exit(main())
