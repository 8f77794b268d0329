"""TensorBoard, MLflow and trackio by their real libraries: what they wrote is read back by their own readers."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.records.heartbeat import HeartbeatWriter
from harness.records.store import read_all, read_record
from harness.tracking.client import TrackingClient
from harness.util.locks import file_lock
from tests.support.commands import ROOT, long
from tests.support.slurm_cluster import wait_for
from tests.support.tracker_stores import PROJECT, StoredRun, read_mlflow, read_tensorboard, read_trackio
from tests.support.tracking import write_example_record

TRACKERS = ("tensorboard", "mlflow", "trackio")

PATIENCE_SECONDS = 120.0  # of close(), since a busy machine needs longer


def settings(tracker: str, **own: Any) -> dict[str, Any]:
    mode = "offline" if tracker == "mlflow" else "online"
    return {"name": tracker, "mode": mode, "project": PROJECT, "tags": ["mine"]} | own


def read_offline_mlflow(comparison: Path) -> list[StoredRun]:
    """Return the runs of a comparison's own database, once it is there: every client of MLflow would create it."""
    folder = comparison / "mlflow"
    with file_lock(folder / "store.lock"):
        return read_mlflow(f"sqlite:///{folder}/mlflow.db") if (folder / "mlflow.db").exists() else []


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Path], list[StoredRun]]]:
    """Return the reader of what a tracker has of a comparison; trackio has all of them in one folder."""
    trackio = tmp_path_factory.mktemp("trackio")
    readers: dict[str, Callable[[Path], list[StoredRun]]] = {
        "tensorboard": read_tensorboard,
        "mlflow": read_offline_mlflow,
        "trackio": lambda folder: [run for run in read_trackio(trackio) if run.config or run.table],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(trackio))
        yield lambda tracker, folder: readers[tracker](folder)


def start(feed: TrackingClient, tracking: dict[str, Any], run_dir: Path) -> None:
    """Announce a run with two ranks that have reported a step."""
    (run_dir / "record.json").unlink()
    (run_dir / "ranks").mkdir()
    for rank in range(2):
        beat = HeartbeatWriter(run_dir, rank)
        beat.allocated_bytes = lambda rank=rank: 100 + rank  # type: ignore[misc]
        beat("timed", 3 + rank)
    feed.hand_over("start_run", tracking, run_dir, {"strategy": {"name": "ddp", "tp": 1}})


def check_run(run: StoredRun, run_dir: Path) -> None:
    """Check that every step, every column and the configuration are there."""
    row = read_record(run_dir).row
    assert run.series["train/loss"] == [(0, 5.5), (1, 4.5)] and run.values("train/grad_norm") == [2.0, 2.0]
    numbers = {f"row/{key}": [value] for key, value in row.items() if isinstance(value, (int, float))}
    assert numbers == {name: run.values(name) for name in run.series if name.startswith("row/")} and len(numbers) == 3
    texts = {key: text for key, text in row.items() if isinstance(text, str) and text}
    assert texts.items() <= run.texts.items() and run.is_ok == (row["status"] == "ok")
    assert run.config["strategy.name"] == "ddp" and float(run.config["strategy.tp"]) == 1
    assert run.config["versions.torch"] == "2.13.0"


def check_table(run: StoredRun, comparison: Path) -> None:
    columns, *rows = run.table
    cells = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [row["run_id"] for row in cells] == [record.run_id for record in read_all(comparison).records]
    assert [row["tokens_per_second"] for row in cells] == ["1000.5"] * len(cells) and "mfu" not in columns


