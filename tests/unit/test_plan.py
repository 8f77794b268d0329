"""harness plan: its rows, its formats, its refusals, and rows that are never taken for measurements."""

import dataclasses
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.config.locations import files_in
from harness.config.stack import load_stack
from harness.config.strategy import StrategyConfig
from harness.cost_model.memory import WORKSPACE_BYTES
from harness.layout.layout import resolve_layout
from harness.layout.partition import split_into_stages
from harness.planner.plan import plans
from harness.planner.row import PLAN_COLUMNS
from harness.planner.space import predict
from harness.records.schema import COLUMNS
from harness.records.store import read_record, read_runs_csv
from harness.util.text import UserError
from tests.support.commands import ROOT
from tests.support.models import run, shaped
from tests.support.planned import cluster_of_eight
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
  fitted: {matmul_efficiency: 0.8, attention_efficiency: 0.6, cudnn_attention_efficiency: 0.6,
    attention_backward_ratio: 2.5, memory_efficiency: 0.8,
    kernel_seconds: 3.0e-6, launch_seconds: 5.0e-6, intra_node_efficiency: 0.8, intra_node_latency: 2.0e-6,
    inter_node_efficiency: 0.8, inter_node_latency: 1.0e-5, overlap_slowdown: 0.1}
"""

LLAMA = {"model_type": "llama", "vocab_size": 32000}
SIZES_OF_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
SMALL = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 5504}

# Files of the folder in which every command is typed: clusters, and models with and without a plan.
FILES = {
    "conf/cluster/eight.yaml": HARDWARE,
    "conf/cluster/bare.yaml": "name: bare\ngpus_per_node: 8\n",
    "conf/cluster/broken.yaml": 'name: "a: b\n',
    "own_7b/config.json": json.dumps(LLAMA | SIZES_OF_7B | {"max_position_embeddings": 4096}),
    "sizeless/config.json": json.dumps({"model_type": "llama"}),
    "list/config.json": "[1]",
    "sweeps/mine.yaml": "# @package _global_\nname: mine\ntrain: {global_batch: 16}\nhydra:\n  mode: MULTIRUN\n"
    "  sweeper:\n    params:\n      strategy: ddp,tp\n      checkpointing: none,full\n      world_size: 8,12\n",
}


@pytest.fixture(autouse=True)
def files_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that has these files."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)


Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *words: str) -> str:
    """Return what a plan prints."""
    assert main(["plan", "plan.simulate=false", *words]) == 0
    return capsys.readouterr().out


def planned(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    """Return the rows of a plan, which are all that is on standard output."""
    return json.loads(printed(capsys, "format=json", *words))


def parts(row: dict[str, Any], pattern: str) -> list[float]:
    """Return the cells of all columns whose names match."""
    return [value for name, value in row.items() if re.fullmatch(pattern, name)]


MIXED_7B = ("model=7b", "cluster=eight", "precision=bf16_mixed")


def test_a_row_has_the_columns_of_runs_and_no_measurement(capsys: Capture) -> None:
    settings = ("model=7b", "cluster=eight", "cluster.nodes=2", "strategy=fsdp_full_shard", "train.global_batch=64")
    (row,) = planned(capsys, *settings)
    expected = {"launch": "planned", "status": None, "measured_on": None, "world_size": 16, "dp_shard": 16}
    expected |= {"parameters": 6_738_415_616, "parameter_bytes": 4 * 6_738_415_616 // 16}
    assert {name: row[name] for name in expected} == expected
    tokens = 64 * 4096 / row["predicted_step_seconds"]
    assert row["tokens_per_second"] == pytest.approx(tokens)
    assert row["cost_per_billion_tokens"] == pytest.approx(2.0 * 16 / 3600 * 1e9 / tokens)


@pytest.mark.parametrize("words", ["strategy=fsdp_full_shard cluster.nodes=2", "strategy=3d stack=megatron"])
def test_parts_add_up(words: str, capsys: Capture) -> None:
    """Of memory, of time and of communication."""
    (row,) = planned(capsys, *MIXED_7B, *words.split())
    assert sum(parts(row, "at_peak_.+")) == row["predicted_peak_bytes"] <= row["peak_reserved_bytes"]
    seconds = parts(row, "(forward|backward|optimizer|exposed_communication|exposed_copy|idle|other)_seconds")
    assert len(seconds) == 7 and sum(seconds) == pytest.approx(row["predicted_step_seconds"])
    exposed, sent = parts(row, "exposed_(tp|cp|pp|dp_[a-z]+)_seconds"), parts(row, "communication_.+_bytes")
    assert len(exposed) == 5 and sum(exposed) == pytest.approx(row["exposed_communication_seconds"])
    assert len(sent) >= 2 and sum(sent) == pytest.approx(row["communication_bytes"], abs=3)
    assert row["peak_phase"] in ("forward", "backward", "optimizer") and row["peak_rank"] in (0, 4)


@pytest.mark.parametrize(("engine", "among_all"), [("zero3", 1), ("fsdp_full_shard", 8)])
def test_secondary_shards_leave_gathers_between_nodes_to_forward(engine: str, among_all: int, capsys: Capture) -> None:
    """ZeRO++ (arXiv 2306.10209, section 3.2): backward gathers within a node; DeepSpeed's shards last for the step."""
    nodes = ("cluster.nodes=2", "train.global_batch=128", "train.micro_batch=1", "checkpointing=none")
    (row,) = planned(capsys, *MIXED_7B, *nodes, f"strategy={engine}", "strategy.secondary_shards=8")
    gathered = 2 * row["parameters"]  # bytes, in 16 bits
    within, sent = row["secondary_bytes"], row["communication_dp_shard_gather_bytes"]
    assert sent - within == pytest.approx(among_all * gathered * 15 / 16, rel=2e-3)
    assert within == pytest.approx((2 * 8 - among_all) * gathered * 7 / 8, rel=2e-3)


