"""The nodes of a job, as real processes: who joins them by the job's token, and what they run for their leader."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from torch.distributed import DistError, TCPStore

from harness.launcher import multinode
from harness.launcher.multinode import NodeGroup, create_token, free_port, read_token, rendezvous
from harness.util.text import UserError
from tests.support.commands import ROOT, long

NODE = """
import sys
from pathlib import Path
from harness.launcher.multinode import rendezvous
from harness.util.text import run_command
run_command(lambda: rendezvous(2, 1, "127.0.0.1", int(sys.argv[1]), Path(sys.argv[2])).serve_leader())
print("released")
"""


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    create_token(tmp_path / "token")
    return tmp_path / "token"


@pytest.fixture
def port() -> int:
    return free_port()


@contextmanager
def leading(port: int, token_file: Path) -> Iterator["Future[NodeGroup]"]:
    """Yield what becomes the leader once its node has joined."""
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(rendezvous, 2, 0, "127.0.0.1", port, token_file)
        while not is_open(port):
            pass
        yield leader


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def start_node(port: int, token_file: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", NODE, str(port), str(token_file)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=pipe, stderr=pipe, text=True)


def test_strangers_neither_join_nor_disturb_a_job(port: int, token_file: Path) -> None:
    """One is silent, one speaks HTTP, one speaks to a store of torch, and one has another token."""
    with leading(port, token_file) as leader, socket.create_connection(("127.0.0.1", port)):
        with socket.create_connection(("127.0.0.1", port)) as web:
            web.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(DistError):
            TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1)).set("run 1", "planted")
        with pytest.raises(AuthenticationError):
            Client(("127.0.0.1", port), authkey=b"0" * 64)
        assert not leader.done()
        node = start_node(port, token_file)
        group = leader.result(timeout=60)
    assert not is_open(port)
    group.release_nodes()
    assert node.communicate(timeout=60) == ("released\n", "")


@pytest.mark.parametrize(
    "entry",
    [
        ("posix", "system"),
        ("harness.util.text", "re"),
        long(("harness.runner.launch_run", "launch")),
        long(("harness", "none")),
    ],
    ids="{0[0]}.{0[1]}".format,
)
def test_a_node_runs_functions_of_this_package_alone(entry: tuple[str, str], port: int, token_file: Path) -> None:
    """The outcome of a run that the leader gave up is not taken for that of the next one."""
    with leading(port, token_file) as leader:
        node = start_node(port, token_file)
        group = leader.result(timeout=60)
    folder = token_file.parent / "touch planted"
    share = {"entry": entry, "run_dir": str(folder), "world_size": 2, "limits": {}, "nodes": {"count": 2}}
    group.send(1, share | {"number": 0})
    group.send(1, share | {"number": 1})
    outcome = group.wait_for_outcome(1, 1)
    assert (outcome.status, outcome.reason) == ("error", f"{'.'.join(entry)} is no function of harness: it was not run")
    group.release_nodes()
    assert node.communicate(timeout=60) == ("released\n", "") and not folder.exists()


def test_a_node_without_the_token_is_refused(port: int, token_file: Path, tmp_path: Path) -> None:
    create_token(tmp_path / "other")
    with leading(port, token_file) as leader:
        errors = [
            start_node(port, tmp_path / name).communicate(timeout=60)[1].splitlines() for name in ("other", "missing")
        ]
        assert not leader.done()
        start_node(port, token_file)
        group = leader.result(timeout=60)
    group.release_nodes()
    (other,), (missing,) = errors
    assert other.startswith(f"the process at 127.0.0.1:{port} does not have this job's token")
    assert missing.startswith(f"{tmp_path / 'missing'} cannot be read (No such file or directory)")


def test_nodes_that_do_not_join_are_named(port: int, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multinode, "RENDEZVOUS_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"^nodes 1, 2 of the job did not join within"):
        rendezvous(3, 0, "127.0.0.1", port, token_file)
    with pytest.raises(UserError, match=r"^the job's leader at 127\.0\.0\.1:\d+ cannot be reached"):
        rendezvous(2, 1, "127.0.0.1", port, token_file)
    with closing(socket.create_server(("127.0.0.1", port))):
        assert rendezvous(1, 0, "127.0.0.1", port, Path("/nonexistent")).channels == {}  # a single node opens nothing


def test_a_token_is_its_users_alone(tmp_path: Path) -> None:
    path, before = tmp_path / "token", os.umask(0)
    try:
        create_token(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    token = read_token(path)
    create_token(path)
    assert read_token(path) == token and len(token) == 64
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(UserError, match=r"is not a file that only its user can read.*remove it and submit"):
            read_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(UserError, match="remove it"):
        create_token(path)