@pytest.mark.parametrize("tracker", TRACKERS)
def test_runs_are_read_back_by_the_trackers_own_reader(
    tracker: str, tmp_path: Path, stored: Callable[[str, Path], list[StoredRun]]
) -> None:
    """Two runs overlap, one of them is read while it goes on, a third never ends, and then comes the table."""
    comparison, messages, tracking = tmp_path / tracker, [], settings(tracker)
    first, endless, other = (write_example_record(comparison, number)[0] for number in range(3))
    feed = TrackingClient(messages.append, quiet_seconds=0.0)
    start(feed, tracking, first)
    start(feed, tracking, endless)

    def live(folder: Path) -> StoredRun:
        return next((run for run in stored(tracker, comparison) if run.name == folder.name), StoredRun(""))

    for folder in (first, endless):
        wait_for(lambda folder=folder: 101 in live(folder).values("live/allocated_bytes"), 180, "live figures")
    write_example_record(comparison, 2, status="oom", reason="no memory")
    feed.hand_over("finish_run", tracking, other)
    write_example_record(comparison, 0)
    feed.hand_over("finish_run", tracking, first)
    feed.hand_over("log_table", tracking, comparison)
    feed.close(PATIENCE_SECONDS)
    assert messages == []
    runs = {run.name: run for run in stored(tracker, comparison)}
    tables = [run for run in runs.values() if run.table]
    assert len(runs) == 4 and len(tables) == 1
    check_run(runs[first.name], first)
    check_run(runs[other.name], other)
    assert runs[endless.name].is_ok is False and runs[endless.name].values("live/step")[-1] == 3
    assert runs[first.name].values("live/rank_1/allocated_bytes")[-1] == 101
    check_table(tables[0], comparison)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_sync_writes_recorded_runs_once(
    tracker: str,
    tmp_path: Path,
    stored: Callable[[str, Path], list[StoredRun]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was recorded for W&B is there after a sync, and once only after a second and a third."""
    comparison, server = tmp_path / f"synced_{tracker}", f"sqlite:///{tmp_path}/server.db"
    monkeypatch.chdir(tmp_path)  # a server has its artifacts where it likes
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    folders = [write_example_record(comparison, number)[0] for number in range(2)]
    options = ["--tracker", tracker, "--project", PROJECT, "--timeout", "60"]
    printed = []
    for more in ([], [], ["--again"]):
        assert main(["sync", str(comparison), *options, *more]) == 0, capsys.readouterr().err
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[2].replace("had 2", "had 0") == "sent 2 runs and the table; the tracker had 0 before\n"
    assert printed[1] == "sent 0 runs; the tracker had 2 before\n"
    runs = read_mlflow(server) if tracker == "mlflow" else stored(tracker, comparison)
    for folder in folders:
        (run,) = (run for run in runs if run.name == folder.name and run.texts.get("name") == comparison.name)
        check_run(run, folder)


def test_a_folder_of_events_elsewhere_has_a_folder_for_each_run(tmp_path: Path) -> None:
    messages: list[str] = []
    feed, tracking = TrackingClient(messages.append), settings("tensorboard", uri=str(tmp_path / "events"))
    for month in (1, 2):  # the second attempt replaces the first
        run_dir, _ = write_example_record(tmp_path / "mine", started_at=f"2026-0{month}-02T03:00:00+00:00")
        feed.hand_over("finish_run", tracking, run_dir)
        feed.wait(PATIENCE_SECONDS)
    feed.close(PATIENCE_SECONDS)
    assert messages == [] and not (run_dir / "tensorboard").exists()
    (run,) = read_tensorboard(tmp_path / "events" / "mine" / run_dir.name)
    check_run(run, run_dir)


@pytest.mark.parametrize("tracker", ["mlflow", long("trackio")])
def test_commands_at_once_lose_nothing(
    tracker: str, tmp_path: Path, stored: Callable[[str, Path], list[StoredRun]]
) -> None:
    """Three commands with a tracking process each write into one database, which none of them has made before."""
    comparison, tracking, messages = tmp_path / "shared", settings(tracker), []
    folders = [write_example_record(comparison, number)[0] for number in range(12)]

    def track(part: list[Path]) -> None:
        feed = TrackingClient(messages.append)
        for folder in part:
            feed.hand_over("finish_run", tracking, folder)
        feed.close(2 * PATIENCE_SECONDS)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(track, (folders[start::3] for start in range(3))))
    assert messages == []
    runs = {run.name: run for run in stored(tracker, comparison) if run.texts.get("name") == "shared"}
    assert runs.keys() == {folder.name for folder in folders}
    for folder in folders:
        check_run(runs[folder.name], folder)


@pytest.mark.parametrize("tracker", [long("tensorboard"), "mlflow", long("trackio")])
def test_a_missing_library_is_one_line_before_any_run(tracker: str, tmp_path: Path) -> None:
    hidden = f"import sys; sys.modules[{tracker!r}] = None; from harness.cli.main import main; sys.exit(main())"
    run = ["-m", "strategy=ddp,zero1", f"tracking={tracker}", f"results_dir={tmp_path}/results"]
    write_example_record(tmp_path / "mine")
    for words in (run, ["sync", str(tmp_path / "mine"), "--tracker", tracker]):
        done = subprocess.run([sys.executable, "-c", hidden, *words], cwd=ROOT, capture_output=True, text=True)
        advice = f"tracking={tracker} needs the {tracker} library: pip install 'training-harness[{tracker}]'\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", advice)
    assert not (tmp_path / "results").exists()


def test_what_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow has no server or a dead one, and trackio's folder is on a network, as its own setting says."""
    write_example_record(tmp_path / "mine")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")
    cases = {
        "no server: name it by tracking.uri, --uri of harness sync, or MLFLOW_TRACKING_URI": ["mlflow"],
        "MLflow: ": ["mlflow", "--uri", "http://127.0.0.1:9"],
        "set TRACKIO_DIR to a folder on a disk": ["trackio"],
    }
    for words, options in cases.items():
        assert main(["sync", str(tmp_path / "mine"), "--timeout", "5", "--tracker", *options]) == 1
        out, error = capsys.readouterr()
        assert out == "sent 0 runs; the tracker had 0 before\n"
        assert error.startswith("the rest was not sent: ") and error.count("\n") == 1 and words in error


def test_a_tracker_that_cannot_be_used_is_one_line_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no other place for runs, so that each of them fails; the fault was a line for each."""
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")
    messages: list[str] = []
    feed = TrackingClient(messages.append)
    for number in range(3):
        feed.hand_over("finish_run", settings("trackio"), write_example_record(tmp_path / "mine", number)[0])
    feed.close(PATIENCE_SECONDS)
    (message,) = messages
    assert "set TRACKIO_DIR to a folder on a disk; runs are kept on disk; `harness sync " in message
    assert len([problem for problem in feed.results.values() if problem]) == 3


def test_a_hint_and_a_sync_are_for_the_runs_own_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of the hint names no tracker, and sends to that of the runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/server.db")
    command = ["strategy=ddp", "tracking=mlflow", f"tracking.project={PROJECT}", "name=mine", "results_dir=results"]
    small = ["train.seq_len=32", "train.steps=1", "train.warmup_steps=1", "proof.reference=false"]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *command, *small],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert main(["sync", "results/mine", "--timeout", "60"]) == 0, capsys.readouterr().err
    (record,) = read_all(tmp_path / "results" / "mine").records
    run, _ = sorted(read_mlflow(f"sqlite:///{tmp_path}/server.db"), key=lambda run: bool(run.table))
    assert run.name == record.run_id and run.is_ok and len(run.values("train/loss")) >= 2
