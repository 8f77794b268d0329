"""A comparison run again from its folder, its table or its bundle, and what is said to differ."""

import csv
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.cli.main import main
from harness.records.store import read_all
from harness.report.charts import render
from tests.support.commands import ROOT, SMALL, run_harness

STRATEGIES = ("ddp", "single")  # whose peaks no thread of gloo changes that frees late

SWEEP = ("-m", f"strategy={','.join(STRATEGIES)}", "name=some", "repeats=2", "proof.reference=false", *SMALL)

AGAIN = "REPRODUCED: nothing differs by more than 1 % and beyond the range of the repeats"


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "svgs", lambda specs: {})
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sweep of two strategies, each measured twice."""
    results = tmp_path_factory.mktemp("recorded")
    assert run_harness(results, *SWEEP).returncode == 0
    return results / "some"


@pytest.fixture(scope="module")
def again(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what was run again from the records."""
    target = tmp_path_factory.mktemp("again")
    assert main(["reproduce", str(recorded), "--to", str(target)]) == 0
    return target


def reproduce(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, str]:
    """Return exit status and output."""
    capsys.readouterr()
    status = main(["reproduce", str(folder), *words])
    return status, capsys.readouterr().out


def changed(folder: Path, target: Path, column: str, change: Any) -> Path:
    """Copy the table of a folder, with other values in a column of ddp's rows, and return its folder."""
    with (folder / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["strategy"] == "ddp":
            row[column] = change(row[column])
    target.mkdir()
    with (target / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return target


def test_the_same_configurations_are_run_again(recorded: Path, again: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is run again has the same runs, and a second call finds them and only compares."""
    before, after = ({record.run_id for record in read_all(folder).records} for folder in (recorded, again / "some"))
    assert before == after and len(before) == 4
    status, out = reproduce(capsys, recorded, "--to", str(again))
    assert status == 0 and AGAIN in out and "the same versions are installed" in out
    assert "compared 2 configurations that are ok in A" in out


FAULTS: dict[str, tuple[str, Any, str]] = {
    # A column of the recorded table, its change, and what is then said.
    "bytes": ("communication_bytes", lambda text: str(int(text) * 2), "DIFFERS: ddp"),
    "few bytes": ("communication_bytes", lambda text: str(int(text) + 1), AGAIN),  # within 1 %
    "memory": ("peak_allocated_bytes", lambda text: str(int(text) // 2), "DIFFERS: ddp"),
    "status": ("status", lambda _: "oom", "other ends than in A: ddp (oom → ok)"),
    "versions": (
        "versions",
        lambda text: text.replace("torch ", "torch 1.0-"),
        "installed versions differ: torch 1.0-",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_is_said(
    fault: str, recorded: Path, again: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    column, change, words = FAULTS[fault]
    table = changed(recorded, tmp_path / "table", column, change)
    status, out = reproduce(capsys, table, "--to", str(again))
    assert words in " ".join(out.split()) and status == (0 if AGAIN in out else 1)
    assert (status == 0) == (fault in ("few bytes", "versions"))


def test_settings_leave_runs_out_and_nothing_is_tracked(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs of one of the two commands were sent to a server of their authors'."""
    online = "tracking=wandb tracking.mode=online tracking.entity=them"
    table = changed(recorded, tmp_path / "table", "command", lambda text: text.replace("tracking=none", online))
    status, out = reproduce(capsys, table, "--to", str(tmp_path), "strategy=ddp", "repeats=1")
    assert status == 0 and "compared 1 configuration that is ok in A" in out
    typed = [line for line in out.splitlines() if line.startswith("$ harness -m name=some proof.reference=false")]
    assert len(typed) == 2 and all("tracking=none" in line and "them" not in line for line in typed)
    (record,) = read_all(tmp_path / "some").records
    assert record.config["tracking"]["name"] == "none"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: "", "does not say which commands made its runs"),
        (lambda _: "harness strategy=ddp data.path=[secret]", "had a secret, which was not recorded"),
    ],
)
def test_unknown_commands_are_one_line(
    change: Any, words: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = changed(changed(recorded, tmp_path / "one", "command", change), tmp_path / "two", "command", change)
    rows = (table / "runs.csv").read_text().splitlines()
    (table / "runs.csv").write_text("\n".join([rows[0], *(row for row in rows[1:] if row.startswith("ddp"))]) + "\n")
    assert main(["reproduce", str(table), "--to", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert main(["reproduce", str(recorded), "--to", str(recorded.parent)]) == 2
    assert "has the recorded runs themselves" in capsys.readouterr().err


@pytest.fixture(scope="module")
def bundle(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle of the sweep, with the folder of its report elsewhere."""
    folder = tmp_path_factory.mktemp("bundle")
    path = folder / "a.tar.gz"
    assert main(["report", str(recorded), "--to", str(folder / "report"), "--bundle", str(path)]) == 0
    return path


def test_a_bundle_is_read_as_its_folder_is(
    bundle: Path, recorded: Path, again: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copy(bundle, tmp_path / "b.tar.gz"))
    assert main(["report", str(copied)]) == 0
    page = (tmp_path / "some" / "report.md").read_text()
    assert page == (bundle.parent / "report" / "report.md").read_text()
    assert main(["diff", str(recorded), str(copied), "--fail-above", "0%"]) == 0
    assert "compared 2 configurations" in capsys.readouterr().out
    status, out = reproduce(capsys, copied, "--to", str(again))
    assert status == 0 and AGAIN in out
    assert harness.load(copied).equals(harness.load(recorded))
    assert main(["report", str(recorded), str(recorded), "--bundle", "x.tar.gz"]) == 2
    assert main(["report", str(recorded), "--bundle", "x.zip"]) == 2


def test_an_unpacked_bundle_keeps_its_checksums_and_names_nobody(bundle: Path, tmp_path: Path) -> None:
    with tarfile.open(bundle) as archive:
        assert {(entry.uid, entry.uname, entry.mtime) for entry in archive} == {(0, "", 0)}
        archive.extractall(tmp_path)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "some", capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") > 10
    names = {path.name for path in (tmp_path / "some").rglob("*")}
    assert {"record.json", "run.json", "steps.jsonl", "runs.csv", "report.html", "report.md"} <= names
    assert not names & {"logs", "ranks", "tracking.json"}
    record = next((tmp_path / "some").glob("*/record.json"))
    assert main(["export", str(record.parent), "--to", str(tmp_path / "export")]) == 0


def repacked(bundle: Path, target: Path, change: Any) -> Path:
    """Copy a bundle with other contents: `change` takes and returns them by their names."""
    with tarfile.open(bundle) as archive:
        contents = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    with tarfile.open(target, "w:gz") as archive:
        for name, content in change(contents).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return target


def listed(contents: dict[str, bytes], name: str) -> dict[str, bytes]:
    """Add a file whose checksum is right."""
    content = b"{}"
    line = f"{hashlib.sha256(content).hexdigest()}  {name}\n".encode()
    sums = contents["some/SHA256SUMS"] + line
    return contents | {"some/SHA256SUMS": sums, f"some/{name}": content}


DAMAGES: dict[str, Any] = {
    "another figure": lambda contents: {
        name: content.replace(b'"tokens_per_second": ', b'"tokens_per_second": 9') for name, content in contents.items()
    },
    "a missing file": lambda contents: {name: content for name, content in contents.items() if "runs.csv" not in name},
    "a foreign file": lambda contents: contents | {"some/x/record.json": b"{}"},
    "no checksums": lambda contents: {name: text for name, text in contents.items() if "SHA256SUMS" not in name},
    "a way out": lambda contents: listed(contents, "../../out"),
    "nothing": lambda contents: {},
}


@pytest.mark.parametrize("damage", [*DAMAGES, "half of it", "no archive", "no file"])
def test_a_damaged_bundle_is_refused(
    damage: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.tar.gz"
    if damage in DAMAGES:
        repacked(bundle, path, DAMAGES[damage])
    elif damage != "no file":
        path.write_bytes(bundle.read_bytes()[:5000] if damage == "half of it" else b"text")
    for words in (["report"], ["reproduce", "--to", str(tmp_path)]):
        assert main([words[0], str(path), *words[1:]]) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.count("\n") == 1 and str(path) in error
    assert {entry.name for entry in tmp_path.iterdir()} <= {"bad.tar.gz"}
    assert not (tmp_path.parent / "out").exists()


PUBLISHED = ROOT / "results" / "published"


@pytest.mark.parametrize(("name", "strategy"), [("quickstart", "zero2"), ("simulated_7b", "fsdp_full_shard")])
def test_a_run_of_a_published_table_is_exported(
    name: str, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is that of the row: its configuration gives the row's columns, and its layout the row's degrees."""
    with (PUBLISHED / name / "runs.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["strategy"] == strategy)
    place = PUBLISHED / name / row["run_id"]
    assert main(["export", str(place)]) == 2 and "add --to DIR" in capsys.readouterr().err
    assert main(["export", str(place), "--to", str(tmp_path)]) == 0
    spec = json.loads((tmp_path / "run.json").read_text())
    degrees = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    assert {name: str(spec["layout"][name]) for name in degrees} == {name: row[name] for name in degrees}
    assert spec["config"]["strategy"]["name"] == strategy
    assert spec["config"]["precision"]["name"] == row["precision"] and not place.exists()
    assert str(spec["config"]["train"]["global_batch"]) == row["global_batch"]
    assert (tmp_path / "train.py").exists() or (tmp_path / "deepspeed.json").exists()
    assert main(["export", str(PUBLISHED / name / "nothing"), "--to", str(tmp_path)]) == 2


def test_a_row_that_its_command_no_longer_makes_is_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = changed(recorded, tmp_path / "table", "seq_len", lambda _: "64")
    run_id = next(path.name for path in recorded.glob("ddp*"))
    assert main(["export", str(table / run_id), "--to", str(tmp_path / "to")]) == 2
    assert "export it by --plan" in capsys.readouterr().err and not (tmp_path / "to").exists()
