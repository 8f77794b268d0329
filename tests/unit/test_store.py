"""The result store: exact, whole or absent, and never stopped by one bad file."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.records import provenance
from harness.records.provenance import git_commit, version_differences, versions
from harness.records.schema import COLUMNS, Record
from harness.records.store import read_all, read_record, rows_of, write_record, write_runs_csv
from harness.util.files import atomic_write_text
from harness.util.text import UserError, sanitize

PROMISED = [
    "run_id",
    "name",
    "status",
    "reason",
    "model",
    "parameters",
    "strategy",
    "engine",
    "checkpointing",
    "precision",
    "world_size",
    "dp_replicate",
    "dp_shard",
    "tp",
    "cp",
    "pp",
    "zero_stage",
    "micro_batch",
    "grad_accumulation",
    "global_batch",
    "seq_len",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "step_seconds",
    "mfu",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "activation_bytes",
    "communication_bytes",
    "loss_first",
    "loss_last",
    "loss_deviation",
    "grad_deviation",
    "predicted_peak_bytes",
    "predicted_step_seconds",
    "measured_on",
    "launch",
]


def record(run_id: str = "run", **row: Any) -> dict[str, Any]:
    return {
        "row": {"run_id": run_id, "status": "ok"} | row,
        "ranks": [{"rank": 0}],
        "versions": versions(),
        "communication": [],
    } | {key: {} for key in ("config", "layout", "environment", "proof")}


def read_csv(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[])


def test_promised_columns_come_first_and_in_order() -> None:
    assert list(COLUMNS)[: len(PROMISED)] == PROMISED


_VALUES = {
    str: st.text(max_size=20) | st.sampled_from(["=1+1", "+a", "-b", "@c", "\t=d", "'e", 'f,"g"', "NA", "1e9", "\r\n"]),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(),
    bool: st.booleans(),
}


def written(results: Path) -> Path:
    return write_runs_csv(results, rows_of(read_all(results).records))


# The columns that every record has, and those that a table alone has.
_NOT_IN_RECORDS = {"run_id", "status", "stale_reason", "machine", "versions", "command", "commit"}

_ROWS = st.fixed_dictionaries(
    {},
    optional={
        column: st.none() | _VALUES[entry.type] for column, entry in COLUMNS.items() if column not in _NOT_IN_RECORDS
    }
    | {"at_peak_logits_bytes": st.none() | _VALUES[int]},
)


@settings(max_examples=80, deadline=None)
@given(row=_ROWS)
def test_any_row_survives_to_pandas(row: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    results = tmp_path_factory.mktemp("results")
    write_record(results / "run", record(**row))
    assert read_record(results / "run").row.keys() == {"run_id", "status", *row}
    table = read_csv(written(results))
    assert len(table) == 1 and list(table)[: len(COLUMNS)] == list(COLUMNS)
    for column in {*COLUMNS, *row} - _NOT_IN_RECORDS:
        cell, value = table[column][0], row.get(column)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            assert cell == ""
        elif isinstance(value, str):
            text = sanitize(value)
            assert cell == ("'" + text if text[:1] in tuple("=+-@'") else text)
        else:
            assert float(cell) == value if isinstance(value, float) else cell == str(value)


def test_pandas_infers_exact_integers_and_empties(tmp_path: Path) -> None:
    write_record(tmp_path / "a", record("a", peak_allocated_bytes=2**62 + 1, started_at="2026-01-01T00:00:00Z"))
    write_record(tmp_path / "b", record("b", peak_allocated_bytes=None, checkpointing="none", mfu=0.0))
    table = pd.read_csv(written(tmp_path), dtype_backend="numpy_nullable")
    assert table["run_id"].tolist() == ["b", "a"] and table["peak_allocated_bytes"][1] == 2**62 + 1
    assert pd.isna(table["peak_allocated_bytes"][0]) and pd.isna(table["mfu"][1]) and table["mfu"][0] == 0
    assert table["checkpointing"][0] == "none"


def test_operations_beyond_64_bits_are_recorded(tmp_path: Path) -> None:
    """A step of 405b with 2,048 sequences of 8,192 tokens needs more."""
    flops = 44_047_315_418_008_780_800
    write_record(tmp_path / "a", record("a", model_flops=flops, executed_flops=2**62 + 1, peak_allocated_bytes=1.5))
    row = read_record(tmp_path / "a").row
    assert row["model_flops"] == float(flops) and type(row["executed_flops"]) is float
    assert row["peak_allocated_bytes"] == 2
    assert read_csv(written(tmp_path))["model_flops"][0] == str(float(flops))
    with pytest.raises(ValueError, match="does not fit 64 bits"):
        write_record(tmp_path / "b", record("b", peak_allocated_bytes=2**63))


def test_rows_come_in_order_of_start_then_id_and_unknown_columns_last(tmp_path: Path) -> None:
    starts = {"c": "2026-01-01T00:00:01Z", "b": "2026-01-01T00:00:02Z", "a": "2026-01-01T00:00:02Z"}
    for run_id, started_at in starts.items():
        write_record(tmp_path / run_id, record(run_id, started_at=started_at, **{f"extra_{run_id}": 1, "zz": 2}))
    write_record(tmp_path / "d", record("d", status="oom", reason="=cmd|' /C calc'!A0"))
    for hidden in ("references", ".trash"):
        write_record(tmp_path / hidden, record(hidden))
        write_record(tmp_path / hidden / "inner", record("inner"))
    table = read_csv(written(tmp_path))
    assert table["run_id"].tolist() == ["d", "c", "a", "b"]
    assert list(table)[len(COLUMNS) :] == ["extra_c", "zz", "extra_a", "extra_b"]
    assert table["reason"][0] == "'=cmd|' /C calc'!A0" and table["status"][0] == "oom"
    first = (tmp_path / "runs.csv").read_bytes()
    assert written(tmp_path).read_bytes() == first and not list(tmp_path.glob("*.tmp"))


def test_numbers_that_json_lacks_become_unknown_and_bytes_whole(tmp_path: Path) -> None:
    write_record(tmp_path, record(loss_last=math.nan, communication_bytes=10.6) | {"proof": {"x": [math.inf, (1,)]}})
    stored = read_record(tmp_path)
    assert (stored.row["loss_last"], stored.row["communication_bytes"]) == (None, 11)
    assert stored.proof == {"x": [None, [1]]} and "NaN" not in (tmp_path / "record.json").read_text()


@pytest.mark.parametrize(
    "row",
    [
        {"peak_allocated_bytes": "12"},
        {"model": 3},
        {"tp": True},
        {"extra": [1]},
        {"status": "fine"},
        {"tp": 2**63},
        {"at_peak_other_bytes": "1"},
    ],
)
def test_wrong_values_are_refused_before_anything_is_written(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(row))):
        write_record(tmp_path / "run", record(**row))
    assert not (tmp_path / "run").exists()


def test_corrupt_records_are_named_and_not_fatal(tmp_path: Path) -> None:
    write_record(tmp_path / "good", record("good"))
    whole = (tmp_path / "good" / "record.json").read_text()
    broken = {
        "cut": whole[: len(whole) // 2],
        "empty": "",
        "list": "[]",
        "newer": whole.replace('"schema_version": 2', '"schema_version": 3'),
        "nan": whole.replace('"ok"', '"ok", "mfu": NaN'),
        "text": whole.replace('"ok"', '"ok", "mfu": "high"'),
        "deep": "[" * 100_000,
        "ranks": whole.replace('"rank": 0', '"rank": 0}, 7, {"a": 1'),
    }
    contents = {name: text.encode() for name, text in broken.items()} | {"bytes": b"\xff\xfe"}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_bytes(content)
    (tmp_path / "folder" / "record.json").mkdir(parents=True)
    (tmp_path / "running").mkdir()
    loaded = read_all(tmp_path)
    assert [entry.row["run_id"] for entry in loaded.records] == ["good"]
    named = {Path(problem.split(" ")[0]).parent.name for problem in loaded.problems}
    assert named == {*contents, "folder"} and not any("\n" in problem for problem in loaded.problems)
    assert "schema_version=3 is not 2" in next(problem for problem in loaded.problems if "newer" in problem)
    with pytest.raises(UserError, match=r"cut/record\.json is not a whole record"):
        read_record(tmp_path / "cut")
    with pytest.raises(UserError, match="not a directory"):
        read_all(tmp_path / "missing")


def test_half_a_letter_is_replaced(tmp_path: Path) -> None:
    """JSON may contain it, but neither pandas nor a file can."""
    write_record(tmp_path / "half", record("half", strategy="\ud800 ddp", reason="whole: \U0001f600"))
    row = read_record(tmp_path / "half").row
    assert (row["strategy"], row["reason"]) == ("? ddp", "whole: \U0001f600")


def test_a_failed_write_leaves_the_old_and_no_litter(tmp_path: Path) -> None:
    write_record(tmp_path, record(parameters=1))
    with pytest.raises(TypeError):
        write_record(tmp_path, record(parameters=2) | {"config": {"bad": object()}})
    target = tmp_path / "taken"
    target.mkdir()
    with pytest.raises(OSError):
        atomic_write_text(target, "text")
    assert read_record(tmp_path).row["parameters"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.json", "taken"]


def test_versions_tell_code_and_packages_without_importing_them() -> None:
    probe = (
        "import json, sys; from harness.records.provenance import versions\n"
        "print(json.dumps([versions(), 'torch' in sys.modules]))"
    )
    assert json.loads(subprocess.check_output([sys.executable, "-c", probe])) == [versions(), False]
    assert versions().keys() == {"python", "torch", "deepspeed", "accelerate", "transformers", "harness", "code"}
    assert len(str(versions()["code"])) == 12


def test_code_hash_changes_with_measuring_packages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("cli/run.py", "sweep/jobs/node.py", "tracking/client.py", "report/tables.py")
    measuring = ("worker/train_loop.py", "cost_model/memory.py", "measure/allocator.cpp")
    monkeypatch.setattr(provenance, "SOURCES", tmp_path)
    for name in (*others, *measuring):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    for name in (*others, *measuring):
        before = versions.__wrapped__()["code"]
        (tmp_path / name).write_text("changed")
        assert (versions.__wrapped__()["code"] != before) == (name in measuring), name
    assert git_commit.__wrapped__() is None


def test_git_commit_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "harness" / "provenance.py"
    source.parent.mkdir()
    (source.parent / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "SOURCES", source.parent)

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.check_output(["git", "-C", str(tmp_path), *identity, *arguments], text=True).strip()

    git("init", "-q")
    assert git_commit.__wrapped__() is None  # nothing of it is in the repository yet
    git("add", ".")
    git("commit", "-q", "-m", "first")
    for text, is_dirty in (("", False), ("changed", True)):
        (source.parent / "__init__.py").write_text(text)
        assert git_commit.__wrapped__() == {"commit": git("rev-parse", "HEAD"), "dirty": is_dirty}


def test_stale_reason_names_the_versions_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    now: dict[str, str | None] = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": None, "code": "abc"}
    monkeypatch.setattr(provenance, "versions", lambda: now)
    assert version_differences(Record.from_json({"row": {}, "versions": dict(now)})) == []
    assert version_differences(Record({}, versions=now | {"torch": "2.12.0", "deepspeed": "0.19.8"})) == [
        "torch 2.12.0 → 2.13.0"
    ]
    assert version_differences(Record({}))[-1] == "code unknown → abc"
