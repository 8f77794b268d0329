"""The nodes of one cluster job: the first leads, and the others start their share of the ranks of every run.

Only processes with the job's token join it, a secret in a file that its user alone can read. Their connections begin
with a proof of it, and the port is closed once all nodes have joined.
"""

import dataclasses
import importlib
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from threading import Thread
from typing import Any

from harness.config.from_dict import from_dict
from harness.launcher.launch import NodeInfo, launch
from harness.launcher.outcome import PRIMARY_SIGNALS, LaunchOutcome
from harness.util.files import JsonObject
from harness.util.text import UserError

RENDEZVOUS_SECONDS = 600.0  # time for all nodes of the job to start

OUTCOME_SECONDS = 20.0  # time for the other nodes to report how their ranks ended, once the leader's have ended

RETRY_SECONDS = 0.2  # between two tries of a node to reach its leader, and between the leader's looks who has joined

TOKEN_BYTES = 32

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class NodeGroup:
    """One node's rank in the job, and the connections by which the leader sends work and the others their outcomes.

    Messages go over the network, because a shared file system may show a new file a minute late.
    """

    count: int
    rank: int
    address: str  # the leader's address
    channels: Mapping[int, Connection]  # by rank: of the leader, those to all others; of another, that to the leader
    deadline: float | None = None  # the end of the job, by time.time()
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of the leader's runs

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
        number, nodes = next(self.numbers), NodeInfo(node_count, 0, self.address, free_port())
        share = {
            "number": number,
            "entry": (entry.__module__, entry.__qualname__),
            "run_dir": str(run_dir),
            "world_size": world_size,
            "limits": limits,
            "nodes": dataclasses.asdict(nodes),
        }
        for rank in range(1, node_count):
            self.send(rank, share)
        own_outcome = launch(entry, run_dir, world_size, on_tick=on_tick, nodes=nodes, **limits)
        other_outcomes = [self.wait_for_outcome(number, rank) for rank in range(1, node_count)]
        return merge_outcomes([own_outcome, *other_outcomes])

    def send(self, rank: int, message: JsonObject | None) -> None:
        """Send a message to another node, if it still lives."""
        with suppress(OSError):
            self.channels[rank].send_bytes(json.dumps(message).encode())

    def wait_for_outcome(self, number: int, rank: int) -> LaunchOutcome:
        """Return how another node's ranks ended; what it says of an earlier run is ignored.

        A node that was lost is waited for all the same: the cluster then ends the job, and may run it again.
        """
        ends_at = time.monotonic() + OUTCOME_SECONDS
        with suppress(OSError, EOFError):
            while self.channels[rank].poll(max(0.0, ends_at - time.monotonic())):
                ended = json.loads(self.channels[rank].recv_bytes())
                if ended["number"] == number:
                    return from_dict(LaunchOutcome, ended["outcome"])
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return LaunchOutcome(
            "error", f"node {rank} of the job did not report how its ranks ended: it may have failed", (), 0.0, True
        )

    def serve_leader(self) -> None:
        """Launch this node's share of every run until the leader releases it or exits. The other nodes call this."""
        with suppress(OSError, EOFError):
            while (share := json.loads(self.channels[0].recv_bytes())) is not None:
                outcome = self.launch_local_ranks(share)
                self.send(0, {"number": share["number"], "outcome": dataclasses.asdict(outcome)})

    def launch_local_ranks(self, share: JsonObject) -> LaunchOutcome:
        """Launch this node's ranks of a run, by the leader's message on it. Only functions of this package are run."""
        module, function = share["entry"]
        is_own = module.partition(".")[0] == PACKAGE
        entry = getattr(importlib.import_module(module), function, None) if is_own else None
        if entry is None or getattr(entry, "__module__", "") != module:
            return LaunchOutcome("error", f"{module}.{function} is no function of {PACKAGE}: it was not run", (), 0.0)
        nodes = NodeInfo(**share["nodes"] | {"rank": self.rank})
        return launch(entry, Path(share["run_dir"]), share["world_size"], nodes=nodes, **share["limits"])

    def release_nodes(self) -> None:
        """Tell the other nodes that there are no more runs."""
        for rank in self.channels:
            self.send(rank, None)


def rendezvous(
    count: int, rank: int, address: str, port: int, token_file: Path, deadline: float | None = None
) -> NodeGroup:
    """Join the job's other nodes. Raise UserError if they do not join in time, or have another token."""
    channels: Mapping[int, Connection] = {}
    if count > 1:
        token = read_token(token_file)
        channels = {0: join_leader(address, port, rank, token)} if rank else admit_nodes(count, port, token)
    return NodeGroup(count, rank, address, channels, deadline)


def create_token(path: Path) -> None:
    """Write a random token into a file that this user alone can read, unless there is one already."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
    read_token(path)


def read_token(path: Path) -> bytes:
    """Return the token in a file. Raise UserError if it is not one that this user alone can read."""
    remedy = "it has the token by which a job's nodes know each other: remove it and submit the jobs again"
    try:
        with path.open("rb") as file:
            status, token = os.fstat(file.fileno()), file.read()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}), and {remedy}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or len(token) != 2 * TOKEN_BYTES:
        raise UserError(f"{path} is not a file that only its user can read, and {remedy}")
    return token


def admit_nodes(count: int, port: int, token: bytes) -> Mapping[int, Connection]:
    """Return connections to the job's other nodes, by their ranks, once all have joined. Raise UserError if too late.

    Each connection proves its token in a thread of its own, because a stranger may say nothing.
    """
    channels: dict[int, Connection] = {}
    ends_at = time.monotonic() + RENDEZVOUS_SECONDS
    with socket.create_server(("", port)) as server:
        server.settimeout(RETRY_SECONDS)
        while len(channels) < count - 1:
            if time.monotonic() > ends_at:
                missing = ", ".join(str(rank) for rank in range(1, count) if rank not in channels)
                raise UserError(f"nodes {missing} of the job did not join within {RENDEZVOUS_SECONDS:.0f} s")
            with suppress(TimeoutError):
                accepted, _ = server.accept()
                accepted.settimeout(None)
                Thread(target=admit, args=(Connection(accepted.detach()), token, channels), daemon=True).start()
    return channels


def admit(channel: Connection, token: bytes, channels: dict[int, Connection]) -> None:
    """Add the node behind a connection to the job's nodes if it has the token, else close the connection."""
    try:
        deliver_challenge(channel, token)
        answer_challenge(channel, token)
        channels[int(channel.recv_bytes())] = channel
    except (AuthenticationError, OSError, EOFError, ValueError):
        channel.close()


def join_leader(address: str, port: int, rank: int, token: bytes) -> Connection:
    """Return a connection to the job's leader, which may start later than this node. Raise UserError without one."""
    ends_at = time.monotonic() + RENDEZVOUS_SECONDS
    while True:
        try:
            channel = Client((address, port), authkey=token)
            channel.send_bytes(str(rank).encode())
            return channel
        except (AuthenticationError, AssertionError):  # the second, before Python 3.12, for another protocol
            raise UserError(
                f"the process at {address}:{port} does not have this job's token: it is another's"
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() > ends_at:
                raise UserError(f"the job's leader at {address}:{port} cannot be reached: {error}") from None
            time.sleep(RETRY_SECONDS)


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
