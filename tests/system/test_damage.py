"""Files that are truncated, filled with noise or half written are made again or ignored, never a wrong row."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.data.corpus import token_file
from harness.records.store import read_all, read_record, write_record
from tests.support.commands import Done, run_harness
from tests.support.folder_invariants import Ledger, differences, litter
from tests.support.processes import TINY

SWEEP = ("-m", "name=sweep", "strategy=ddp,tp", "model.num_hidden_layers=1", "train.global_batch=2", *TINY)

LONG = pytest.mark.long

Damage = Callable[[bytes], bytes]


def emptied(content: bytes) -> bytes:
    return b""


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def noisy(content: bytes) -> bytes:
    return random.Random(0).randbytes(len(content))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an undisturbed sweep's results, with a cache of their own beside them."""
    folder = tmp_path_factory.mktemp("whole")
    done = run_sweep(folder)
    assert done.returncode == 0, done.stderr
    return folder


def run_sweep(folder: Path) -> Done:
    token_file.cache_clear()  # as a new process would look for it
    return run_harness(folder, *SWEEP, f"data.cache={folder / 'cache'}")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def damage_file(folder: Path, pattern: str, damage: Damage) -> None:
    (path,) = folder.glob(pattern)
    path.write_bytes(damage(path.read_bytes()))


CASES = [  # a file, whether the damaged one is looked at where all rows stand
    ("sweep/tp*/record.json", True),
    ("sweep/tp*/run.json", False),
    ("sweep/tp*/steps.jsonl", False),
    ("sweep/tp*/ranks/rank_00001.json", False),
    ("sweep/references/*/record.json", False),
    ("sweep/references/*/ranks/rank_00000.json", False),
    ("sweep/runs.csv", False),
    ("cache/corpus-*.bin", False),
    ("cache/allocator/*/allocator-*.so", False),
]

EVERY_CHANGE = ("sweep/tp*/record.json", "sweep/references/*/ranks/rank_00000.json", "cache/corpus-*.bin")


@pytest.mark.parametrize(
    ("pattern", "is_run_again", "damage"),
    [
        pytest.param(*case, damage, marks=[] if damage is cut and case[0] in EVERY_CHANGE else [LONG])
        for case in CASES
        for damage in (cut, noisy, emptied)
    ],
)
def test_a_damaged_file_spoils_no_row(
    folder: Path, whole: Path, pattern: str, is_run_again: bool, damage: Damage
) -> None:
    ledger = Ledger(folder)
    assert ledger.look() == []
    damage_file(folder, pattern, damage)
    if is_run_again:
        ledger.finished = {
            path: written for path, written in ledger.finished.items() if not path.match("tp*/record.json")
        }
    done = run_sweep(folder)
    assert done.returncode == 0, done.stderr
    if "references" not in pattern:
        assert ledger.look() == []
    assert differences(folder, whole) == [] == litter(folder)
    assert is_run_again == ("not a whole record" in done.stderr and "is run again" in done.stderr)


READ_AGAIN = ("sweep/references/*/ranks/*.json", "cache/corpus-*.bin", "cache/allocator/*/allocator-*.so")


@LONG
@pytest.mark.parametrize(
    ("patterns", "damage"), [(READ_AGAIN, cut), (READ_AGAIN, noisy), (["sweep/references/*/record.json"], noisy)]
)
def test_a_run_beside_damaged_files_has_the_right_row(
    folder: Path, whole: Path, patterns: Sequence[str], damage: Damage
) -> None:
    """One of the runs is missing, so that reference, corpus and allocator are read again, and made again."""
    (removed,) = folder.glob("sweep/tp*")
    shutil.rmtree(removed)
    for pattern in patterns:
        damage_file(folder, pattern, damage)
    done = run_sweep(folder)
    assert done.returncode == 0, done.stderr
    assert "reference single" in done.stderr
    assert differences(folder, whole) == [] == litter(folder)


@pytest.mark.parametrize("damage", [cut, pytest.param(noisy, marks=LONG), pytest.param(emptied, marks=LONG)])
def test_a_damaged_listing_of_a_dead_command_is_removed(folder: Path, damage: Damage) -> None:
    listing = folder / "sweep" / ".locks" / "command-0123abcd.json"
    listing.write_bytes(damage(b'{"host": "elsewhere", "pid": 1, "started_at": 0.0, "max_parallel": 1, "runs": []}'))
    listing.with_suffix(".lock").touch()
    assert run_sweep(folder).returncode == 0
    assert litter(folder) == []


@pytest.mark.parametrize("damage", [emptied, cut, noisy])
def test_an_export_of_a_damaged_run_prints_one_line(
    folder: Path, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_file(folder, "sweep/tp*/run.json", damage)
    (run_dir,) = folder.glob("sweep/tp*")
    assert main(["export", str(run_dir)]) == 2
    message = capsys.readouterr().err
    assert "run.json cannot be read" in message and message.count("\n") == 1


_WRITER = """
import sys
from pathlib import Path
from harness.records.store import write_record
number = 0
while True:
    number += 1
    row = {"run_id": "run", "status": "ok", "parameters": number}
    write_record(Path(sys.argv[1]), {"row": row, "ranks": [{"number": number, "fill": "x" * 50} for _ in range(2000)]})
    if number == 1:
        print("ready", flush=True)
"""


def test_a_kill_during_writing_leaves_a_whole_record(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    leftovers = 0
    for attempt in range(60):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(run_dir)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.013 * (attempt % 8))
            writer.send_signal(signal.SIGKILL)
        stored = read_record(run_dir)
        assert len(stored.rank_entries) == 2000
        assert {rank["number"] for rank in stored.rank_entries} == {stored.row["parameters"]}
        leftovers = len(list(run_dir.glob(".record.json.*.tmp")))
        if leftovers and attempt >= 5:
            break
    assert leftovers > 0  # a kill did fall into a write
    assert len(read_all(tmp_path).records) == 1
    unfinished = next(run_dir.glob(".record.json.*.tmp"))
    write_record(run_dir, stored)
    assert unfinished.exists()  # it could be of a command that still writes
    os.utime(unfinished, (0, 0))
    write_record(run_dir, stored)
    assert not unfinished.exists()
