"""harness plan: its rows, its formats, its refusals, and rows that are never taken for measurements."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from harness.cli.main import main
from harness.config.from_dict import from_dict
from harness.config.hardware import HardwareConfig
from harness.config.locations import files_in
from harness.config.stack import load_stack
from harness.config.strategy import StrategyConfig
from harness.cost_model.memory import WORKSPACE_BYTES
from harness.hardware.described_cluster import DescribedCluster
from harness.layout.layout import resolve_layout
from harness.layout.partition import split_into_stages
from harness.planner.problems import predict
from harness.planner.row import PLAN_COLUMNS
from harness.records.columns import COLUMN_NAMES
from harness.records.runs_csv import read_runs_csv
from harness.records.store import read_record
from harness.util.errors import UserError
from tests.support.models import run, shaped
from tests.support.rank_memory import estimate_rank_memory

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


HARDWARE_OF_TESTS: HardwareConfig = from_dict(HardwareConfig, yaml.safe_load(HARDWARE)["hardware"])


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
        for name in (*("forward", "backward", "optimizer", "exposed_communication", "exposed_copy", "idle", "other"),)
    ]
    assert sum(seconds) == pytest.approx(row["predicted_step_seconds"])
    tokens = 64 * 4096 / float(str(row["predicted_step_seconds"]))
    assert row["tokens_per_second"] == pytest.approx(tokens)
    assert row["cost_per_billion_tokens"] == pytest.approx(2.0 * 16 / 3600 * 1e9 / tokens)


def test_a_sweep_has_a_row_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, "-m", "model=1b,7b", "cluster=eight", "strategy=zero3,tp")
    expected = [(model, strategy) for model in ("1b", "7b") for strategy in ("zero3", "tp")]
    assert [(row["model"], row["strategy"]) for row in rows] == expected


def test_every_column_is_of_runs_or_described(capsys: pytest.CaptureFixture[str]) -> None:
    """Names with AXIS and OPERATION stand for several; all others are columns of runs.csv or of the guide's table."""
    at_peak = {f"at_peak_{word}_bytes" for word in ("parameter", "gradient", "optimizer", "activation")}
    at_peak |= {"at_peak_communication_bytes", "at_peak_temporary_bytes"}
    patterns = [re.compile(re.sub("[A-Z]+", "[a-z_]+", name)) for name in PLAN_COLUMNS]
    rows = planned(capsys, "-m", "model=7b", "cluster=eight", "strategy=fsdp_tp,pp_1f1b,zero3")
    for name in {name for row in rows for name in row} - set(COLUMN_NAMES) - at_peak:
        assert any(pattern.fullmatch(name) for pattern in patterns), name
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "planning.md").read_text()
    for name, meaning in PLAN_COLUMNS.items():
        assert f"| `{name}` | {meaning} |" in guide


def test_memory_and_communication_are_shown_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = planned(capsys, "model=7b", "cluster=eight", "strategy=3d", "stack=megatron", "precision=bf16_mixed")
    exposed = [value for name, value in row.items() if re.fullmatch("exposed_(tp|cp|pp|dp_[a-z]+)_seconds", name)]
    assert len(exposed) == 5
    assert sum(map(float, map(str, exposed))) == pytest.approx(row["exposed_communication_seconds"])
    sent = [value for name, value in row.items() if re.fullmatch("communication_.+_bytes", name)]
    assert len(sent) >= 3 and sum(map(int, map(str, sent))) == pytest.approx(row["communication_bytes"], abs=3)
    assert int(str(row["peak_reserved_bytes"])) >= int(str(row["predicted_peak_bytes"]))
    assert row["peak_phase"] in ("forward", "backward", "optimizer") and row["peak_rank"] in (0, 4)