def test_zero_plus_plus_sends_a_quarter_between_nodes(capsys: Capture) -> None:
    """Of 3 M in 16 bits 0.75 M are left: 0.5 M gathered and 0.25 M exchanged (arXiv 2306.10209, table 1)."""
    many = ("cluster.nodes=32", "train.global_batch=256", "train.micro_batch=1", "checkpointing=none", "precision=bf16")
    stage_3, quantized = (
        planned(capsys, "model=7b", "cluster=eight", *many, f"strategy={strategy}")[0]
        for strategy in ("zero3", "zero3_plus_plus")
    )
    of_node = 2 * stage_3["parameters"] / 8  # bytes, for each device
    assert stage_3["between_nodes_bytes"] == pytest.approx(3 * of_node, rel=0.02)
    assert quantized["between_nodes_bytes"] == pytest.approx(0.75 * of_node, rel=0.02)
    assert quantized["exposed_dp_shard_seconds"] < stage_3["exposed_dp_shard_seconds"]
    gathered = quantized["communication_dp_shard_gather_bytes"] / (stage_3["parameters"] * (255 / 256 + 7 / 8))
    assert 1 + 4 / 8000 <= gathered < 1.001, "an integer of 8 bits, and an fp32 scale for each block of 8,000 at most"


def test_every_column_is_of_runs_or_described(capsys: Capture) -> None:
    """Names with AXIS and OPERATION stand for several; all others are columns of runs.csv or of the guide's table."""
    words = ("parameter", "gradient", "optimizer", "activation", "communication", "temporary")
    known = {*COLUMNS, *(f"at_peak_{word}_bytes" for word in words)}
    pattern = re.compile("|".join(re.sub("[A-Z]+", "[a-z_]+", name) for name in PLAN_COLUMNS))
    rows = planned(capsys, "-m", "model=7b", "cluster=eight", "strategy=fsdp_tp,pp_1f1b,zero3")
    assert [name for row in rows for name in row.keys() - known if not pattern.fullmatch(name)] == []
    guide = (ROOT / "docs" / "guides" / "planning.md").read_text()
    assert [name for name, meaning in PLAN_COLUMNS.items() if f"| `{name}` | {meaning} |" not in guide] == []


