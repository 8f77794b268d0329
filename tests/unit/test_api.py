"""The API of `import harness`: recorded runs as a typed table, and the memory that a run would need."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

import harness
from harness.records.store import read_all, rows_of, write_record, write_runs_csv
from tests.support.example_records import record_of, row
from tests.support.processes import ROOT, run_python


def write_runs(folder: Path) -> None:
    for number, (name, engine, stage) in enumerate((("ddp", "torch", 0), ("zero3", "deepspeed", 3))):
        record = record_of(row(number, name, engine, stage))
        write_record(folder / record.run_id, record)


def test_recorded_runs_load_as_a_typed_table(tmp_path: Path) -> None:
    write_runs(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text("{")
    table = harness.load(tmp_path)
    assert sorted(table["strategy"]) == ["ddp", "zero3"]
    types = table.dtypes.astype(str)
    assert (types["strategy"], types["world_size"], types["step_seconds"]) == ("string", "Int64", "Float64")
    assert types["offload_activations"] == "boolean" and types["peak_reserved_bytes"] == "Int64"
    assert table["predicted_step_seconds"].isna().all()  # unknown values are NA, never zero
    assert len(table.attrs["problems"]) == 1 and "broken" in table.attrs["problems"][0]


def test_a_published_folder_loads_from_its_table(tmp_path: Path) -> None:
    write_runs(tmp_path)
    write_runs_csv(tmp_path, rows_of(read_all(tmp_path).records))
    published = tmp_path / "published"
    published.mkdir()
    shutil.copy(tmp_path / "runs.csv", published)
    table, recorded = (harness.load(folder).drop(columns="stale_reason") for folder in (published, tmp_path))
    pd.testing.assert_frame_equal(table, recorded)


def test_a_missing_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(harness.UserError, match="is not a directory"):
        harness.load(tmp_path / "nowhere")


def test_memory_is_estimated_for_another_cluster() -> None:
    cluster = ("model=7b", "cluster.device=cuda", "cluster.gpus_per_node=8")
    parts = [harness.estimate_memory(*cluster, f"strategy={name}") for name in ("ddp", "zero3")]
    assert all(isinstance(part, harness.MemoryEstimate) for part in parts)
    assert parts[1].parameter_bytes == pytest.approx(parts[0].parameter_bytes / 8, rel=1e-3)
    assert parts[1].peak_bytes < parts[0].peak_bytes


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("strategy=tp", "world_size=3"), "strategy.tp=3 does not divide model.num_attention_heads=4"),
        (("strategy=nope",), "strategy=nope is not known: choose"),
        (("train.steps=0",), "train.steps=0 is not a positive whole number"),
    ],
)
def test_an_impossible_configuration_is_a_user_error_of_one_line(overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(harness.UserError, match=problem) as error:
        harness.estimate_memory(*overrides)
    assert "\n" not in str(error.value)


def test_importing_loads_nothing_heavy_and_estimating_memory_no_torch() -> None:
    heavy = ("torch", "hydra", "pandas")
    code = (
        "import json, sys, harness\n"
        f"print(json.dumps([name for name in {heavy} if name in sys.modules]))\n"
        "harness.estimate_memory('strategy=fsdp_full_shard', 'world_size=8')\n"
        "print(json.dumps('torch' in sys.modules))\n"
    )
    assert [json.loads(line) for line in run_python(ROOT, "-c", code).stdout.splitlines()] == [[], False]


def test_dir_lists_the_api_and_other_names_raise_attribute_error() -> None:
    assert {"load", "estimate_memory", "RunConfig", "Layout"} <= set(dir(harness))
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = harness.train  # type: ignore[attr-defined]
