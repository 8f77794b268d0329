"""Tensor and pipeline parallelism: the rows of every strategy, compared with the papers' arithmetic."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from harness.config.command import read_run_config
from harness.config.schema import RunConfig
from harness.cost_model.pipeline import bubble_ratio, max_in_flight_micro_batches
from harness.layout.layout import Layout, resolve_layout
from harness.records.rank_report import RankReport
from tests.support import faults
from tests.support.combinations import (
    CHECKPOINTING,
    MODEL_PARALLEL,
    PIPELINE,
    PIPELINE_SIZE,
    PIPELINES,
    SEQ_LEN,
    SEQUENCES,
    TENSOR,
    TENSOR_SIZE,
    VOCABULARY,
)
from tests.support.commands import compose, execute_run, run_folder

WORLDS = tuple(CHECKPOINTING)

STAGES = [(world, strategy) for world in WORLDS for strategy in PIPELINES[world]]


@pytest.fixture(scope="module")
def records(results: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return every record by strategy, checkpointing and world size, with its rank reports added."""
    records = {}
    for record in (combination.record(results) for combination in MODEL_PARALLEL):
        key = tuple(record.row[name] for name in ("strategy", "checkpointing", "world_size"))
        reports = run_folder(results, record).read_rank_reports(record.row["world_size"])
        records[key] = record.to_json() | {"rank_files": reports}
    return records


def config_of(record: dict[str, Any]) -> tuple[RunConfig, Layout]:
    config = read_run_config(record["config"])
    return config, resolve_layout(config.strategy, record["row"]["world_size"])


def sent(rank: RankReport, *operations: str) -> float:
    return sum(traffic.bytes_sent for traffic in rank.profiled.communication if traffic.operation in operations)


@pytest.mark.parametrize(("world", "strategy"), list(itertools.product(WORLDS, TENSOR)))
def test_tensor_parallel_sends_two_sums_a_layer_each_way(
    records: dict[tuple[str, str, int], dict[str, Any]], world: int, strategy: str
) -> None:
    """Megatron-LM sends 4 all-reduces of batch x sequence x hidden a layer, and one each for embedding and head."""
    record = records[strategy, "none", world]
    hidden = SEQUENCES * SEQ_LEN * record["config"]["model"]["hidden_size"] * 4
    formula = 2 * (world - 1) / world * TENSOR_SIZE.micro_batches * (4 * TENSOR_SIZE.layers + 2) * hidden
    for rank in record["rank_files"]:
        assert sent(rank, "all_reduce", "all_gather", "reduce_scatter") == pytest.approx(formula, rel=0.05)
        if strategy == "tp_sp":
            assert sent(rank, "all_gather") == sent(rank, "reduce_scatter") == pytest.approx(formula / 2, rel=1e-6)


@pytest.mark.parametrize(("world", "strategy"), STAGES)
def test_a_pipeline_sends_boundary_activations_and_their_gradients(
    records: dict[tuple[str, str, int], dict[str, Any]], world: int, strategy: str
) -> None:
    """A pipeline sends 2 x micro-batches x boundary activations, summed over all ranks and boundaries."""
    record = records[strategy, "none", world]
    config, layout = config_of(record)
    boundary = SEQUENCES * SEQ_LEN * config.model.hidden_size * 4
    total = sum(sent(rank, "send") for rank in record["rank_files"])
    assert total == 2 * PIPELINE_SIZE.micro_batches * boundary * (layout.num_stages - 1)
    assert all(sent(rank, "all_reduce") < 100 for rank in record["rank_files"])


