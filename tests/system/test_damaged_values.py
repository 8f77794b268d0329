"""Values that no command writes: whatever stands in the files of a comparison, a command says so in a line."""

import json
import random
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.records.plan_validation import PlannedConfiguration, PlanValidation, write_plan_validation
from harness.records.run_folder import ComparisonFolder
from harness.records.store import read_all
from harness.report.charts import render
from harness.tracking import payload
from tests.support.commands import run_harness
from tests.support.processes import TINY

SWEEP = ("-m", "name=sweep", "strategy=ddp,tp", "train.global_batch=4", "model.num_hidden_layers=2", *TINY)

VALUES: list[Any] = [
    *(None, True, -1, 0, 2**63, 10**40, 10**400, 1e308, -1e308, float("nan"), float("inf")),
    *("", "text", "../../x", "\ud800", "\0", "x" * 5000),
    *([], {}, [None], [[]], {"a": 1}, {"": None}, [{}]),
]

PATTERNS = (
    *("*/record.json", "*/run.json", "*/tracking.json", "*/steps.jsonl", "*/ranks/*.pulse"),
    *("tracking.json", "plan_validation.json", ".jobs/*.json", ".locks/command-*.json", "references/*/record.json"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a comparison with every file that a command writes: two runs, a refused one, a pipeline and jobs."""
    results = tmp_path_factory.mktemp("whole")
    assert run_harness(results, *SWEEP, "strategy=ddp,tp,pp_1f1b,zero2").returncode == 0
    assert run_harness(results, *SWEEP, "train.micro_batch=3").returncode == 0
    slurm = ("hydra/launcher=slurm", "hydra.launcher.submit=false", "cluster.device=cpu")
    assert run_harness(results, *SWEEP, *slurm).returncode == 0
    folder = results / "sweep"
    records = read_all(folder).records
    for record in records:
        sent = payload.SyncState("0" * 16, payload.record_key(record), "2026-01-01T00:00:00+00:00")
        payload.write_sync_state(folder / record.run_id, "wandb", sent)
    payload.write_sync_state(folder, "wandb", payload.SyncState("1" * 16, payload.rows_key(records), "2026-01-01"))
    planned = tuple(PlannedConfiguration(record.run_id, 100.0, 200.0) for record in records)
    write_plan_validation(ComparisonFolder(folder), PlanValidation(planned, len(planned)))
    runs = [{"run_id": record.run_id, "cost": 2.0} for record in records]
    queue = {"host": "elsewhere", "pid": 1, "started_at": 0.0, "max_parallel": 1, "runs": runs}
    (folder / ".locks" / "command-0123abcd.json").write_text(json.dumps(queue))
    return folder


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value within nested groups and lists."""
    yield place
    if isinstance(value, (dict, list)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(entry, (*place, key))


def other_value(value: Any, chance: random.Random) -> Any:
    """Return nested values of which one is another, missing, under another key, or nested deep."""
    place = chance.choice(list(places(value)))
    if not place:
        return chance.choice(VALUES)
    owner = value
    for key in place[:-1]:
        owner = owner[key]
    key, how = place[-1], chance.choice(["missing", "renamed", "deep", *["value"] * 6])
    if how == "missing":
        del owner[key]
    elif how == "renamed" and isinstance(owner, dict):
        owner[chance.choice(["", "x", "status", "row"])] = owner.pop(key)
    else:
        owner[key] = chance.choice(VALUES) if how == "value" else nested(chance.choice([5, 50, 900]))
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def other_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return a file that is cut, has other bytes, is noise, empty or endless brackets, or has something inserted."""
    middle = chance.randrange(len(content))
    noise = chance.randbytes(chance.randrange(1, 6))
    inserted = chance.choice([b"\0", b"\xff", b"1e999", b"{", b"9" * 5000])
    return chance.choice(
        [
            content[:middle],
            content[:middle] + noise + content[middle + len(noise) :],
            chance.randbytes(len(content)),
            b"",
            b"[" * 100_000,
            content[:middle] + inserted + content[middle:],
        ]
    )


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return other content of a file: three times out of four with other values, if it is JSON."""
    try:
        value = json.loads(content)
    except ValueError:
        return other_bytes(content, chance)
    return json.dumps(other_value(value, chance)).encode() if chance.random() < 0.75 else other_bytes(content, chance)


def run_main(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return the exit status and the output of a command; an exception that it lets through fails the test."""
    status = main(words)
    out, error = capsys.readouterr()
    return status, out, error


@pytest.mark.parametrize(
    ("mutations", "seed"), [(10, 1), *(pytest.param(100, seed, marks=pytest.mark.long) for seed in range(2, 12))]
)
def test_no_value_ends_a_command_in_a_traceback(
    whole: Path,
    tmp_path: Path,
    mutations: int,
    seed: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be read is named with its file in a line, and all runs are shown that a record or the table has."""
    monkeypatch.setattr(render, "svgs", lambda specs: {})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))  # so that sync can start no tracking process
    folder = shutil.copytree(whole, tmp_path / "sweep")
    run_ids = [record.run_id for record in read_all(whole).records]
    files = sorted(path.relative_to(whole) for pattern in PATTERNS for path in whole.glob(pattern))
    assert {path.name for path in files} >= {"record.json", "run.json", "tracking.json", "steps.jsonl"}
    recorded, rejected = [file for file in files if file.match("*/record.json")], 0
    for number in range(mutations):
        chance = random.Random(f"{seed} {number}")
        file = chance.choice(chance.choice([files, recorded]))
        content = (whole / file).read_bytes()
        (folder / file).write_bytes(damaged(content, chance))
        run_id = file.parts[0] if file.parts[0] in run_ids else chance.choice(run_ids)
        run_dir = str(folder / run_id)
        print(f"mutation {number} of seed {seed}: {file}")  # pytest shows it if a command fails
        capsys.readouterr()
        for words in (["explain", run_dir], ["export", run_dir, "--to", str(tmp_path / "export")]):
            status, _, error = run_main(words, capsys)
            assert (status in (0, 2), error.count("\n") <= 1) == (True, True), (words, error)
        outputs = {
            words[0]: run_main(words, capsys)
            for words in (
                ["diff", str(whole), str(folder)],
                ["status", str(folder)],
                ["sync", str(folder)],
                ["report", str(folder), "--to", str(tmp_path / "report")],
            )
        }
        status, _, error = outputs["report"]
        readable = len(read_all(folder).records)
        assert readable >= len(run_ids) - (file.match("*/record.json") and "references" not in file.parts)
        if readable < len(run_ids):
            rejected += 1
            assert all(str(folder / file) in out + error for _, out, error in outputs.values()), (file, outputs)
        else:
            assert "skipped" not in error
        lost = {*run_ids} - {record.run_id for record in read_all(folder).records}
        kept = sum(record.status == "ok" for record in read_all(whole).records if record.run_id in lost)
        lines = (tmp_path / "report" / "runs.csv").read_text().splitlines()
        assert status == 0 and len(lines) == 1 + readable + kept
        (folder / file).write_bytes(content)
    assert rejected >= mutations // 10


@pytest.mark.parametrize("content", [b"", b"[" * 9999, b"{", b"\xff", b"[]"])
def test_a_damaged_file_beside_the_records_is_named(
    whole: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    folder = shutil.copytree(whole, tmp_path / "sweep")
    assert ComparisonFolder(folder).damaged_files() == []
    patterns = (".jobs/*.json", ".locks/*.json", "*/tracking.json", "tracking.json", "plan_validation.json")
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    assert {path.parent.name for path in paths} >= {".jobs", ".locks", "sweep"}
    for path in paths:
        path.write_bytes(content)
    lines = run_main(["status", str(folder)], capsys)[1].splitlines()
    assert sorted(lines[-len(paths) :]) == sorted(f"  {path} is damaged and has no effect: remove it" for path in paths)
    error = run_main(["sync", str(folder)], capsys)[2]
    assert len(re.findall("tracking.json is damaged", error)) == sum(path.name == "tracking.json" for path in paths)


def test_the_wrong_value_of_a_record_is_named_with_its_key(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "sweep")
    path = min(folder.glob("zero2-*/record.json"))
    values = json.loads(path.read_bytes())
    values["ranks"][1]["profiled"]["at_peak"]["parts"][0]["bytes"] = [1]
    path.write_text(json.dumps(values))
    assert main(["explain", str(path.parent)]) == 2
    problem = "ranks.1.profiled.at_peak.parts.0.bytes is not a whole number"
    assert capsys.readouterr().err == f"{path} is not a whole record: {problem}; remove its folder and run again\n"
