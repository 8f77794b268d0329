"""python -m harness.node WORK.json: what a cluster job runs on each of its nodes, one combination from end to end."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from harness.launcher.multinode import NodeGroup, rendezvous
from harness.records.schema import Record
from harness.runner.rejected import write_rejected
from harness.runner.resolve import load_model_presets
from harness.sweep.display import ProgressDisplay
from harness.sweep.executors.sequential import SequentialExecutor
from harness.sweep.queued_run import QueuedRun
from harness.sweep.scheduler import Scheduler
from harness.sweep.stop_after import StopAfter
from harness.util.errors import UserError
from harness.util.files import atomic_write_json

FIRST_PORT, PORTS = 20_000, 20_000  # where the nodes of a job meet, by its number

SPARE_SECONDS = 60.0  # before the job's end, to end and record a run


class NodeObserver:
    """Tells the command that waits, in files beside the work's."""

    def __init__(self, work: Path, display: ProgressDisplay) -> None:
        self.work, self.display = work, display
        self.runs: list[str] = []

    def on_started(self, item: QueuedRun) -> None:
        self.runs.append(item.name)
        self.write("begun")
        self.display.run_started(item)

    def on_record(self, item: QueuedRun, record: Record, is_new: bool) -> None:
        self.display.run_ended(item, record, is_new)
        if item.name not in self.runs:
            self.runs.append(item.name)

    def log(self, line: str) -> None:
        self.display.print_line(line)

    def write(self, what: str) -> None:
        atomic_write_json(self.work.with_suffix(f".{what}.json"), {"runs": self.runs})


def main() -> int:
    work = Path(sys.argv[1])
    count, rank = int(os.environ.get("SLURM_NNODES", 1)), int(os.environ.get("SLURM_NODEID", 0))
    team = join(count, rank)
    if rank:
        team.serve_leader()
        return 0
    try:
        lead(work, json.loads(work.read_text())["values"], team)
    except KeyboardInterrupt:  # cancelled or preempted: the run's record says so, and there is no answer yet
        return 130
    finally:
        team.release_nodes()
    return 0


def join(count: int, rank: int) -> NodeGroup:
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    port = FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", 0)) % PORTS if count > 1 else 0  # 0: any, nobody comes
    end = os.environ.get("SLURM_JOB_END_TIME")
    return rendezvous(count, rank, address, port, float(end) - SPARE_SECONDS if end else None)


def lead(work: Path, values: dict[str, Any], team: NodeGroup) -> None:
    """The first node's part: the runs of the combination, and the answer."""
    display = ProgressDisplay()
    answers = NodeObserver(work, display)
    place = SequentialExecutor(load_model_presets(), display, team)
    try:
        item = place.plan_item(values, 0)
    except UserError as error:
        record = write_rejected(values, str(error))
        answers.runs.append(record["row"]["run_id"])
    else:
        display.set_queue([item], 1)
        Scheduler(place, answers, StopAfter(), [item]).run()
    answers.write("answer")


if __name__ == "__main__":
    sys.exit(main())
