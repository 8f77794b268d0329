"""Runs recorded with schema version 1, under the columns' earlier names, are still read by every reader."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.records.rank_report import RankReport
from harness.records.runs_csv import read_runs_csv
from harness.records.schema import RENAMED_COLUMNS, SCHEMA_VERSION, with_current_names
from harness.records.store import read_all
from tests.support.reference_pages import columns_page

REPOSITORY = Path(__file__).parents[2]

EXAMPLE = REPOSITORY / "tests" / "data" / "schema_1" / "all"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "all"))


def test_rows_have_the_current_names_and_the_same_values(folder: Path) -> None:
    loaded = read_all(folder)
    assert len(loaded.records) == 2 and not loaded.problems
    for record in loaded.records:
        stored = json.loads((folder / record.run_id / "record.json").read_text())
        assert stored["schema_version"] == 1 and record.schema_version == SCHEMA_VERSION
        assert record.row == with_current_names(stored["row"])
        assert not record.row.keys() & RENAMED_COLUMNS.keys()
        assert record.row["executed_flops"] == stored["row"]["hardware_flops"]


def reported(written: Any, read: Any) -> Any:
    """Return what was written without the empty values of keys that were not read, which older ranks did not report."""
    if not isinstance(read, dict):
        return written
    return {key: reported(value, read.get(key)) for key, value in written.items() if key in read or value}


def test_rank_reports_are_written_as_they_were_read() -> None:
    for path in EXAMPLE.glob("*/ranks/*.json"):
        values = json.loads(path.read_text())
        written = json.loads(json.dumps(RankReport.from_json(values).to_json()))
        assert reported(written, values) == values


def test_commands_read_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["report", folder], ["status", folder], ["diff", folder, folder]):
        assert main([*map(str, arguments)]) == 0
    assert "ddp" in capsys.readouterr().out


def test_published_comparisons_can_be_read() -> None:
    """Whatever version wrote them: every line has a status and the current names of columns."""
    tables = sorted((REPOSITORY / "results" / "published").glob("*/runs.csv"))
    assert len(tables) >= 9
    for table in tables:
        records = read_runs_csv(table)
        assert records and all(record.status for record in records), table
        assert not any(record.row.keys() & RENAMED_COLUMNS.keys() for record in records), table


def test_the_committed_reference_page_is_current() -> None:
    assert (REPOSITORY / "docs" / "reference" / "columns.md").read_text() == columns_page()