@pytest.mark.parametrize(("share", "verdict"), [(2.0, "likely"), (1.0, "tight"), (0.5, "no")])
def test_whether_it_fits_follows_from_the_interval(share: float, verdict: str, tmp_path: Path, capsys: Capture) -> None:
    settings = (*MIXED_7B, "strategy=fsdp_full_shard")
    (row,) = planned(capsys, *settings)
    memory = int(share * row["predicted_peak_bytes"] + row["process_bytes"])
    (tmp_path / "conf/cluster/eight.yaml").write_text(HARDWARE.replace("80GB\n", f"{memory}\n"))
    (row,) = planned(capsys, *settings)
    available = row["memory_limit_bytes"] - row["process_bytes"]
    low, high = row["predicted_peak_low_bytes"], row["predicted_peak_high_bytes"]
    assert (row["fits"], low > available, high <= available) == (verdict, verdict == "no", verdict == "likely")
    assert low < row["predicted_peak_bytes"] < high


def test_the_rank_and_the_phase_are_those_of_the_peak() -> None:
    """The last stage has head and loss; state that is as large as activations are small peaks in the optimizer."""
    config = run(shaped(num_hidden_layers=4, vocab_size=64000), global_batch=8)
    layout = resolve_layout(StrategyConfig(name="pipeline", pp=4, schedule="1f1b"), 4)
    prediction = predict(config, layout, cluster_of_eight(), load_stack("harness"))
    assert (prediction.memory.rank, prediction.memory.phase) == (3, "backward")
    highest = max(
        estimate_rank_memory(config, prediction.layout, prediction.widths, "cuda", rank, [stage]).peak_bytes
        for rank, stage in enumerate(split_into_stages(config.model, prediction.layout))
    )
    assert prediction.memory.peak_bytes == highest + WORKSPACE_BYTES
    slow = run(shaped(vocab_size=256, hidden_size=1024, intermediate_size=4096), global_batch=1, seq_len=2)
    slow = dataclasses.replace(slow, train=dataclasses.replace(slow.train, fused_optimizer=False))
    single = resolve_layout(StrategyConfig(name="single"), 1)
    assert predict(slow, single, cluster_of_eight(), load_stack("harness")).memory.phase == "optimizer"


def test_a_sweep_file_is_expanded_and_its_impossible_combinations_are_shown(capsys: Capture) -> None:
    settings = ("sweeps=mine", "model=1b", "cluster=eight")
    rows = planned(capsys, *settings)
    named = [(row["launch"], row["status"], row["strategy"], row["checkpointing"]) for row in rows]
    kinds = itertools.product(("ddp", "tp"), ("none", "full"))
    assert named == [("planned", None, *kind) for kind in kinds for _ in ("8", "12")]
    refused = [row for row in rows if "reason" in row]
    assert [row["world_size"] for row in refused] == ["12"] * 4
    assert all("choose" in row["reason"] and "fits" not in row for row in refused)
    assert [row["global_batch"] for row in rows if "reason" not in row] == [16] * 4
    assert len(planned(capsys, *settings, "strategy=zero3", "world_size=8")) == 2  # the command line's own come first
    assert "\nrefused: world_size=12 strategy=tp checkpointing=full: " in printed(capsys, *settings, "world_size=8,12")


@pytest.mark.parametrize(
    ("nodes", "batch", "said"), [(2, 48, "as in a run"), (16, 128, "one sequence for each device")]
)
def test_what_an_automatic_batch_became_is_said(nodes: int, batch: int, said: str, capsys: Capture) -> None:
    settings = ["model=7b", "cluster=eight", f"cluster.nodes={nodes}", "strategy=zero3"]
    note = f"train.global_batch=auto became {batch}, {said}"
    assert note in printed(capsys, *settings)
    assert main(["plan", "format=json", *settings]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)[0]["global_batch"] == batch and note in output.err
    assert "auto" not in printed(capsys, *settings, "train.global_batch=256")


