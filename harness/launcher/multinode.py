"""The nodes of one cluster job: the first leads, and has the others start their part of the ranks of every run."""

import dataclasses
import importlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from harness.launcher.launch import NodeInfo, launch
from harness.launcher.outcome import PRIMARY_SIGNALS, LaunchOutcome, RankFailure

MEET_SECONDS = 600.0  # for all nodes to have started their part of the job

ANSWER_SECONDS = 20.0  # for the others to say how their ranks ended, once the leader's have

IDLE_SECONDS = 24 * 3600.0 * 30  # a node waits for its leader as long as the job lasts


@dataclass(frozen=True)
class NodeGroup:
    """This node's place, and the store over which the leader speaks. Messages go over the network: a shared file
    system may show a new file a minute late.
    """

    count: int
    rank: int
    address: str  # of the leader
    store: TCPStore
    ends_at: float | None = None  # time.time() at which the job ends

    def launch(
        self,
        node_count: int,
        entry: Callable[[str], None],
        run_dir: Path,
        world_size: int,
        *,
        device: str,
        timeout_seconds: float,
        hang_seconds: float,
        on_tick: Callable[[], None],
    ) -> LaunchOutcome:
        """As launch.launch, over the first so many nodes; called by the leader."""
        if self.ends_at is not None:  # better an end of our own than the cluster's
            timeout_seconds = max(1.0, min(timeout_seconds, self.ends_at - time.time()))
        limits = {"device": device, "timeout_seconds": timeout_seconds, "hang_seconds": hang_seconds}
        if node_count == 1:
            return launch(entry, run_dir, world_size, on_tick=on_tick, **limits)  # type: ignore[arg-type]
        number = self.store.add("runs", 1)
        port = free_port()
        work = {
            "node_count": node_count,
            "port": port,
            "entry": [entry.__module__, entry.__qualname__],
            "run_dir": str(run_dir),
            "world_size": world_size,
            "limits": limits,
        }
        self.store.set(f"run {number}", json.dumps(work))
        nodes = NodeInfo(node_count, 0, self.address, port)
        mine = launch(entry, run_dir, world_size, on_tick=on_tick, nodes=nodes, **limits)  # type: ignore[arg-type]
        others = [self.answer(number, rank) for rank in range(1, node_count)]
        return merge_outcomes([mine, *others])

    def answer(self, number: int, rank: int) -> LaunchOutcome:
        """How another node's ranks ended."""
        key = f"end {number} of {rank}"
        try:
            self.store.wait([key], timedelta(seconds=ANSWER_SECONDS))
            return read_outcome(json.loads(self.store.get(key)))
        except DistError:
            return LaunchOutcome(
                "error", f"node {rank} of the job did not say how its ranks ended: it may be lost", (), 0.0
            )

    def serve_leader(self) -> None:
        """What a node that does not lead does, until the leader is done or gone."""
        number = 0
        with suppress(DistError):
            while True:
                number += 1
                self.store.wait([f"run {number}"], timedelta(seconds=IDLE_SECONDS))
                work = json.loads(self.store.get(f"run {number}"))
                if work is None:
                    return
                if self.rank < work["node_count"]:
                    self.store.set(
                        f"end {number} of {self.rank}", json.dumps(dataclasses.asdict(self.launch_local_ranks(work)))
                    )

    def launch_local_ranks(self, work: dict[str, Any]) -> LaunchOutcome:
        """This node's ranks of a run."""
        module, function = work["entry"]
        entry = getattr(importlib.import_module(module), function)
        nodes = NodeInfo(work["node_count"], self.rank, self.address, work["port"])
        return launch(entry, Path(work["run_dir"]), work["world_size"], nodes=nodes, **work["limits"])

    def release_nodes(self) -> None:
        """Lets the others go."""
        self.store.set(f"run {self.store.add('runs', 1)}", json.dumps(None))


def rendezvous(count: int, rank: int, address: str, port: int, ends_at: float | None = None) -> NodeGroup:
    """Joins the job's other nodes. Raises DistError if they do not come."""
    store = TCPStore(address, port, None, rank == 0, timedelta(seconds=MEET_SECONDS), wait_for_workers=False)
    return NodeGroup(count, rank, address, store, ends_at)


def free_port() -> int:
    with socket.create_server(("", 0)) as listening:
        return int(listening.getsockname()[1])


def merge_outcomes(ends: Sequence[LaunchOutcome]) -> LaunchOutcome:
    """One outcome of all nodes': that of the node to blame, with every node's failures, its own first."""
    bad = [end for end in ends if end.status != "ok"]
    if not bad:
        return ends[0]
    blamed = min(bad, key=blame_key)
    failures = sorted((failure for end in bad for failure in end.failures), key=lambda f: f not in blamed.failures)
    silent = [end.reason for end in bad if end is not blamed and not end.failures and end.status == "error"]
    return dataclasses.replace(
        blamed, failures=tuple(failures), reason="; ".join([blamed.reason, *silent]), seconds=ends[0].seconds
    )


def blame_key(end: LaunchOutcome) -> tuple[bool, bool, float]:
    """A node whose rank died by itself comes before those whose connections broke, and of these the earliest."""
    if not end.failures:
        return end.status == "error", True, 0.0
    return end.failures[0].signal not in PRIMARY_SIGNALS, False, end.failures[0].at


def read_outcome(values: dict[str, Any]) -> LaunchOutcome:
    failures = tuple(RankFailure(**failure) for failure in values["failures"])
    return LaunchOutcome(**values | {"failures": failures})
