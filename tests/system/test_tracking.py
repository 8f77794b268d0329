"""Tracking by the real W&B: its files read back by its own reader, and its client against a stand-in for its server."""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.cli.main import main
from harness.records.heartbeat import HeartbeatWriter
from harness.records.run_folder import TRACKED
from harness.records.store import read_all, read_record
from harness.tracking import payload
from harness.tracking.client import CLOSE_SECONDS, TrackingClient
from harness.util.redact import redacted
from tests.support.commands import ROOT
from tests.support.slurm_cluster import wait_for
from tests.support.tracking import OFFLINE, ONLINE, write_example_record
from tests.support.wandb_server import HANG_SECONDS, Run, Server, serving

KEY = "0123456789abcdef" * 2 + "PLANTED0"  # as long as W&B's

PLANTED = ("PLANTED0", "PLANTED1", "PLANTED2")


@functools.cache
def inspect(folder: Path, *options: str) -> Any:
    """Read a run's own file with W&B's reader.

    The program is the one that `wandb leet inspect` starts. Started directly it needs no import of wandb, and without
    observability it waits for no server.
    """
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    core = Path(importlib.util.find_spec("wandb").origin).parent / "bin" / "wandb-core"  # type: ignore[union-attr,arg-type]
    files = ["--run-file", str(path.resolve()), str(path.resolve().parents[1])]
    reader = [str(core), "leet", "inspect", "--no-observability", *options, "--json", *files]
    output = subprocess.run(reader, capture_output=True, text=True, check=True).stdout
    return json.loads(output) if options else [json.loads(line) for line in output.splitlines()]


def history(folder: Path) -> list[dict[str, Any]]:
    return [entry["history"]["item"] for entry in inspect(folder) if entry["type"] == "history"]


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows if name in row]


def wait_until_logged(folder: Path, name: str, value: Any) -> None:
    """Wait until the file of a run, which is still being written, has this value."""

    def is_logged() -> bool:
        inspect.cache_clear()
        with suppress(ValueError, subprocess.CalledProcessError):  # there is no file, or its last entry is not whole
            return value in column(history(folder), name)
        return False

    wait_for(is_logged, 180, f"{name} is {value}")
    inspect.cache_clear()