def test_offload_costs_the_copies_over_the_link_to_the_host(tmp_path: Path, capsys: Capture) -> None:
    settings = (*MIXED_7B, "train.global_batch=8", "strategy=zero_offload")
    (free,) = planned(capsys, *settings)
    assert "copies of offload are counted as free" in printed(capsys, *settings)
    linked = HARDWARE.replace("  sources", "  host_bandwidth: 1.0e+10\n  sources")
    (tmp_path / "conf/cluster/eight.yaml").write_text(linked)
    (plain,), (offloaded,) = planned(capsys, *settings, "strategy.offload=none"), planned(capsys, *settings)
    copied = 6_738_415_616 / 8 * (4 + 2)  # fp32 gradients, bf16 parameters
    assert offloaded["exposed_copy_seconds"] == pytest.approx(copied / (1e10 * 256 / 280))
    assert plain["exposed_copy_seconds"] == free["exposed_copy_seconds"] == 0
    assert offloaded["optimizer_seconds"] / plain["optimizer_seconds"] == pytest.approx(3.35e12 / 1e10)
    assert offloaded["predicted_peak_bytes"] < plain["predicted_peak_bytes"]


def test_a_divided_loss_runs_its_head_twice(capsys: Capture) -> None:
    """Two simulated layers of 8b took 1.22 and 1.61 times as long with 4 and 16 parts, which also add up gradients."""
    layers = ("model=8b", "model.num_hidden_layers=2", "cluster=8xh100", "train.seq_len=4096", "train.global_batch=8")
    parts = ("strategy=fsdp_full_shard", "-m", "train.loss_chunks=1,4,16")
    whole, *divided = (row["predicted_step_seconds"] for row in planned(capsys, *layers, *parts))
    assert [seconds / whole for seconds in divided] == pytest.approx([1.22, 1.61], rel=0.12)


def test_what_is_on_the_host_must_fit_there(tmp_path: Path, capsys: Capture) -> None:
    """Eight devices share the host; a search finds no layout that needs more of it than its eighth.

    torch rounds pinned memory up to powers of two: a plan is sure only where twice as much is there.
    """
    search = (*MIXED_7B, "checkpointing=full")
    settings = (*search, "strategy=zero_offload")
    (row,) = planned(capsys, *settings)
    needed = row["host_bytes"]
    assert row["fits"] == "likely"  # the host's memory is unknown, and so not checked
    for room, fits in (
        (16 * needed, "likely"),
        (16 * needed - 8, "tight"),
        (8 * needed, "tight"),
        (8 * needed - 8, "no"),
    ):
        memory = f"  host_bandwidth: 1.0e+10\n  host_memory: {room}\n"
        (tmp_path / "conf/cluster/eight.yaml").write_text(HARDWARE.replace("  sources", f"{memory}  sources"))
        (row,) = planned(capsys, *settings)
        assert (row["fits"], row["host_bytes"]) == (fits, needed)
        assert (" of the host's memory for each device; " in printed(capsys, *settings)) is (fits == "no")
        assert all(found["host_bytes"] <= room / 8 for found in planned(capsys, *search, "strategy.offload=optimizer"))


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("plan model=7b", "cluster=local has no cluster.hardware"),
        ("plan model=7b cluster=bare", "cluster=bare has no cluster.hardware"),
        ("plan model=7b cluster=eight strategy=3d world_size=7", "world_size=7 is not divisible"),
        ("plan model=7b cluster=eight train.global_batch=7 strategy=ddp", "train.global_batch=7"),
        ("plan model=7b cluster=eight world_size=16 strategy=ddp train.global_batch=64", "world_size=16"),
        ("plan model=7b cluster=eight world_size=11 train.global_batch=7", "world_size=11"),
        ("plan model=7b cluster=eight stack=none", "stack=none"),
        ("plan model=7b cluster=eight strategy=zero3 stack=megatron", "stack=megatron"),
        ("plan model=7b cluster=broken", "broken.yaml"),
        ("plan --report plan.html model=1b cluster=eight strategy=ddp", "--report="),
        ("plan sweeps=mine model=1b cluster=eight world_size=12", "none of the other 3 combinations has a plan"),
        ("plan model=hf model.path=sizeless cluster=eight", "model: it has no hidden_size, num_hidden_layers,"),
        ("plan model=hf model.path=list cluster=eight", "no readable config.json of a causal language model"),
        ("cluster=broken", "broken.yaml"),
        ("strategy=search", "harness plan"),  # a run of every strategy
        ("cluster=eight strategy=ddp", "harness plan"),  # a run on another machine
    ],
)
def test_what_has_no_plan_is_refused_in_one_line(typed: str, problem: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(shlex.split(typed)) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1) and problem in output.err
    assert not (tmp_path / "plan.html").exists()


