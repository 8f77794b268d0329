"""A real Slurm on this machine for tests: a controller, and a daemon for every virtual node.

All of it lies in one folder and ends with the test, however the test ends. Its processes are recognized by the
cluster's name: Slurm puts SLURM_CLUSTER_NAME into every job's environment, the daemons are started with it, and
slurmstepd, which wipes its environment, is a copy named after cluster and node.
"""

import getpass
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from tests.support import packages
from tests.support.packages import PATH

T = TypeVar("T")

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

READY_SECONDS = 60.0  # for a daemon to answer; on an idle machine it takes about one

POLL_SECONDS = 0.05

CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job may start only after its old credential has expired, by default after two minutes.
AuthInfo=cred_expire=5,socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,batch_sched_delay=0
# Nodes claim more cores than the machine may have.
SlurmdParameters=config_overrides
# Slurm gives up a dead node 10 to 15 s after its death. SIGKILL follows SIGTERM after 3 to 4 s.
MessageTimeout=3
SlurmdTimeout=3
KillWait=2
ReturnToService=2
JobRequeue=1
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2
"""

NODE = "NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=8000\n"


def wait_for(look: Callable[[], T], seconds: float, description: str) -> T:
    """Return what `look` returns once that is true; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (result := look()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {description}"
        time.sleep(POLL_SECONDS)
    return result


@dataclass(frozen=True)
class Cluster:
    """A running cluster, with the operations that tests need."""

    name: str
    folder: Path
    environment: dict[str, str]  # for commands that are to find this cluster
    daemons: dict[str, subprocess.Popen[bytes]]  # running; a slurmd by its node's name

    def run(self, *command: str) -> str:
        """Return what one of Slurm's commands prints; raise CalledProcessError, with its error output, if it fails."""
        try:
            done = subprocess.run(
                command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60, check=True
            )
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise
        return done.stdout.strip()

    def jobs(self) -> dict[str, str]:
        """Return the state of every job and every array task (as `7_0`), including those that have ended."""
        return dict(line.split() for line in self.run("squeue", "-h", "-r", "-t", "all", "-o", "%i %T").splitlines())

    def nodes(self) -> dict[str, str]:
        """Return every node's state, such as `idle`, `alloc`, `down*`; a star means that its slurmd does not answer."""
        return dict(line.split() for line in self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N %t").splitlines())

    def wait_for_node(self, node: str, *states: str, seconds: float = READY_SECONDS) -> None:
        wait_for(lambda: self.nodes()[node] in states, seconds, f"{node} is {' or '.join(states)}; see {self.folder}")

    def start_slurmd(self, node: str) -> None:
        stepd = self.folder / f"{self.name}-{node}"
        if not stepd.exists():
            shutil.copy(str(shutil.which("slurmstepd", path=PATH)), stepd)
        self.start(node, "slurmd", "-D", "-N", node, "-d", str(stepd), SLURMD_NODENAME=node)

    def kill_node(self, node: str) -> None:
        """Kill slurmd, steps and the processes of jobs, as if the node lost power."""
        kill_all(lambda: processes(self.name, node))
        self.daemons.pop(node).wait()

    def start(self, daemon: str, *command: str, **environment: str) -> None:
        """Start a daemon in the foreground, in a session of its own so that Ctrl-C reaches only the test."""
        with (self.folder / f"{daemon}.log").open("ab") as log:
            self.daemons[daemon] = subprocess.Popen(
                command,
                env={**self.environment, "SLURM_CLUSTER_NAME": self.name, **environment},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_daemon(self, daemon: str, ready: Callable[[], bool]) -> None:
        log = self.folder / f"{daemon}.log"

        def look() -> bool:
            assert self.daemons[daemon].poll() is None, f"{daemon} ended:\n{log.read_text()}"
            return ready()

        wait_for(look, READY_SECONDS, f"{daemon} is ready; see {log}")


def processes(name: str, node: str = "") -> list[psutil.Process]:
    """Return the processes of this cluster, daemons and jobs, or of one node of it; `info["name"]` is their name."""
    mark = {"SLURM_CLUSTER_NAME": name} | ({"SLURMD_NODENAME": node} if node else {})
    members = []
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error, OSError):
            if process.environ().items() >= mark.items() or Path(process.exe()).match(f"{name}-{node or '*'}"):
                members.append(process)
    return members


def kill_all(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill the processes until there are none: one that was just being started is found the next time."""
    while remaining := find():
        for process in remaining:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_SECONDS)


@contextmanager
def ended(cluster: Cluster) -> Iterator[None]:
    """End all processes of the cluster when the block ends, or when this process is killed.

    A process of its own kills them as soon as its input closes.
    """
    guard = subprocess.Popen(
        [sys.executable, __file__, cluster.name], stdin=subprocess.PIPE, start_new_session=True, cwd=cluster.folder
    )
    try:
        yield
    finally:
        guard.communicate()
        for daemon in cluster.daemons.values():
            daemon.wait()


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Yield a cluster of the nodes n1 and n2 in this folder; skip the test where Slurm cannot be installed.

    Of its partitions `low` and `high`, `high` preempts `low`.
    """
    if missing := packages.install("Slurm", PROGRAMS, ("slurm-wlm", "munge")):
        pytest.skip(missing)
    folder = folder.resolve()
    (folder / "state").mkdir(parents=True)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        controller_port, *node_ports = [free.getsockname()[1] for free in sockets]
    name, host, user = f"test{secrets.token_hex(4)}", socket.gethostname().split(".")[0], getpass.getuser()
    ports = dict(zip(("n1", "n2"), node_ports, strict=True))
    text = CONFIGURATION.format(name=name, host=host, controller_port=controller_port, user=user, folder=folder)
    text += "".join(NODE.format(node=node, host=host, port=port) for node, port in ports.items())
    (folder / "slurm.conf").write_text(text)
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_text(secrets.token_hex(64))
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
    environment = {**plain, "PATH": PATH, "SLURM_CONF": f"{folder}/slurm.conf"}
    started = Cluster(name, folder, environment, {})
    with ended(started):
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "seed")]
        started.start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        started.wait_for_daemon("munged", (folder / "munge.socket").exists)
        started.start("slurmctld", "slurmctld", "-D")
        for node in ports:
            started.start_slurmd(node)
        controller = psutil.Process(started.daemons["slurmctld"].pid)
        started.wait_for_daemon("slurmctld", lambda: bool(controller.net_connections("inet")))
        for node in ports:
            started.wait_for_node(node, "idle")
        yield started


if __name__ == "__main__":
    sys.stdin.read()
    kill_all(lambda: processes(sys.argv[1]))


def wait_for_step(results: Path, name: str, step: int = 5) -> Path:
    """Return the folder of a comparison's only run once its first rank has reached this step."""

    def look() -> Path | None:
        for path in (results / name).glob("*/ranks/rank_00000.pulse"):
            with suppress(ValueError, OSError):
                if json.loads(path.read_bytes())[1] >= step:
                    return path.parents[1]
        return None

    return wait_for(look, 120, f"{name} is at step {step}")
