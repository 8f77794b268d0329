"""Files that are truncated or filled with noise between two commands are made again or ignored, never a wrong row."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli.export import main as export
from harness.data.corpus import token_file
from tests.support.commands import Done, run_harness
from tests.support.folder_invariants import Ledger, differences, litter
from tests.support.processes import TINY

SWEEP = ("-m", "name=sweep", "strategy=ddp,tp", *TINY)

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
    place = tmp_path_factory.mktemp("whole")
    done = command(place)
    assert done.returncode == 0, done.stderr
    return place


def command(place: Path) -> Done:
    token_file.cache_clear()  # as a new process would look for it
    return run_harness(place, *SWEEP, f"data.cache={place / 'cache'}")


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "place")


def spoil(place: Path, pattern: str, damage: Damage) -> None:
    (path,) = place.glob(pattern)
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
    ("pattern", "makes_again", "damage"),
    [
        pytest.param(*case, damage, marks=[] if damage is cut and case[0] in EVERY_CHANGE else [LONG])
        for case in CASES
        for damage in (cut, noisy, emptied)
    ],
)
def test_what_is_damaged_spoils_no_row(
    place: Path, whole: Path, pattern: str, makes_again: bool, damage: Damage
) -> None:
    ledger = Ledger(place)
    assert ledger.look() == []
    spoil(place, pattern, damage)
    if makes_again:
        ledger.finished = {path: seen for path, seen in ledger.finished.items() if not path.match("tp*/record.json")}
    done = command(place)
    assert done.returncode == 0, done.stderr
    if "references" not in pattern:
        assert ledger.look() == []
    assert differences(place, whole) == [] == litter(place)
    assert makes_again == ("not a whole record" in done.stderr and "is run again" in done.stderr)


@LONG
@pytest.mark.parametrize("damage", [cut, noisy])
def test_a_run_made_beside_what_is_damaged_is_right(place: Path, whole: Path, damage: Damage) -> None:
    """One of the runs is missing, so that reference, corpus and allocator are read again, and made again."""
    (gone,) = place.glob("sweep/tp*")
    shutil.rmtree(gone)
    for pattern in ("sweep/references/*/ranks/*.json", "cache/corpus-*.bin", "cache/allocator/*/allocator-*.so"):
        spoil(place, pattern, damage)
    done = command(place)
    assert done.returncode == 0, done.stderr
    assert "reference single" in done.stderr
    assert differences(place, whole) == [] == litter(place)


@LONG
def test_a_damaged_reference_record_is_made_again(place: Path, whole: Path) -> None:
    (gone,) = place.glob("sweep/tp*")
    shutil.rmtree(gone)
    spoil(place, "sweep/references/*/record.json", noisy)
    assert command(place).returncode == 0
    assert differences(place, whole) == [] == litter(place)


@pytest.mark.parametrize("damage", [cut, pytest.param(noisy, marks=LONG), pytest.param(emptied, marks=LONG)])
def test_a_dead_commands_damaged_listing_goes(place: Path, damage: Damage) -> None:
    left = place / "sweep" / ".locks" / "command-0123abcd.json"
    left.write_bytes(damage(b'{"host": "elsewhere", "pid": 1, "began": 0.0, "side_by_side": 1, "runs": []}'))
    left.with_suffix(".lock").touch()
    assert command(place).returncode == 0
    assert litter(place) == []


@pytest.mark.parametrize("damage", [emptied, cut, noisy])
def test_what_cannot_be_exported_is_one_line(
    place: Path, damage: Damage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(place, "sweep/tp*/run.json", damage)
    (run_dir,) = place.glob("sweep/tp*")
    monkeypatch.setattr("sys.argv", ["export", str(run_dir)])
    assert export() == 2
    said = capsys.readouterr().err
    assert "run.json cannot be read" in said and said.count("\n") == 1
