"""The program of a job on each of its nodes: `python -m harness.sweep.jobs.node FILE NODES RANK ADDRESS PORT`.

FILE has the values of one combination; the job makes its run, or the runs of its search, from start to end. The node of
rank 0 leads, and the others find it at ADDRESS and PORT.
"""

import json
import sys
from pathlib import Path

from harness.config.from_dict import ConfigValues
from harness.launcher.multinode import NodeGroup, rendezvous
from harness.launcher.signals import set_handlers
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.runner.record import write_rejected
from harness.runner.resolve import load_model_presets
from harness.sweep.display import ProgressDisplay
from harness.sweep.queued_run import QueuedRun, StopAfter
from harness.sweep.scheduler import Scheduler, SequentialExecutor
from harness.util.files import atomic_write_json
from harness.util.text import UserError, run_command

SPARE_SECONDS = 60.0  # before the job's time is up, to end and record a run


class NodeDisplay(ProgressDisplay):
    """The display of a job, which also answers the waiting command in files beside that of the values."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.run_ids: list[str] = []

    def run_started(self, run: QueuedRun) -> None:
        """Announce a run that is started."""
        self.run_ids.append(run.name)
        self.write("started")
        super().run_started(run)

    def run_ended(self, run: QueuedRun, record: Record) -> None:
        """Note a run that has its record."""
        super().run_ended(run, record)
        if run.name not in self.run_ids:
            self.run_ids.append(run.name)

    def write(self, kind: str) -> None:
        """Write the message of kind `started` or `answer`."""
        atomic_write_json(self.path.with_suffix(f".{kind}.json"), {"runs": self.run_ids})


def main() -> int:
    """Run the part of the job that the arguments name and return its exit status."""
    path, count, rank, address, port = sys.argv[1:]
    return run_node(Path(path), int(count), int(rank), address, int(port))


def run_node(path: Path, count: int, rank: int, address: str, port: int, end: float | None = None) -> int:
    """Run a node's part of a job and return its exit status; `end` is the job's, by time.time().

    Nodes that are alone meet nobody, so that their port can be any.
    """
    set_handlers()
    token_file = ComparisonFolder(path.parents[1]).job_token
    nodes = rendezvous(count, rank, address, port, token_file, end and end - SPARE_SECONDS)
    if rank:
        nodes.serve_leader()
        return 0
    try:
        run_combination(path, json.loads(path.read_text())["values"], nodes)
    except KeyboardInterrupt:  # cancelled or preempted: the run's record says so, and there is no answer yet
        return 130
    finally:
        nodes.release_nodes()
    return 0


def run_combination(path: Path, values: ConfigValues, nodes: NodeGroup) -> None:
    """Make the runs of the combination as the job's first node, and write the answer."""
    display = NodeDisplay(path)
    executor = SequentialExecutor(load_model_presets(), display, nodes)
    try:
        run = executor.plan_run(values, 0)
    except UserError as error:
        display.run_ids.append(write_rejected(values, str(error)).run_id)
    else:
        display.set_queue([run], 1)
        Scheduler(executor, StopAfter(), [run], retries=False).run()
    display.write("answer")


if __name__ == "__main__":
    sys.exit(run_command(main))