@pytest.mark.parametrize(("share", "verdict"), [(2.0, "likely"), (1.0, "tight"), (0.5, "no")])
def test_whether_it_fits_follows_from_the_interval(
    share: float, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("model=7b", "cluster=eight", "strategy=fsdp_full_shard", "precision=bf16_mixed")
    (row,) = planned(capsys, *settings)
    memory = int(share * int(str(row["predicted_peak_bytes"])) + int(str(row["process_bytes"])))
    (tmp_path / "conf" / "cluster" / "eight.yaml").write_text(HARDWARE.replace("80GB\n", f"{memory}\n"))
    (row,) = planned(capsys, *settings)
    assert row["fits"] == verdict
    available = int(str(row["memory_limit_bytes"])) - int(str(row["process_bytes"]))
    low, high = int(str(row["predicted_peak_low_bytes"])), int(str(row["predicted_peak_high_bytes"]))
    assert verdict == ("no" if low > available else "likely" if high <= available else "tight")
    assert low < int(str(row["predicted_peak_bytes"])) < high


def test_the_rank_and_the_phase_are_those_of_the_peak() -> None:
    """The last stage has head and loss; state that is as large as activations are small peaks in the optimizer."""
    config = run(shaped(num_hidden_layers=4, vocab_size=64000), global_batch=8)
    strategy = StrategyConfig(name="pipeline", pp=4, schedule="1f1b")
    eight = DescribedCluster("eight", 1, 8, HARDWARE_OF_TESTS, "cuda")
    prediction = predict(config, resolve_layout(strategy, 4), eight, load_stack("harness"))
    assert prediction.memory.rank == 3
    highest = max(
        estimate_rank_memory(config, prediction.layout, prediction.widths, "cuda", rank, [stage]).peak_bytes
        for rank, stage in enumerate(split_into_stages(config.model, prediction.layout))
    )
    assert prediction.memory.peak_bytes == highest + WORKSPACE_BYTES
    slow = run(shaped(vocab_size=256, hidden_size=1024, intermediate_size=4096), global_batch=1)
    slow = dataclasses.replace(slow, train=dataclasses.replace(slow.train, seq_len=2, fused_optimizer=False))
    single = predict(slow, resolve_layout(StrategyConfig(name="single"), 1), eight, load_stack("harness"))
    assert single.memory.phase == "optimizer"
    assert prediction.memory.phase == "backward"


def test_a_sweep_file_is_expanded_and_its_impossible_combinations_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweeps").mkdir()
    text = "# @package _global_\nname: mine\ntrain: {global_batch: 16}\nhydra:\n  mode: MULTIRUN\n  sweeper:\n"
    (tmp_path / "sweeps" / "mine.yaml").write_text(
        text + "    params:\n      strategy: ddp,tp\n      checkpointing: none,full\n      world_size: 8,12\n"
    )
    settings = ("sweeps=mine", "model=1b", "cluster=eight")
    rows = planned(capsys, *settings)
    assert len(rows) == 8 and all(row["launch"] == "planned" and row["status"] is None for row in rows)
    refused = [row for row in rows if "reason" in row]
    assert [row["world_size"] for row in refused] == ["12"] * 4
    assert all("choose" in str(row["reason"]) and "fits" not in row for row in refused)
    assert [row["global_batch"] for row in rows if "reason" not in row] == [16] * 4
    assert len(planned(capsys, *settings, "strategy=zero3", "world_size=8")) == 2  # the command line's own come first
    assert main(["plan", *settings, "world_size=8,12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("refused: world_size=12 strategy=tp checkpointing=full: ")]
    assert main(["plan", *settings, "world_size=12"]) == 2
    error = capsys.readouterr().err
    assert "none of the other 3 combinations has a plan" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("nodes", "batch", "said"), [(2, 48, "as in a run"), (16, 128, "one sequence for each device")]
)
def test_what_an_automatic_batch_became_is_said(
    nodes: int, batch: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model=7b", "cluster=eight", f"cluster.nodes={nodes}", "strategy=zero3"]
    assert main(["plan", *settings]) == 0
    note = f"train.global_batch=auto became {batch}, {said}"
    assert note in capsys.readouterr().out
    assert main(["plan", "format=json", *settings]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)[0]["global_batch"] == batch and note in output.err
    assert main(["plan", *settings, "train.global_batch=256"]) == 0
    assert "auto" not in capsys.readouterr().out


def test_offload_costs_the_copies_over_the_link_to_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("model=7b", "precision=bf16_mixed", "train.global_batch=8", "strategy=zero_offload")
    linked = HARDWARE.replace("name: eight", "name: linked").replace(
        "  sources", "  host_bandwidth: 1.0e+10\n  sources"
    )
    (tmp_path / "conf" / "cluster" / "linked.yaml").write_text(linked)
    (plain,) = planned(capsys, *settings, "cluster=linked", "strategy.offload=none")
    (offloaded,) = planned(capsys, *settings, "cluster=linked")
    (free,) = planned(capsys, *settings, "cluster=eight")
    shard = 6_738_415_616 / 8
    assert offloaded["exposed_copy_seconds"] == pytest.approx(
        shard * (4 + 2) / (1e10 * 256 / 280)
    )  # fp32 gradients, bf16 parameters
    assert plain["exposed_copy_seconds"] == free["exposed_copy_seconds"] == 0
    ratio = float(str(offloaded["optimizer_seconds"])) / float(str(plain["optimizer_seconds"]))
    assert ratio == pytest.approx(3.35e12 / 1e10)
    assert int(str(offloaded["predicted_peak_bytes"])) < int(str(plain["predicted_peak_bytes"]))
    assert main(["plan", *settings, "cluster=eight"]) == 0
    assert "copies of offload are counted as free" in capsys.readouterr().out


def test_what_is_on_the_host_must_fit_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight devices share the host; a search finds no layout that needs more of it than its eighth."""
    settings = ("model=7b", "strategy=zero_offload", "precision=bf16_mixed", "checkpointing=full", "cluster=eight")
    search = (*settings[:1], *settings[2:], "strategy.offload=optimizer")
    (needed,) = {int(str(row["host_bytes"])) for row in planned(capsys, *settings)}
    path = tmp_path / "conf" / "cluster" / "eight.yaml"
    for room, fits in ((8 * needed, True), (8 * needed - 8, False)):
        memory = f"  host_bandwidth: 1.0e+10\n  host_memory: {room}\n"
        path.write_text(HARDWARE.replace("  sources", f"{memory}  sources"))
        (row,) = planned(capsys, *settings)
        assert (row["fits"] != "no") is fits and row["host_bytes"] == needed
        assert main(["plan", *settings]) == 0
        assert (" of its host's memory.\n" in capsys.readouterr().out) is not fits
        assert all(int(str(found["host_bytes"])) <= room / 8 for found in planned(capsys, *search))
    path.write_text(HARDWARE)  # unknown, and so not checked
    (row,) = planned(capsys, *settings)
    assert row["fits"] != "no"


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
    assert main(["plan", "model=hf", f"model.path={tmp_path}", "cluster=eight"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "plans of this project's own layers" in text and "Run the fastest with" not in text
    (preset,) = planned(capsys, "model=7b", "cluster=eight", "strategy=zero3")
    names = ("parameters", "predicted_peak_bytes", "predicted_step_seconds", "communication_bytes")
    assert {name: own[name] for name in names} == {name: preset[name] for name in names}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts=8: mixtures of experts"),
        ({"model_type": "llama"}, "no readable config.json of a causal language model"),
        ([1], "no readable config.json of a causal language model"),
    ],
)
def test_a_config_json_without_a_plan_is_one_line(
    config: object, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "model=hf", f"model.path={tmp_path}", "cluster=eight", "strategy=zero3"]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_a_model_of_the_local_hub_cache_is_planned_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 5504}
    folder = tmp_path / "hub" / "models--someone--small" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    rest = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(sizes | rest))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    (row,) = planned(capsys, "model=hf", "model.path=someone/small", "cluster=eight", "strategy=zero3")
    layer = 4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048
    assert (row["model"], row["parameters"]) == ("small", 2 * 32000 * 2048 + 4 * layer + 2048)
    assert main(["plan", "model=hf", "model.path=someone/other", "cluster=eight", "strategy=zero3"]) == 2
    assert "nothing is downloaded" in capsys.readouterr().err


def test_a_page_is_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "--report", str(page), "model=1b", "cluster=eight", "strategy=ddp"]) == 2
    assert "--report=" in capsys.readouterr().err and not page.exists()


def test_every_stack_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """The stack is the file that its name chooses; implementations need different memory and time for one layout."""
    figures = {}
    for name in files_in("stack"):
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
