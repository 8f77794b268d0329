"""What repeats a comparison: its commands, commit and configurations, and its table where records are gone."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.config.fingerprint import result_affecting_keys
from harness.config.from_dict import flattened
from harness.records.provenance import machine_text, origin_of_row, versions_text
from harness.records.schema import Record
from harness.records.store import read_runs, read_runs_csv, rows_of, write_record, write_runs_csv
from harness.report.charts import render
from harness.report.document import Table
from harness.report.repeating import repeating
from harness.report.view import View
from tests.support.commands import compose_config
from tests.support.example_records import records, row

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published"

LACKS = "their records are gone, and runs.csv alone is left"


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "svgs", lambda specs: {})


@pytest.mark.parametrize("name", ["quickstart", "memory_wall", "scaling", "simulated_70b"])
def test_a_table_alone_has_a_report_and_loses_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault was an error, as the folder has no records. Nothing is written beside a table alone."""
    source = tmp_path / name
    shutil.copytree(PUBLISHED / name, source)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    assert main(["report", str(source)]) == 0
    out = capsys.readouterr().out
    assert " ".join(out.split()).count(LACKS) == 1 and "nothing is written into" in out
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    for _ in range(2):  # the second time over the first
        assert main(["report", str(source), "--to", str(tmp_path / "to")]) == 0
    old, new = cells(source / "runs.csv"), cells(tmp_path / "to" / "runs.csv")
    own = {"stale_reason", "commit"}  # of today's versions
    assert [{key: text for key, text in line.items() if key not in own} for line in old] == [
        {key: line[key] for key in old[0] if key not in own} for line in new
    ]
    page, published = ((folder / "report.md").read_text() for folder in (tmp_path / "to", source))
    assert page.count(LACKS) == 1 and LACKS not in published
    table = r"^\| [\w|+ ,.-]+ \| [^|]*\d \|.*\| ok.*$"  # of the comparison, whose last column is the status
    unranked = r" †| [^|]*(?:~~|\(n = \d\)) \|"  # speeds that a comparison without ranked ones no longer has in front
    shown, recorded = (
        [re.sub(unranked, "", line) for line in re.findall(table, text.split("## What this")[0], re.MULTILINE)]
        for text in (page, published)
    )
    assert shown and shown == recorded
    assert "## Memory" in page and "DeepSpeed's speed depends on its settings" not in page


def test_ranks_that_share_cores_are_not_ranked_from_a_table_either() -> None:
    """The fault was that a table's rows had no cores, so that four ranks on two cores had a speed."""
    view = View("scaling", read_runs(PUBLISHED / "scaling").records)
    crowded = [line for line in view.lines if line.get("world_size") == 4]
    assert crowded and all(line.speed.is_crowded for line in crowded)