def test_planned_rows_are_no_measurements(tmp_path: Path, capsys: Capture) -> None:
    """A report, a diff and the reuse of runs read records and tables by these two functions alone."""
    (tmp_path / "runs.csv").write_text(printed(capsys, "format=csv", "model=1b", "cluster=eight", "strategy=zero3"))
    with pytest.raises(UserError, match="planned"):
        read_runs_csv(tmp_path / "runs.csv")
    example = next((ROOT / "tests" / "data" / "schema_1").rglob("record.json"))
    assert read_record(example.parent).row["launch"] == "processes"
    record = json.loads(example.read_text())
    record["row"]["launch"] = "planned"
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="is a plan, and runs are compared with runs alone"):
        read_record(tmp_path)


def test_a_config_json_of_llama_is_planned_as_the_same_model(capsys: Capture) -> None:
    own = ("model=hf", "model.path=own_7b", "cluster=eight")
    text = " ".join(printed(capsys, *own, "train.micro_batch=1", "checkpointing=full").split())
    assert "These plans are of this project's own layers" in text and "Measure it" not in text and "Export it" in text
    rows = planned(capsys, *own, "strategy=zero3") + planned(capsys, "model=7b", "cluster=eight", "strategy=zero3")
    names = ("parameters", "predicted_peak_bytes", "predicted_step_seconds", "communication_bytes")
    assert len({tuple(row[name] for name in names) for row in rows}) == 1


def test_a_config_json_keeps_its_rates(tmp_path: Path) -> None:
    """A script that is exported builds the model with them; how positions are scaled is said to be left out."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0}
    rates = {"rms_norm_eps": 1e-6, "initializer_range": 0.01, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | SMALL | {"max_position_embeddings": 2048} | rates))
    (plan,) = plans([f"model={tmp_path}/", "cluster=eight", "strategy=zero3"])
    model = plan.predictions[0].config.model
    assert (model.rope_theta, model.rms_norm_eps, model.initializer_range) == (500000.0, 1e-6, 0.01)
    assert model.source == "its config.json without rope_scaling=llama3"


def test_every_stack_is_planned(capsys: Capture) -> None:
    """The stack is the file that its name chooses; implementations need different memory and time for one layout."""
    rows = planned(capsys, "-m", *MIXED_7B, "strategy=ddp", f"stack={','.join(files_in('stack'))}")
    assert [row["stack"] for row in rows] == list(files_in("stack"))
    figures = {row["stack"]: (row["predicted_peak_bytes"], row["predicted_step_seconds"]) for row in rows}
    assert len({figures[name] for name in ("harness", "megatron", "nanotron", "llm_foundry")}) == 4


def test_a_search_keeps_to_what_a_stack_has(capsys: Capture) -> None:
    rows = planned(capsys, "model=1b", "cluster=eight", "stack=megatron", "precision=bf16_mixed", "train.seq_len=2048")
    assert rows and {row["zero_stage"] for row in rows} <= {0, 1}
