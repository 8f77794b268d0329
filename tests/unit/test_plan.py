"""harness plan: its rows, its formats, its refusals, and rows that are never taken for measurements."""

import json
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.config.stack import stack_names
from harness.records.runs_csv import read_runs_csv
from harness.records.store import read_record
from harness.util.errors import UserError

HARDWARE = """
name: eight
gpus_per_node: 8
hardware:
  device_name: NVIDIA H100 80GB HBM3
  memory: 80GB
  memory_bandwidth: 3.35e+12
  intra_node_bandwidth: 450.0e+9
  inter_node_bandwidth: 50.0e+9
  sources: [a test]
  fitted_to: a test
  datasheet_only: true
  price_per_device_hour: 2.0
  fitted: {matmul_efficiency: 0.8, attention_efficiency: 0.6, attention_backward_ratio: 2.5, memory_efficiency: 0.8,
    kernel_seconds: 3.0e-6, launch_seconds: 5.0e-6, intra_node_efficiency: 0.8, intra_node_latency: 2.0e-6,
    inter_node_efficiency: 0.8, inter_node_latency: 1.0e-5, node_contention: 0.1, overlap_slowdown: 0.1}
"""


@pytest.fixture(autouse=True)
def cluster_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder whose conf/ has a cluster of eight devices a node."""
    folder = tmp_path / "conf" / "cluster"
    folder.mkdir(parents=True)
    (folder / "eight.yaml").write_text(HARDWARE)
    (folder / "bare.yaml").write_text("name: bare\ngpus_per_node: 8\n")
    monkeypatch.chdir(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[dict[str, object]]:
    """Return the rows of a plan, which are all that is on standard output."""
    assert main(["plan", "format=json", *overrides]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


def test_a_row_has_the_columns_of_runs_and_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = planned(
        capsys, "model=7b", "cluster=eight", "cluster.nodes=2", "strategy=fsdp_full_shard", "train.global_batch=64"
    )
    assert row["launch"] == "planned"
    assert row["status"] is None and row["measured_on"] is None
    assert (row["world_size"], row["dp_shard"], row["parameters"]) == (16, 16, 6_738_415_616)
    assert row["parameter_bytes"] == 4 * 6_738_415_616 // 16
    parts = [value for name, value in row.items() if name.startswith("at_peak_")]
    assert sum(map(int, map(str, parts))) == row["predicted_peak_bytes"]
    seconds = [
        float(str(row[f"{name}_seconds"]))
        for name in ("compute", "exposed_communication", "bubble", "optimizer", "other")
    ]
    assert sum(seconds) == pytest.approx(row["predicted_step_seconds"])
    tokens = 64 * 4096 / float(str(row["predicted_step_seconds"]))
    assert row["tokens_per_second"] == pytest.approx(tokens)
    assert row["cost_per_billion_tokens"] == pytest.approx(2.0 * 16 / 3600 * 1e9 / tokens)


def test_a_sweep_has_a_row_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, "-m", "model=1b,7b", "cluster=eight", "strategy=zero3,tp")
    expected = [(model, strategy) for model in ("1b", "7b") for strategy in ("zero3", "tp")]
    assert [(row["model"], row["strategy"]) for row in rows] == expected


def test_every_figure_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain", "model=7b", "cluster=eight", "strategy=zero3"]) == 0
    text = capsys.readouterr().out
    for name in ("predicted_peak_bytes", "predicted_step_seconds", "tokens_per_second", "mfu", "communication_bytes"):
        assert f"1: {name} = " in text
    assert "datasheet-only" in text


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model=7b"], "cluster=local has no cluster.hardware"),
        (["model=7b", "cluster=bare"], "cluster=bare has no cluster.hardware"),
        (["model=7b", "cluster=eight", "strategy=3d", "world_size=7"], "world_size=7 is not divisible"),
        (["model=7b", "cluster=eight", "train.global_batch=7", "strategy=ddp"], "train.global_batch=7"),
        (["model=7b", "cluster=eight", "world_size=16", "strategy=ddp", "train.global_batch=64"], "world_size=16"),
        (["model=7b", "cluster=eight", "world_size=11", "train.global_batch=7"], "world_size=11"),
        (["model=7b", "cluster=eight", "stack=none"], "stack=none"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], overrides: list[str], problem: str) -> None:
    assert main(["plan", *overrides]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert problem in output.err and output.err.count("\n") == 1


def test_a_run_of_every_strategy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategy=search"]) == 2
    assert "harness plan" in capsys.readouterr().err


def test_planned_rows_are_no_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report, a diff and the reuse of runs read records and tables by these two functions alone."""
    assert main(["plan", "format=csv", "model=1b", "cluster=eight", "strategy=zero3"]) == 0
    table = tmp_path / "runs.csv"
    table.write_text(capsys.readouterr().out)
    with pytest.raises(UserError, match="planned"):
        read_runs_csv(table)
    example = next((Path(__file__).parents[1] / "data" / "schema_1").rglob("record.json"))
    record = json.loads(example.read_text())
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "record.json").write_text(json.dumps(record))
    assert read_record(folder).row["launch"] == "processes"
    record["row"]["launch"] = "planned"
    (folder / "record.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="plan and no measurement"):
        read_record(folder)


def test_a_run_on_another_machine_offers_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster=eight", "strategy=ddp"]) == 2
    text = capsys.readouterr().err
    assert "harness plan" in text and text.count("\n") == 1


def test_a_config_json_of_llama_is_planned_as_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    rest = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(sizes | rest))
    (own,) = planned(capsys, "model=hf", f"model.path={tmp_path}", "cluster=eight", "strategy=zero3")
    (preset,) = planned(capsys, "model=7b", "cluster=eight", "strategy=zero3")
    names = ("parameters", "predicted_peak_bytes", "predicted_step_seconds", "communication_bytes")
    assert {name: own[name] for name in names} == {name: preset[name] for name in names}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert main(["plan", "model=hf", f"model.path={tmp_path}", "cluster=eight", "strategy=zero3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_search_has_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, settings = tmp_path / "plan.html", ("model=1b", "cluster=eight", "checkpointing=full", "train.micro_batch=1")
    assert main(["plan", "--report", str(page), *settings]) == 0
    text = page.read_text()
    assert "type=range" in text and "http" not in text
    front = json.loads(text.partition("id=front>")[2].partition("</script>")[0])
    assert len(front) == text.count("<circle") > 1
    assert [entry["gib"] for entry in front] == sorted((entry["gib"] for entry in front), reverse=True)
    assert front[-1]["text"].partition(",")[0] in text
    capsys.readouterr()
    assert main(["plan", "--report", str(page), "model=1b", "cluster=eight", "strategy=ddp"]) == 2


def test_every_stack_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """The stack is the file that its name chooses; implementations need different memory and time for one layout."""
    figures = {}
    for name in stack_names():
        (row,) = planned(capsys, "model=7b", "cluster=eight", "strategy=ddp", "precision=bf16_mixed", f"stack={name}")
        assert row["stack"] == name
        figures[name] = (row["predicted_peak_bytes"], row["predicted_step_seconds"])
    assert len({figures[name] for name in ("harness", "megatron", "nanotron", "llm_foundry")}) == 4


def test_what_a_stack_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=7b", "cluster=eight", "strategy=zero3", "stack=megatron"]) == 2
    assert "stack=megatron" in capsys.readouterr().err


def test_a_search_keeps_to_what_a_stack_has(capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, "model=1b", "cluster=eight", "stack=megatron", "precision=bf16_mixed", "train.seq_len=2048")
    assert rows and all(row["zero_stage"] in (0, 1) for row in rows)


@pytest.mark.parametrize("command", [["plan", "model=7b", "cluster=broken"], ["cluster=broken"]])
def test_a_file_that_is_no_yaml_is_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "cluster" / "broken.yaml").write_text('name: "a: b\n')
    assert main(command) == 2
    problem = capsys.readouterr().err
    assert problem.count("\n") == 1 and "broken.yaml" in problem