def test_a_table_never_loses_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose record is gone keeps its row; a failure that has no record any more does not."""
    folder, gone, damaged = tmp_path / "some", records()[1].run_id, records()[2].run_id
    for record in records():
        write_record(folder / record.run_id, record)
    assert main(["report", str(folder)]) == 0
    before = {line["run_id"]: line for line in cells(folder / "runs.csv")}
    shutil.rmtree(folder / gone)
    (folder / damaged / "record.json").write_text("{")
    shutil.rmtree(folder / records()[-1].run_id)
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    after = {line["run_id"]: line for line in cells(folder / "runs.csv")}
    assert before.keys() - after.keys() == {records()[-1].run_id}
    assert [before[run] for run in (gone, damaged)] == [after[run] for run in (gone, damaged)]
    page = (folder / "report.md").read_text()
    assert "configurations of 2 runs: their records are gone" in page and "## Unreadable records" in page
    assert main(["report", str(PUBLISHED / "scaling"), "--to", str(folder)]) == 2
    assert "its runs.csv has 6 runs that this report lacks" in capsys.readouterr().err
    assert {line["run_id"]: line for line in cells(folder / "runs.csv")} == after
    (folder / "runs.csv").write_bytes(b"\xff\x00")  # a damaged table has nothing to lose
    assert main(["report", str(folder)]) == 0 and len(cells(folder / "runs.csv")) == 7


MACHINES: list[dict[str, Any]] = [
    {"processor": "AMD EPYC", "cores": 2},
    {"devices": 8, "device_name": "NVIDIA H100 80GB HBM3", "processor": "Intel(R) Xeon(R) Platinum 8480+", "cores": 96},
    {"devices": 1, "device_name": "NVIDIA H200"},
    {"cores": 4},
    {"processor": "a, b"},
    {},
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("libraries", [{}, {"cuda": "13.0", "nccl": "2.27.3", "driver": "580.1"}])
@pytest.mark.parametrize("dirty", [False, True, None])
def test_the_columns_on_the_origin_read_back(
    machine: dict[str, Any], libraries: dict[str, str], dirty: bool | None
) -> None:
    packages = {"python": "3.11.7", "torch": "2.13.0+cpu", "code": "c691eb31788e"}
    commit = None if dirty is None else {"commit": "9f40f9e7", "dirty": dirty}
    values = {"versions": packages, "environment": machine | libraries, "commit": commit}
    recorded = Record.from_json({"row": row(1, "ddp", "torch", 0), "config": {}} | values)
    (line,) = rows_of([recorded])
    assert origin_of_row(line) == {"versions": packages, "environment": machine | libraries, "commit": commit}
    again = Record.from_json({"row": row(1, "ddp", "torch", 0)} | origin_of_row(line))
    assert (machine_text(again), versions_text(again)) == (line["machine"], line["versions"])


def test_every_row_has_the_command_that_made_it(tmp_path: Path) -> None:
    """Two commands make one comparison. Where results go is left out, as it is a place on one machine."""
    for key in ("train.seed=1,2", "train.lr=0.1,0.2"):
        main(["-m", "strategy=fsdp_hybrid_shard", key, "name=two", "world_size=2", f"results_dir={tmp_path}"])
    rows = cells(tmp_path / "two" / "runs.csv")
    expected = [
        f"harness -m strategy=fsdp_hybrid_shard {key} name=two world_size=2"
        for key in ("train.seed=1,2", "train.lr=0.1,0.2")
    ]
    assert sorted({line["command"] for line in rows}) == sorted(expected) and len(rows) == 4
    assert all(re.fullmatch(r"([0-9a-f]{40}( with changes)?)?", line["commit"]) for line in rows)
    page = (tmp_path / "two" / "report.md").read_text()
    assert all(f"- {command}\n" in page for command in expected) and str(tmp_path) not in page
    for path in (tmp_path / "two").glob("*/record.json"):
        path.unlink()
    assert main(["report", str(tmp_path / "two"), "--to", str(tmp_path / "again")]) == 0
    again = (tmp_path / "again" / "report.md").read_text()
    assert all(f"- {command}\n" in again for command in expected)
    assert rows[0]["commit"] in again and f"- git checkout {rows[0]['commit'].partition(' ')[0]}\n" in again


def test_the_page_has_the_whole_configuration_of_every_row() -> None:
    """What most have, with what a row has instead, is the row's configuration."""
    choices = {
        "ddp": ("strategy=ddp",),
        "zero3": ("strategy=zero3", "train.lr=0.1"),
        "zero1": ("strategy=zero1", "checkpointing=full"),  # ddp lacks options that the two of DeepSpeed share
    }
    configs = {name: compose_config(*words).to_dict() for name, words in choices.items()}
    entries = [
        Record.from_json({"row": row(n, name, "torch", 0), "config": config, "corpus": "88ef"})
        for n, (name, config) in enumerate(configs.items())
    ]
    view = View("demo", entries)
    (section,) = repeating(view)
    usual, own = (part for part in section.parts if isinstance(part, Table))
    shown = {
        (f"{group}." if group != "run" else "") + pair.partition("=")[0]: pair.partition("=")[2]
        for group, text in usual.rows
        for pair in re.split(r", (?=\w+=)", text)
    }
    differing = dict(own.rows)
    assert len(own.rows) <= 3 and all("model." not in text for text in differing.values())
    for line in view.lines:
        changes = re.split(r", (?=[\w.]+=)", differing.get(line.label, ""))
        read = shown | dict(change.split("=", 1) for change in changes if change)
        flat = flattened(result_affecting_keys(line.record.config)) | {"data.fingerprint": "88ef"}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}
        del texts["repeat"]
        assert {key: text for key, text in read.items() if text != "null"} == {
            key: text for key, text in texts.items() if text != "null"
        }


def test_a_comparison_without_commands_and_configurations_has_no_such_section() -> None:
    assert repeating(View("demo", records())) == []


def test_diff_and_report_read_the_same_rows(tmp_path: Path) -> None:
    path = write_runs_csv(tmp_path, rows_of(records()))
    assert [run.row for run in read_runs(tmp_path).records] == [run.row for run in read_runs_csv(path)]
    assert [run.run_id for run in read_runs(path).records] == [run.run_id for run in read_runs(tmp_path).records]
