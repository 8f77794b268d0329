"""Tracking by the real W&B: its files read back by its own reader, and its client against a stand-in for its server."""

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.cli.main import main
from harness.records import heartbeat
from harness.records.store import read_all, read_record
from harness.tracking import payload
from harness.tracking.client import CLOSE_SECONDS, TrackingClient
from harness.util.redact import redacted
from tests.support.commands import ROOT
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
    """Wait until the file of a run, which is still being written, has this value; fail after three minutes."""
    deadline = time.monotonic() + 180
    values: list[Any] = []
    while value not in values:
        assert time.monotonic() < deadline, values
        time.sleep(0.2)
        if any(folder.glob("wandb/offline-run-*/run-*.wandb")):
            inspect.cache_clear()
            with suppress(subprocess.CalledProcessError):  # the last entry is not written whole
                values = column(history(folder), name)
    inspect.cache_clear()


def send(folder: Path, *options: str) -> int:
    return main(["sync", str(folder), *options])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving() as stub:
        monkeypatch.setenv("WANDB_BASE_URL", stub.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield stub


def check_sent(run: Run, run_dir: Path) -> None:
    """Check that every column, step and part of the memory is at the server."""
    row = read_record(run_dir).row
    assert run.complete
    assert {key: run.summary[key] for key, value in row.items() if value not in (None, "")}
    assert all(run.summary[key] == value for key, value in row.items() if value not in (None, ""))
    assert column(run.history, "train/loss") == [5.5, 4.5]
    assert column(run.history, "train/step_seconds") == [0.25, 0.25]
    assert column(run.history, "memory/activation_bytes") == [12]
    assert run.settings["groupName"] == run_dir.parent.name and run.settings["jobType"] == "run"
    assert run.settings["tags"] == ["ddp", "tiny", "none", "fp32", row["status"], "mine"]
    assert run.config["strategy"]["name"] == "ddp" and run.config["versions"] == {"torch": "2.13.0"}


def test_offline_runs_are_read_back_by_wandbs_own_reader(tmp_path: Path) -> None:
    """Two runs overlap, one of them is read while it goes on, and then comes the table."""
    comparison, messages = tmp_path / "mine", []
    run_dir, _ = write_example_record(comparison, 0)
    (run_dir / "record.json").unlink()
    (run_dir / "ranks").mkdir()
    heartbeats = [heartbeat.HeartbeatWriter(run_dir, rank) for rank in range(2)]
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
    assert set(column(rows, "live/step")) <= {3, 4} and column(rows, "live/step")[-1] == 4
    assert column(rows, "live/rank_0/phase")[-1] == "profiled" and column(rows, "live/allocated_bytes")[-1] == 101
    assert column(rows, "live/seconds") == sorted(column(rows, "live/seconds"))
    assert column(rows, "train/step") == [0, 1] and column(rows, "train/grad_norm") == [2.0, 2.0]
    axes = {
        entry["metric"].get("glob_name"): entry["metric"].get("step_metric")
        for entry in inspect(run_dir)
        if entry["type"] == "metric"
    }
    assert axes["train/*"] == "train/step" and axes["live/*"] == "live/seconds"
    whole = inspect(run_dir, "--summary")
    row = read_record(run_dir).row
    assert {key: whole["summary"][key] for key in whole["summary"] if key[0] != "_"} == {
        key: value for key, value in row.items() if value not in (None, "")
    }
    assert whole["config"]["environment"] == {"cores": 2} and whole["config"]["strategy"]["tp"] == 1
    assert whole["tags"] == ["ddp", "tiny", "none", "fp32", "ok", "mine"] and whole["exit_code"] == 0
    (started,) = [entry["run"] for entry in inspect(other) if entry["type"] == "run"][:1]
    assert started["run_group"] == "mine" and started["job_type"] == "run" and started["project"] == "here"
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
    feed = TrackingClient(messages.append, quiet_seconds=0.0)
    for number in range(2):
        run_dir, record = write_example_record(tmp_path / "mine", number)
        feed.hand_over("start_run", ONLINE, run_dir, record.config)
        feed.hand_over("finish_run", ONLINE, run_dir)
        feed.hand_over("finish_run", ONLINE, run_dir)  # once is enough
    feed.hand_over("log_table", ONLINE, run_dir.parent)
    feed.hand_over("log_table", ONLINE, run_dir.parent)
    feed.close()
    assert messages == [] and len(server.runs) == 3
    for run_dir in sorted(path.parent for path in (tmp_path / "mine").glob("*/record.json")):
        check_sent(server.runs[payload.read_sync_state(run_dir, "wandb").id], run_dir)  # type: ignore[union-attr]
    summary = server.runs[payload.read_sync_state(tmp_path / "mine", "wandb").id]  # type: ignore[union-attr]
    assert summary.settings["jobType"] == "summary" and summary.summary["rows"] == 2
    assert any(name.startswith("media/table/runs") for name in summary.files)
    assert send(tmp_path / "mine") == 0
    assert capsys.readouterr().out == "sent 0 runs; the tracker had 2 before\n"
    write_example_record(tmp_path / "mine", 1, started_at="2026-02-02T03:00:00+00:00")  # run anew
    assert send(tmp_path / "mine") == 0
    assert capsys.readouterr().out == "sent 1 run and the table; the tracker had 1 before\n"
    assert len(server.runs) == 4
    assert send(tmp_path / "mine", "--again") == 0 and len(server.runs) == 4  # what is there is replaced
    (run_dir / payload.SYNC_STATE_FILE).unlink()  # as if an upload had been killed
    assert send(tmp_path / "mine") == 0 and len(server.runs) == 4


@dataclass
class Outcome:
    seconds: float
    messages: list[str]
    folder: Path
    server: Server


FAULTS: dict[str, tuple[Callable[[Server], None] | None, Callable[[Server], None] | None]] = {
    # The server may fail before anything is sent, or once it knows of a run.
    "hangs at the start": (lambda server: setattr(server, "misbehaves", ("graphql", 0)), None),
    "refuses with 500": (lambda server: setattr(server, "misbehaves", ("graphql", 500)), None),
    "refuses with 401": (lambda server: setattr(server, "misbehaves", ("graphql", 401)), None),
    "is not there": (Server.die, None),
    "hangs at the end": (None, lambda server: setattr(server, "misbehaves", ("file_stream", 0))),
    "refuses data with 500": (None, lambda server: setattr(server, "misbehaves", ("file_stream", 500))),
    "refuses data with 401": (None, lambda server: setattr(server, "misbehaves", ("file_stream", 401))),
    "dies amid a run": (None, Server.die),
}


def send_with_fault(fault: str, folder: Path, server: Server, feed: TrackingClient, messages: list[str]) -> Outcome:
    before, amid = FAULTS[fault]
    if before is not None:
        before(server)
    run_dir, record = write_example_record(folder, 0)
    feed.hand_over("start_run", ONLINE, run_dir, record.config)
    if amid is not None:
        deadline = time.monotonic() + 120
        while not server.runs and time.monotonic() < deadline:
            time.sleep(0.05)
        amid(server)
    started = time.monotonic()
    for number in range(2):
        feed.hand_over("finish_run", ONLINE, write_example_record(folder, number)[0])
    feed.hand_over("log_table", ONLINE, folder)
    assert time.monotonic() - started < HANG_SECONDS / 4  # whatever the server does, a run does not wait for it
    feed.close(3 * CLOSE_SECONDS)  # a busy machine needs longer to keep everything
    return Outcome(time.monotonic() - started, messages, folder, server)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """Run all cases at once, because their time is spent waiting."""
    results: dict[str, Outcome] = {}
    threads = []
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", KEY)
        for fault in FAULTS:
            server = stack.enter_context(serving())
            patch.setenv("WANDB_BASE_URL", server.url)
            messages: list[str] = []
            feed = TrackingClient(messages.append, quiet_seconds=0.0)
            feed._start()  # with this server in its environment

            def run(
                fault: str = fault, server: Server = server, feed: TrackingClient = feed, messages: list[str] = messages
            ) -> None:
                results[fault] = send_with_fault(
                    fault, tmp_path_factory.mktemp("fault") / "mine", server, feed, messages
                )

            threads.append(threading.Thread(target=run))
            threads[-1].start()
        for thread in threads:
            thread.join()
        yield results


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_server_costs_seconds_and_one_line(fault: str, outcomes: dict[str, Outcome]) -> None:
    """A bad server costs seconds and is reported in a line, and nothing counts as sent that was not."""
    outcome = outcomes[fault]
    assert outcome.seconds < HANG_SECONDS / 2
    assert len(outcome.messages) == 1 and outcome.messages[0].startswith("tracking: "), outcome.messages
    assert outcome.messages[0].endswith(f"`harness sync {outcome.folder}` sends all of it")
    if fault == "hangs at the end":
        assert "Timed out" in outcome.messages[0]  # W&B's own limit, before ours
    run_dirs = sorted(path.parent for path in outcome.folder.glob("*/record.json"))
    if "401" in fault:  # known at once: there is time to keep everything for W&B too
        assert all(inspect(folder, "--summary")["state"] == "finished" for folder in (*run_dirs, outcome.folder))
    states = [payload.read_sync_state(run_dir, "wandb") for run_dir in run_dirs]
    assert len(states) == 2 and all(entry is None or entry.sent_at is None for entry in states)


@pytest.mark.parametrize("fault", ["hangs at the start", "refuses data with 401", "dies amid a run"])
def test_a_sync_sends_the_runs_that_were_not_sent(
    fault: str, outcomes: dict[str, Outcome], server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = outcomes[fault]
    run_dirs = sorted(path.parent for path in outcome.folder.glob("*/record.json"))
    states = [payload.read_sync_state(run_dir, "wandb") for run_dir in run_dirs]
    assert send(outcome.folder) == 0
    assert capsys.readouterr().out == "sent 2 runs and the table; the tracker had 0 before\n"
    assert len(server.runs) == 3
    for run_dir, entry in zip(run_dirs, states, strict=True):
        state = payload.read_sync_state(run_dir, "wandb")
        assert state is not None and (entry is None or state.id == entry.id)
        check_sent(server.runs[state.id], run_dir)


@pytest.mark.parametrize("fault", ["hangs at the start", "refuses data with 401"])
def test_a_sync_that_fails_prints_one_line(
    fault: str, tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.misbehaves = ("graphql", 0) if "start" in fault else ("file_stream", 401)
    write_example_record(tmp_path / "mine")
    started = time.monotonic()
    assert send(tmp_path / "mine", "--timeout", "3") == 1 and time.monotonic() - started < HANG_SECONDS / 2
    out, error = capsys.readouterr()
    assert out == "sent 0 runs; the tracker had 0 before\n"
    assert error.startswith("the rest was not sent: W&B") and error.count("\n") == 1
    assert KEY not in error


def test_a_sync_without_a_key_sends_nothing(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    write_example_record(tmp_path / "mine")
    started = time.monotonic()
    assert send(tmp_path / "mine") == 1 and time.monotonic() - started < HANG_SECONDS / 2
    assert "run `wandb login`, or set WANDB_API_KEY" in capsys.readouterr().err
    assert server.bytes_received == b""


def test_a_sync_of_a_folder_without_runs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert send(tmp_path / "none") == 2 and send(tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_stopped_tracker_delays_no_run(tmp_path: Path) -> None:
    """The tracker's process is stopped, and the pipe to it is soon full."""
    messages: list[str] = []
    feed = TrackingClient(messages.append)
    feed._start()
    assert feed.process is not None
    os.kill(feed.process.pid, signal.SIGSTOP)
    run_dir, _ = write_example_record(tmp_path / "mine")

    def hand_over() -> None:
        for number in range(20):
            feed.hand_over("start_run", OFFLINE, run_dir, {"much": "x" * 100_000})
            feed.hand_over("finish_run", OFFLINE, tmp_path / "mine" / str(number))

    handing = threading.Thread(target=hand_over, daemon=True)
    handing.start()
    handing.join(60)
    if handing.is_alive():
        feed.process.kill()
        pytest.fail("handing over waits for the tracker")
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
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        (run_dir,) = (path.parent for path in (tmp_path / "mine").glob("*/record.json"))
        wait_until_logged(run_dir, "live/host_bytes", 5)
        family = child.children(recursive=True)
        parent.kill()
        _, alive = psutil.wait_procs([child, *family], timeout=90)
    assert family and not alive
    inspect.cache_clear()
    assert set(column(history(run_dir), "live/host_bytes")) == {5}


@pytest.mark.parametrize("last", [b"", b"\0\0"], ids=["unread answer", "half a message"])
def test_the_tracker_ends_with_a_parent_that_read_no_answer(tmp_path: Path, last: bytes) -> None:
    """The end of a process that has not read all of its messages resets the pipe."""
    parent, child = Pipe()
    command = [sys.executable, "-m", "harness.tracking.process", str(child.fileno()), "0"]
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
    """A real sweep has secrets in its environment and on its command line: one row is ok, and two are refused."""
    word = "a-long-word-PLANTED1"
    environment = os.environ | {"WANDB_API_KEY": KEY, "SOME_TOKEN": word, "UCX_NOTE": word, "UCX_KEY": "PLANTED0"}
    command = [sys.executable, "-m", "harness", "-m", f"results_dir={tmp_path}", "name=mine", "strategy=ddp"]
    command += ["train.seq_len=32", "train.steps=1", "train.warmup_steps=1", "proof.reference=false"]
    command += [f"tracking.tags=[],[{word}],['https://me:PLANTED2@there']"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    records = read_all(tmp_path / "mine").records
    assert [record.row["status"] for record in records] == ["ok", "refused", "refused"]
    assert records[0].environment["variables"]["UCX_NOTE"] == "[secret]"  # it was there to be found
    assert records[1].row["reason"].startswith("tracking.tags holds a secret") and "[secret]" in str(records[2].config)
    decoded = [json.dumps(inspect(tmp_path / "mine" / record.row["run_id"])) for record in records]
    decoded.append(json.dumps(inspect(tmp_path / "mine")))
    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    contents = files | {f"decoded {i}": text.encode() for i, text in enumerate(decoded)}
    contents["terminal"] = (done.stdout + done.stderr).encode()
    leaks = [(name, secret) for name, content in contents.items() for secret in PLANTED if secret.encode() in content]
    assert not leaks and len(files) > 30
    assert "[secret]" in decoded[0]
    assert not any(f'"{key}"' in text for text in decoded for key in ("host", "program", "executable", "args", "email"))


def test_redaction_changes_only_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SERVICE_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MY_SECRET_FOLDER", "/home/me/secrets")
    assert redacted({"a": ["x 0123456789abcdef y", 1, None], "key": True}) == {
        "a": ["x [secret] y", 1, None],
        "key": True,
    }
    assert redacted("git+https://me:word@host/a?b=c") == "git+https://[secret]@host/a?b=c"
    for harmless in ("false", "/home/me/secrets", "https://host:80/a@b", "a:b@c", "http://host/x:y@z"):
        assert redacted(harmless) == harmless


def test_a_documented_tracker_works_as_one_file(tmp_path: Path) -> None:
    """The tracker of docs/development/extending.md works once its files are in place."""
    page = (ROOT / "docs" / "development" / "extending.md").read_text()
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def connect(" in code]
    for folder in ("harness", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "harness" / "tracking" / "trackers" / "lines.py").write_text(block)
    write_example_record(tmp_path / "results" / "mine")
    command = [sys.executable, "-m", "harness", "sync", "results/mine", "--tracker", "lines"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "sent 1 run and the table; the tracker had 0 before\n"
    lines = [json.loads(line) for line in (tmp_path / "results" / "mine" / "lines.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok"]