def sent(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    """Return what a sync that succeeds prints."""
    assert main(["sync", str(folder), *options]) == 0
    return capsys.readouterr().out


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving() as stub:
        monkeypatch.setenv("WANDB_BASE_URL", stub.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield stub


def known(run_dir: Path) -> dict[str, Any]:
    """Return the columns of a run that have a value, which are the summary at the tracker."""
    return {key: value for key, value in read_record(run_dir).row.items() if value not in (None, "")}


def synced(run_dir: Path) -> payload.SyncState | None:
    """Return what is on file of a folder at the tracker."""
    return payload.read_sync_state(run_dir, "wandb")


def run_dirs(comparison: Path) -> list[Path]:
    return sorted(path.parent for path in comparison.glob("*/record.json"))


def check_sent(run: Run, run_dir: Path) -> None:
    """Check that every column, step and part of the memory is at the server."""
    row = known(run_dir)
    assert run.complete and row.items() <= run.summary.items()
    columns = {"train/loss": [5.5, 4.5], "train/step_seconds": [0.25, 0.25], "memory/activation_bytes": [12]}
    assert {name: column(run.history, name) for name in columns} == columns
    tags = ["ddp", "tiny", "none", "fp32", row["status"], "mine"]
    assert run.settings.items() >= {"groupName": run_dir.parent.name, "jobType": "run", "tags": tags}.items()
    assert run.config["strategy"]["name"] == "ddp" and run.config["versions"] == {"torch": "2.13.0"}


def test_offline_runs_are_read_back_by_wandbs_own_reader(tmp_path: Path) -> None:
    """Two runs overlap, one of them is read while it goes on, and then comes the table."""
    comparison, messages = tmp_path / "mine", []
    run_dir, _ = write_example_record(comparison, 0)
    (run_dir / "record.json").unlink()
    (run_dir / "ranks").mkdir()
    heartbeats = [HeartbeatWriter(run_dir, rank) for rank in range(2)]
    for rank, beat in enumerate(heartbeats):
        beat.allocated_bytes = lambda rank=rank: 100 + rank  # type: ignore[misc]
        beat("timed", 3 + rank)
    feed = TrackingClient(messages.append, quiet_seconds=0.0)
    feed.hand_over("start_run", OFFLINE, run_dir, {"strategy": {"name": "ddp", "tp": 1}})
    other, _ = write_example_record(comparison, 1, status="oom", reason="no memory")
    feed.hand_over("finish_run", OFFLINE, other)
    wait_until_logged(run_dir, "live/rank_0/phase", "timed")
    heartbeats[0]("profiled", 9)
    wait_until_logged(run_dir, "live/rank_0/phase", "profiled")
    feed.hand_over("finish_run", OFFLINE, write_example_record(comparison, 0)[0])
    feed.hand_over("log_table", OFFLINE, comparison)
    feed.close()
    assert messages == []
    rows = history(run_dir)
    assert set(column(rows, "live/step")) <= {3, 4}
    assert column(rows, "live/seconds") == sorted(column(rows, "live/seconds"))
    last = {"live/step": 4, "live/rank_0/phase": "profiled", "live/allocated_bytes": 101}
    assert {name: column(rows, name)[-1] for name in last} == last
    assert column(rows, "train/step") == [0, 1] and column(rows, "train/grad_norm") == [2.0, 2.0]
    metrics = [entry["metric"] for entry in inspect(run_dir) if entry["type"] == "metric"]
    axes = {metric.get("glob_name"): metric.get("step_metric") for metric in metrics}
    assert axes["train/*"] == "train/step" and axes["live/*"] == "live/seconds"
    whole = inspect(run_dir, "--summary")
    assert {key: value for key, value in whole["summary"].items() if key[0] != "_"} == known(run_dir)
    assert whole["config"]["environment"] == {"cores": 2} and whole["config"]["strategy"]["tp"] == 1
    assert whole["tags"] == ["ddp", "tiny", "none", "fp32", "ok", "mine"] and whole["exit_code"] == 0
    started = next(entry["run"] for entry in inspect(other) if entry["type"] == "run")
    assert started.items() >= {"run_group": "mine", "job_type": "run", "project": "here"}.items()
    failed = inspect(other, "--summary")
    assert failed["exit_code"] == 1 and failed["summary"]["reason"] == "no memory" and "oom" in failed["tags"]
    check_table(comparison, inspect(comparison, "--summary")["summary"])


def check_table(comparison: Path, summary: dict[str, Any]) -> None:
    assert (summary["rows"], summary["ok"], summary["oom"]) == (2, 1, 1)
    (path,) = comparison.glob("wandb/offline-run-*/files/media/table/runs*.table.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["run_id"] for row in rows] == [r.row["run_id"] for r in read_all(comparison).records]
    assert [row["tokens_per_second"] for row in rows] == [1000.5] * 2 and "mfu" not in table["columns"]


def test_online_runs_are_complete_and_a_sync_sends_nothing_again(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    messages: list[str] = []
    feed, comparison = TrackingClient(messages.append, quiet_seconds=0.0), tmp_path / "mine"
    for number in range(2):
        run_dir, record = write_example_record(comparison, number)
        feed.hand_over("start_run", ONLINE, run_dir, record.config)
        feed.hand_over("finish_run", ONLINE, run_dir)
        feed.hand_over("finish_run", ONLINE, run_dir)  # once is enough
    feed.hand_over("log_table", ONLINE, comparison)
    feed.hand_over("log_table", ONLINE, comparison)
    feed.close()
    assert messages == [] and len(server.runs) == 3
    for folder in run_dirs(comparison):
        check_sent(server.runs[synced(folder).id], folder)
    summary = server.runs[synced(comparison).id]
    assert summary.settings["jobType"] == "summary" and summary.summary["rows"] == 2
    assert any(name.startswith("media/table/runs") for name in summary.files)
    assert sent(capsys, comparison) == "sent 0 runs; the tracker had 2 before\n"
    write_example_record(comparison, 1, started_at="2026-02-02T03:00:00+00:00")  # run anew
    assert sent(capsys, comparison) == "sent 1 run and the table; the tracker had 1 before\n"
    assert len(server.runs) == 4
    sent(capsys, comparison, "--again")  # what is there is replaced
    (run_dir / TRACKED).unlink()  # as if an upload had been killed
    sent(capsys, comparison)
    assert len(server.runs) == 4


Outcome = tuple[float, list[str], Path]  # how a feed with a bad server ended: seconds, messages, and its folder


FAULTS: dict[str, tuple[str, int | None]] = {
    # What answers badly, with its status: 0 if it hangs, None if the server dies. `file_stream` knows of a run.
    "hangs at the start": ("graphql", 0),
    "refuses with 500": ("graphql", 500),
    "refuses with 401": ("graphql", 401),
    "is not there": ("graphql", None),
    "hangs at the end": ("file_stream", 0),
    "refuses data with 500": ("file_stream", 500),
    "refuses data with 401": ("file_stream", 401),
    "dies amid a run": ("file_stream", None),
}


def send_with_fault(fault: str, folder: Path, server: Server, feed: TrackingClient, messages: list[str]) -> Outcome:
    part, status = FAULTS[fault]
    is_early = part == "graphql"
    if is_early:
        server.fail(part, status)
    run_dir, record = write_example_record(folder, 0)
    feed.hand_over("start_run", ONLINE, run_dir, record.config)
    if not is_early:
        wait_for(lambda: server.runs, 120, "the server knows of a run")
        server.fail(part, status)
    started = time.monotonic()
    for number in range(2):
        feed.hand_over("finish_run", ONLINE, write_example_record(folder, number)[0])
    feed.hand_over("log_table", ONLINE, folder)
    assert time.monotonic() - started < HANG_SECONDS / 4  # whatever the server does, a run does not wait for it
    feed.close(3 * CLOSE_SECONDS)  # a busy machine needs longer to keep everything
    return time.monotonic() - started, messages, folder


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """Run all cases at once, because their time is spent waiting."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(FAULTS)) as pool:
        patch.setenv("WANDB_API_KEY", KEY)
        ends = {}
        for fault in FAULTS:
            server = stack.enter_context(serving())
            messages: list[str] = []
            patch.setenv("WANDB_BASE_URL", server.url)
            feed = TrackingClient(messages.append, quiet_seconds=0.0)
            feed._start()  # with this server in its environment
            folder = tmp_path_factory.mktemp("fault") / "mine"
            ends[fault] = pool.submit(send_with_fault, fault, folder, server, feed, messages)
        yield {fault: end.result() for fault, end in ends.items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_server_costs_seconds_and_one_line(fault: str, outcomes: dict[str, Outcome]) -> None:
    """A bad server costs seconds and is reported in a line, and nothing counts as sent that was not."""
    seconds, (message,), comparison = outcomes[fault]
    assert seconds < HANG_SECONDS / 2
    assert message.startswith("tracking: ") and message.endswith(f"`harness sync {comparison}` sends all of it")
    assert fault != "hangs at the end" or "Timed out" in message  # W&B's own limit, before ours
    if "401" in fault:  # known at once: there is time to keep everything for W&B too
        folders = (*run_dirs(comparison), comparison)
        assert all(inspect(folder, "--summary")["state"] == "finished" for folder in folders)
    states = [payload.read_sync_state(run_dir, "wandb") for run_dir in run_dirs(comparison)]
    assert len(states) == 2 and all(entry is None or entry.sent_at is None for entry in states)


@pytest.mark.parametrize("fault", ["hangs at the start", "refuses data with 401", "dies amid a run"])
def test_a_sync_sends_the_runs_that_were_not_sent(
    fault: str, outcomes: dict[str, Outcome], server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, comparison = outcomes[fault]
    states = {run_dir: payload.read_sync_state(run_dir, "wandb") for run_dir in run_dirs(comparison)}
    assert sent(capsys, comparison) == "sent 2 runs and the table; the tracker had 0 before\n"
    assert len(server.runs) == 3
    for run_dir, entry in states.items():
        assert entry is None or synced(run_dir).id == entry.id
        check_sent(server.runs[synced(run_dir).id], run_dir)


@pytest.mark.parametrize(
    ("misbehaves", "key", "words"),
    [
        (("graphql", 0), KEY, "W&B"),
        (("file_stream", 401), KEY, "W&B"),
        (("", 0), "", "run `wandb login`, or set WANDB_API_KEY"),
    ],
)
def test_a_sync_that_fails_prints_one_line(
    misbehaves: tuple[str, int],
    key: str,
    words: str,
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a key nothing is sent at all."""
    server.misbehaves = misbehaves
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    write_example_record(tmp_path / "mine")
    started = time.monotonic()
    assert main(["sync", str(tmp_path / "mine"), "--timeout", "3"]) == 1
    assert time.monotonic() - started < HANG_SECONDS / 2
    out, error = capsys.readouterr()
    assert out == "sent 0 runs; the tracker had 0 before\n" and bool(key) == bool(server.bytes_received)
    assert error.startswith("the rest was not sent: ") and error.count("\n") == 1
    assert words in error and KEY not in error


def test_a_sync_of_a_folder_without_runs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["sync", str(folder)]) for folder in (tmp_path / "none", tmp_path)] == [2, 2]
    assert capsys.readouterr().err.count("\n") == 2


def test_a_stopped_tracker_delays_no_run(tmp_path: Path) -> None:
    """The tracker's process is stopped, and the pipe to it is soon full."""
    messages: list[str] = []
    feed = TrackingClient(messages.append)
    feed._start()
    os.kill(feed.process.pid, signal.SIGSTOP)
    run_dir, _ = write_example_record(tmp_path / "mine")
    watchdog = threading.Timer(60, feed.process.kill)  # handing over must not wait for the tracker
    watchdog.start()
    for number in range(20):
        feed.hand_over("start_run", OFFLINE, run_dir, {"much": "x" * 100_000})
        feed.hand_over("finish_run", OFFLINE, tmp_path / "mine" / str(number))
    assert watchdog.is_alive()
    watchdog.cancel()
    started = time.monotonic()
    feed.close(1.0)
    assert time.monotonic() - started < CLOSE_SECONDS
    assert messages == [
        f"tracking: 20 runs were not tracked within 1 s; `harness sync {tmp_path / 'mine'}` sends all of it"
    ]
    assert feed.process.poll() == -signal.SIGKILL


KILLED = """
import sys, time
from pathlib import Path
from tests.system.test_tracking import OFFLINE, write_example_record
from harness.tracking.client import TrackingClient
feed = TrackingClient(print, quiet_seconds=0.0)
run_dir, record = write_example_record(Path(sys.argv[1]))
(run_dir / "ranks").mkdir()
(run_dir / "ranks" / "rank_00000.pulse").write_text('["timed", 3, null, 5]')
feed.hand_over("start_run", OFFLINE, run_dir, {})
print(feed.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_the_tracker_ends_with_a_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "mine")]
    temporary = Path(tempfile.mkdtemp())  # whose path is short enough for sockets
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        (run_dir,) = run_dirs(tmp_path / "mine")
        wait_until_logged(run_dir, "live/host_bytes", 5)
        family = child.children(recursive=True)
        parent.kill()
        _, alive = psutil.wait_procs([child, *family], timeout=90)
    assert family and not alive and not list(temporary.iterdir())
    inspect.cache_clear()
    assert set(column(history(run_dir), "live/host_bytes")) == {5}


@pytest.mark.parametrize("last", [b"", b"\0\0"], ids=["unread answer", "half a message"])
def test_the_tracker_ends_with_a_parent_that_read_no_answer(tmp_path: Path, last: bytes) -> None:
    """The end of a process that has not read all of its messages resets the pipe."""
    parent, child = Pipe()
    command = [sys.executable, "-m", "harness.tracking.process", str(child.fileno()), "0", str(tmp_path / "none")]
    process = subprocess.Popen(command, pass_fds=[child.fileno()], cwd=ROOT)
    child.close()
    with parent:
        parent.send({"do": "finish_run", "tracking": {"name": "no such tracker"}, "folder": str(tmp_path), "upload": 0})
        os.write(parent.fileno(), last)
        assert parent.poll(60)
    try:
        process.wait(60)
    finally:
        process.kill()


def test_tracking_none_starts_and_imports_nothing(tmp_path: Path) -> None:
    feed = TrackingClient(print)
    run_dir, _ = write_example_record(tmp_path / "mine")
    feed.hand_over("start_run", {"name": "none"}, run_dir, {})
    feed.hand_over("finish_run", {"name": "none"}, run_dir)
    feed.hand_over("finish_run", {"name": "wandb", "mode": "loud"}, run_dir)  # a row that is refused for it
    feed.hand_over("log_table", {"name": "none"}, run_dir.parent)
    feed.close()
    assert feed.process is None
    probe = "import sys, harness.tracking.client; assert not {'wandb'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=True)


def test_no_secret_is_written_anywhere(tmp_path: Path) -> None:
    """A real sweep has secrets in its environment and on its command line: one row is ok, and two are refused.

    Nothing is left in the folder for temporary files.
    """
    temporary = Path(tempfile.mkdtemp())  # whose path is short enough for sockets
    word = "a-long-word-PLANTED1"
    environment = os.environ | {"WANDB_API_KEY": KEY, "SOME_TOKEN": word, "UCX_NOTE": word, "UCX_KEY": "PLANTED0"}
    environment["TMPDIR"] = str(temporary)
    command = [sys.executable, "-m", "harness", "-m", f"results_dir={tmp_path}", "name=mine", "strategy=ddp"]
    command += ["train.seq_len=32", "train.steps=1", "train.warmup_steps=1", "proof.reference=false"]
    command += [f"tracking.tags=[],[{word}],['https://me:PLANTED2@there']"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert list(temporary.iterdir()) == []
    records = read_all(tmp_path / "mine").records
    assert [record.row["status"] for record in records] == ["ok", "refused", "refused"]
    assert records[0].environment["variables"]["UCX_NOTE"] == "[secret]"  # it was there to be found
    assert records[1].row["reason"].startswith("tracking.tags holds a secret") and "[secret]" in str(records[2].config)
    tracked = (*(tmp_path / "mine" / record.row["run_id"] for record in records), tmp_path / "mine")
    decoded = [json.dumps(inspect(folder)) for folder in tracked]
    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    contents = files | {f"text {i}": text.encode() for i, text in enumerate((*decoded, done.stdout, done.stderr))}
    leaks = [(name, secret) for name, content in contents.items() for secret in PLANTED if secret.encode() in content]
    assert not leaks and len(files) > 30
    assert "[secret]" in decoded[0]
    assert not any(f'"{key}"' in text for text in decoded for key in ("host", "program", "executable", "args", "email"))


def test_redaction_changes_only_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, token = "/home/me/secrets", "0123456789abcdef"
    variables = {"A_SERVICE_TOKEN": token, "TOKENIZERS_PARALLELISM": "false", "MY_SECRET_FOLDER": folder}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    harmless = ["false", folder, "https://host:80/a@b", "a:b@c", "http://host/x:y@z", 1, None]
    secrets = [f"x {token} y", "git+https://me:word@host/a?b=c"]
    redact = ["x [secret] y", "git+https://[secret]@host/a?b=c"]
    assert redacted({"a": [*harmless, *secrets], "key": True}) == {"a": [*harmless, *redact], "key": True}