@pytest.mark.parametrize(("world", "checkpointing"), [(2, "none"), (2, "full"), (4, "none")])
def test_micro_batches_in_flight_show_in_the_activations(
    records: dict[tuple[str, str, int], dict[str, Any]], world: int, checkpointing: str
) -> None:
    """GPipe keeps all micro-batches on every stage, while 1F1B keeps as many as there are stages from this one on."""
    for stage in range(world):
        saved = {}
        for strategy in PIPELINES[world]:
            record = records[strategy, checkpointing, world]
            profiled = record["rank_files"][stage].profiled
            _, layout = config_of(record)
            in_flight = max_in_flight_micro_batches(layout, PIPELINE_SIZE.micro_batches, stage)
            assert profiled.max_in_flight_micro_batches == in_flight, (strategy, stage)
            assert strategy != "pp_gpipe" or in_flight == PIPELINE_SIZE.micro_batches
            saved[strategy] = profiled.activation_bytes
        if checkpointing == "none":
            ratio = min(PIPELINE_SIZE.micro_batches, world - stage) / PIPELINE_SIZE.micro_batches
            assert saved["pp_1f1b"] == pytest.approx(saved["pp_gpipe"] * ratio, rel=0.02)


@pytest.mark.parametrize("world", WORLDS)
def test_tensor_parallel_divides_the_activations_between_its_matrices(
    records: dict[tuple[str, str, int], dict[str, Any]], world: int
) -> None:
    """Korthikanti et al. leave 10 of 34 sbh whole and divide 24; in this block the norms' activations stay whole.

    In fp32 a layer's two norms keep input, normalized input and output, h each, and a reciprocal root; attention keeps
    query, key, value, output (4h: as many key-value heads as others) and a sum a head; SwiGLU keeps four times its
    width. The loss keeps a logit a word.
    """
    activations = {
        strategy: records[strategy, "none", worlds]["rank_files"][0].profiled.activation_bytes
        for strategy, worlds in {"single": 1, "tp": world, "tp_sp": world}.items()
    }
    model = records["single", "none", 1]["config"]["model"]
    hidden, inner, heads = (model[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    token, layers = 4 * SEQUENCES * SEQ_LEN, TENSOR_SIZE.layers
    divided = token * (layers * (4 * hidden + heads + 4 * inner) + VOCABULARY)
    saved = (1 - 1 / world) * divided
    assert activations["single"] - activations["tp"] == pytest.approx(saved, rel=0.05)
    along_the_sequence = token * (2 * layers + 1) * (2 * hidden + 1)  # the norms' outputs are gathered, and kept so
    saved += (1 - 1 / world) * along_the_sequence
    assert activations["single"] - activations["tp_sp"] == pytest.approx(saved, rel=0.05)


def test_the_bubble_is_recorded_beside_its_formula(records: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    for (strategy, _, world), record in records.items():
        row, entries = record["row"], record["pipeline"]
        if strategy not in PIPELINE:
            assert row.get("pipeline_bubble") is None and entries == []
            continue
        _, layout = config_of(record)
        virtual = 2 if strategy == "pp_interleaved" else 1
        formula = (world - 1) / (virtual * PIPELINE_SIZE.micro_batches) / (3 if strategy == "pp_zero_bubble" else 1)
        assert (
            row["pipeline_bubble_theory"] == bubble_ratio(layout, PIPELINE_SIZE.micro_batches) == pytest.approx(formula)
        )
        assert [entry["rank"] for entry in entries] == list(range(world))
        assert sum(sum(entry["layers"]) for entry in entries) == PIPELINE_SIZE.layers
        for entry, rank in zip(entries, record["rank_files"], strict=True):
            assert entry["working_seconds"] > 0 and entry["idle_seconds"] >= 0
            assert entry["working_seconds"] + entry["idle_seconds"] <= max(rank.step_seconds)


def test_a_waiting_stage_is_idle(tmp_path: Path) -> None:
    """The last stage is delayed by a known time, which the first spends idle and the last working."""
    micro_batches = 8
    overrides = ("strategy=pp_1f1b", "world_size=2", "train.micro_batch=1", "train.seq_len=16", "train.warmup_steps=1")
    config, command = compose(f"results_dir={tmp_path}", "proof.reference=false", "train.steps=3", *overrides)
    record = execute_run(config, command, faults.slow_last_stage)
    assert record.row["status"] == "ok", record.row["reason"]
    slept = micro_batches * faults.SLOW_SECONDS
    first, last = record.pipeline
    assert first["idle_seconds"] > 0.9 * slept and first["bubble"] > 2 * record.row["pipeline_bubble_theory"]
    assert last["working_seconds"] > slept and last["idle_seconds"] < 0.5 * slept
