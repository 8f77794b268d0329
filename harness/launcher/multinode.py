"""The nodes of one cluster job: the first leads, and the others start their share of the ranks of every run."""

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

from harness.config.from_dict import from_dict
from harness.launcher.launch import NodeInfo, launch
from harness.launcher.outcome import PRIMARY_SIGNALS, LaunchOutcome
from harness.util.files import JsonObject

RENDEZVOUS_SECONDS = 600.0  # time for all nodes of the job to start

OUTCOME_SECONDS = 20.0  # time for the other nodes to report how their ranks ended, once the leader's have ended

IDLE_SECONDS = 24 * 3600.0 * 30  # a node waits for its leader as long as the job lasts


@dataclass(frozen=True)
class NodeGroup:
    """One node's rank in the job, and the store through which the leader sends work and the others their outcomes.

    Messages go over the network, because a shared file system may show a new file a minute late.
    """

    count: int
    rank: int
    address: str  # the leader's address
    store: TCPStore
    deadline: float | None = None  # the end of the job, by time.time()

    def launch(
        self,
        node_count: int,
        entry: Callable[[str], None],
        run_dir: Path,
        world_size: int,
        *,
        on_tick: Callable[[], None],
        **limits: Any,
    ) -> LaunchOutcome:
        """Launch a run on the first `node_count` nodes, with a device and limits. The leader calls this."""
        if self.deadline is not None:  # end the run before the cluster kills the job
            limits["timeout_seconds"] = max(1.0, min(limits["timeout_seconds"], self.deadline - time.time()))
        if node_count == 1:
            return launch(entry, run_dir, world_size, on_tick=on_tick, **limits)
        number, nodes = self.store.add("runs", 1), NodeInfo(node_count, 0, self.address, free_port())
        share = {
            "entry": (entry.__module__, entry.__qualname__),
            "run_dir": str(run_dir),
            "world_size": world_size,
            "limits": limits,
            "nodes": dataclasses.asdict(nodes),
        }
        self.store.set(f"run {number}", json.dumps(share))
        own_outcome = launch(entry, run_dir, world_size, on_tick=on_tick, nodes=nodes, **limits)
        other_outcomes = [self.wait_for_outcome(number, rank) for rank in range(1, node_count)]
        return merge_outcomes([own_outcome, *other_outcomes])

    def wait_for_outcome(self, number: int, rank: int) -> LaunchOutcome:
        """Return how another node's ranks ended."""
        key = f"end {number} of {rank}"
        try:
            self.store.wait([key], timedelta(seconds=OUTCOME_SECONDS))
            return from_dict(LaunchOutcome, json.loads(self.store.get(key)))
        except DistError:
            return LaunchOutcome(
                "error", f"node {rank} of the job did not report how its ranks ended: it may have failed", (), 0.0, True
            )

    def serve_leader(self) -> None:
        """Launch this node's share of every run until the leader releases it or exits. The other nodes call this."""
        number = 0
        with suppress(DistError):
            while True:
                number += 1
                self.store.wait([f"run {number}"], timedelta(seconds=IDLE_SECONDS))
                share: JsonObject | None = json.loads(self.store.get(f"run {number}"))
                if share is None:
                    return
                if self.rank < share["nodes"]["count"]:
                    outcome = self.launch_local_ranks(share)
                    self.store.set(f"end {number} of {self.rank}", json.dumps(dataclasses.asdict(outcome)))

    def launch_local_ranks(self, share: JsonObject) -> LaunchOutcome:
        """Launch this node's ranks of a run, by the leader's message on it."""
        module, function = share["entry"]
        entry = getattr(importlib.import_module(module), function)
        nodes = NodeInfo(**share["nodes"] | {"rank": self.rank})
        return launch(entry, Path(share["run_dir"]), share["world_size"], nodes=nodes, **share["limits"])

    def release_nodes(self) -> None:
        """Tell the other nodes that there are no more runs."""
        self.store.set(f"run {self.store.add('runs', 1)}", json.dumps(None))


def rendezvous(count: int, rank: int, address: str, port: int, deadline: float | None = None) -> NodeGroup:
    """Join the job's other nodes. Raise DistError if they do not join in time."""
    store = TCPStore(address, port, None, rank == 0, timedelta(seconds=RENDEZVOUS_SECONDS), wait_for_workers=False)
    return NodeGroup(count, rank, address, store, deadline)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("", 0)) as listening:
        return int(listening.getsockname()[1])


def merge_outcomes(outcomes: Sequence[LaunchOutcome]) -> LaunchOutcome:
    """Return the outcome of the node that caused the end, with the failures of all nodes, that node's first."""
    failed = [outcome for outcome in outcomes if outcome.status != "ok"]
    if not failed:
        return outcomes[0]
    blamed = min(failed, key=blame_key)
    failures = sorted(
        (failure for outcome in failed for failure in outcome.failures), key=lambda f: f not in blamed.failures
    )
    unreported = [o.reason for o in failed if o is not blamed and not o.failures and o.status == "error"]
    return dataclasses.replace(
        blamed,
        failures=tuple(failures),
        reason="; ".join([blamed.reason, *unreported]),
        seconds=outcomes[0].seconds,
        from_outside=blamed.from_outside or any(o.from_outside and not o.failures for o in failed),
    )


def blame_key(outcome: LaunchOutcome) -> tuple[bool, bool, float]:
    """Return the sort key by which the outcome that caused the end comes first.

    A node whose rank died by itself comes before those whose connections broke, and of these the earliest is first.
    """
    if not outcome.failures:
        return outcome.status == "error", True, 0.0
    first = outcome.failures[0]
    return first.signal not in PRIMARY_SIGNALS, False, first.at
