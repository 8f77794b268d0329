"""Data, tensor and pipeline parallelism: the rows of every strategy, compared with the papers' arithmetic."""

import itertools
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.config.command import read_run_config
from harness.config.schema import ModelConfig, RunConfig
from harness.cost_model.pipeline import bubble_ratio, max_in_flight_micro_batches
from harness.layout.layout import Layout, resolve_layout
from harness.layout.state_widths import STATE_KINDS, StateWidths
from harness.records.rank_report import RankReport
from harness.records.schema import Record
from harness.report.claims import claims
from harness.report.lines import lines_of
from tests.support import faults, row_invariants
from tests.support.combinations import (
    CHECKPOINTING,
    DATA_PARALLEL,
    MODEL_PARALLEL,
    PIPELINE,
    PIPELINE_SIZE,
    PIPELINES,
    SEQ_LEN,
    SEQUENCES,
    TENSOR_SIZE,
    VOCABULARY,
    Combination,
    model_parallel,
)
from tests.support.commands import assert_ok, compose, execute_run, long, run_folder, widths_of

MOMENTS = 2 * 4  # bytes per parameter that AdamW keeps beside masters

WHOLE_STAGES = ("pp_gpipe", "pp_1f1b")


def record_of(results: Path, combination: Combination) -> dict[str, Any]:
    """Return the record of a combination's run, with its rank reports added."""
    record = combination.record(results)
    return record.to_json() | {"rank_files": run_folder(results, record).read_rank_reports(record.row["world_size"])}


def config_of(record: dict[str, Any]) -> tuple[RunConfig, Layout]:
    config = read_run_config(record["config"])
    return config, resolve_layout(config.strategy, record["row"]["world_size"])


def sent(rank: RankReport, *operations: str) -> float:
    return sum(traffic.bytes_sent for traffic in rank.profiled.communication if traffic.operation in operations)


@pytest.mark.parametrize(("world", "strategy"), [(2, "tp"), (2, "tp_sp"), long(4, "tp"), long(4, "tp_sp")])
def test_tensor_parallel_sends_two_sums_a_layer_each_way(results: Path, world: int, strategy: str) -> None:
    """Megatron-LM sends 4 all-reduces of batch x sequence x hidden a layer, and one each for embedding and head."""
    record = record_of(results, model_parallel(strategy, world))
    hidden = SEQUENCES * SEQ_LEN * record["config"]["model"]["hidden_size"] * 4
    formula = 2 * (world - 1) / world * TENSOR_SIZE.micro_batches * (4 * TENSOR_SIZE.layers + 2) * hidden
    for rank in record["rank_files"]:
        assert sent(rank, "all_reduce", "all_gather", "reduce_scatter") == pytest.approx(formula, rel=0.05)
        if strategy == "tp_sp":
            assert sent(rank, "all_gather") == sent(rank, "reduce_scatter") == pytest.approx(formula / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [*itertools.product((2,), PIPELINE), *itertools.product((4,), WHOLE_STAGES), long(4, "pp_zero_bubble")],
)
def test_a_pipeline_sends_boundary_activations_and_their_gradients(results: Path, world: int, strategy: str) -> None:
    """A pipeline sends 2 x micro-batches x boundary activations, summed over all ranks and boundaries."""
    record = record_of(results, model_parallel(strategy, world))
    config, layout = config_of(record)
    boundary = SEQUENCES * SEQ_LEN * config.model.hidden_size * 4
    total = sum(sent(rank, "send") for rank in record["rank_files"])
    assert total == 2 * PIPELINE_SIZE.micro_batches * boundary * (layout.num_stages - 1)
    assert all(sent(rank, "all_reduce") < 100 for rank in record["rank_files"])


@pytest.mark.parametrize(
    ("world", "checkpointing", "strategies"),
    [
        (2, "none", PIPELINE),
        (2, "full", ("pp_1f1b",)),
        (4, "none", WHOLE_STAGES),
        long(2, "full", PIPELINE),
        long(4, "none", PIPELINES[4]),
    ],
)
def test_micro_batches_in_flight_show_in_the_activations(
    results: Path, world: int, checkpointing: str, strategies: tuple[str, ...]
) -> None:
    """GPipe keeps all micro-batches on every stage, while 1F1B keeps as many as there are stages from this one on."""
    records = {strategy: record_of(results, model_parallel(strategy, world, checkpointing)) for strategy in strategies}
    for stage in range(world):
        saved = {}
        for strategy, record in records.items():
            profiled = record["rank_files"][stage].profiled
            _, layout = config_of(record)
            in_flight = max_in_flight_micro_batches(layout, PIPELINE_SIZE.micro_batches, stage)
            assert profiled.max_in_flight_micro_batches == in_flight, (strategy, stage)
            assert strategy != "pp_gpipe" or in_flight == PIPELINE_SIZE.micro_batches
            saved[strategy] = profiled.activation_bytes
        if checkpointing == "none":
            ratio = min(PIPELINE_SIZE.micro_batches, world - stage) / PIPELINE_SIZE.micro_batches
            assert saved["pp_1f1b"] == pytest.approx(saved["pp_gpipe"] * ratio, rel=0.02)


@pytest.mark.parametrize("world", (2, long(4)))
def test_tensor_parallel_divides_the_activations_between_its_matrices(results: Path, world: int) -> None:
    """Korthikanti et al. leave 10 of 34 sbh whole and divide 24; in this block the norms' activations stay whole.

    In fp32 a layer's two norms keep input, normalized input and output, h each, and a reciprocal root; attention keeps
    query, key, value, output (4h: as many key-value heads as others) and a sum a head; SwiGLU keeps four times its
    width. The loss keeps a logit a word.
    """
    worlds = {"single": 1, "tp": world, "tp_sp": world}
    records = {strategy: record_of(results, model_parallel(strategy, ranks)) for strategy, ranks in worlds.items()}
    activations = {strategy: record["rank_files"][0].profiled.activation_bytes for strategy, record in records.items()}
    model = records["single"]["config"]["model"]
    hidden, inner, heads = (model[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    token, layers = 4 * SEQUENCES * SEQ_LEN, TENSOR_SIZE.layers
    divided = token * (layers * (4 * hidden + heads + 4 * inner) + VOCABULARY)
    saved = (1 - 1 / world) * divided
    assert activations["single"] - activations["tp"] == pytest.approx(saved, rel=0.05)
    along_the_sequence = token * (2 * layers + 1) * (2 * hidden + 1)  # the norms' outputs are gathered, and kept so
    saved += (1 - 1 / world) * along_the_sequence
    assert activations["single"] - activations["tp_sp"] == pytest.approx(saved, rel=0.05)


def test_the_bubble_is_recorded_beside_its_formula(results: Path) -> None:
    for combination in MODEL_PARALLEL:
        strategy, world, _ = combination
        record = record_of(results, combination)
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
    assert_ok(record.row)
    slept = micro_batches * faults.SLOW_SECONDS
    first, last = record.pipeline
    assert first["idle_seconds"] > 0.9 * slept and first["bubble"] > 2 * record.row["pipeline_bubble_theory"]
    assert last["working_seconds"] > slept and last["idle_seconds"] < 0.5 * slept


@pytest.fixture(scope="module")
def sharded_records(results: Path) -> list[Record]:
    """Return the records of the combinations, each of which tests/ranks/test_combinations.py shows to be proven."""
    return [combination.record(results) for combination in DATA_PARALLEL]


@pytest.fixture(scope="module")
def rows(sharded_records: list[Record]) -> pd.DataFrame:
    return pd.DataFrame([record.row for record in sharded_records])


def planned_state(record: Record) -> tuple[ModelConfig, Layout, StateWidths]:
    config = read_run_config(record.config)
    layout = resolve_layout(config.strategy, record.row["world_size"])
    return config.model, layout, widths_of(config, layout)


def test_state_has_the_engines_bytes_per_element(sharded_records: list[Record]) -> None:
    """State is within 2 % of bytes per element over the layout's shards; momentary additions are named.

    DeepSpeed's defaults keep parameters or gradients whole: the row shows it.
    """
    for record in (record for record in sharded_records if record.config["strategy"]["literature"]):
        row, (model, layout, widths) = record.row, planned_state(record)
        own = {"parameters": widths.parameters, "gradients": widths.gradients, "optimizer": widths.masters + MOMENTS}
        share = {kind: own[kind] * row["parameters"] / layout.shard_count(kind) for kind in STATE_KINDS}
        assert row["parameter_bytes"] == pytest.approx(share["parameters"], rel=0.02), record.run_id
        assert row["optimizer_bytes"] == pytest.approx(share["optimizer"], rel=0.02), record.run_id
        on_top = {
            # Whole gradients, and this rank's part of their sum while it is filled.
            "zero1": 4 * row["parameters"] / layout.dp_shard,
            # A part begins and ends inside a parameter, and one more is being reduced.
            "zero2": 3 * widths.gradients * model.vocab_size * model.hidden_size,
        }
        # ZeRO-2 adds a micro-batch to the sum before it, out of its bucket where that is large enough.
        width = 4 if row["strategy"] == "zero2" else widths.gradients
        least = width * row["parameters"] / layout.shard_count("gradients")
        most = 1.02 * share["gradients"] + on_top.get(row["strategy"], 0)
        assert 0.98 * least <= row["gradient_bytes"] <= most, record.run_id


def test_no_rank_starts_with_more_than_its_share(sharded_records: list[Record]) -> None:
    """Sharded parameters are made one at a time: a share of state, the engine's buffers, and one parameter's copy."""
    for record in (record for record in sharded_records if record.row["strategy"] in ("fsdp_full_shard", "zero3")):
        row, (model, layout, widths) = record.row, planned_state(record)
        # DeepSpeed makes masters and the buffer of gradients at once, FSDP2 nothing but parameters.
        state = 4 * row["parameters"] / layout.dp_shard * (3 if row["engine"] == "deepspeed" else 1)
        largest = 4 * model.vocab_size * model.hidden_size
        for start_peak in (rank["start_peak_bytes"] for rank in record.rank_entries):
            assert start_peak <= state + widths.buffer_bytes + 4 * largest + 1024, record.run_id
            assert start_peak < 4 * row["parameters"] + widths.buffer_bytes or row["world_size"] == 2


ON_TWO_RANKS = {  # with two micro-batches on each
    "zero1": 1.0,
    "zero1_defaults": 1.5,
    "zero3": 3.0,
    "fsdp_no_shard": 1.0,
    "fsdp_shard_grad_op": 1.5,
}


def test_volumes_are_the_papers(rows: pd.DataFrame) -> None:
    """In fp32 and relative to DDP, k micro-batches send 1 (ZeRO-1), (k + 1) / 2 (ZeRO-2) or 3k / 2 (ZeRO-3)."""
    plain = rows[rows.checkpointing == "none"]
    for world in CHECKPOINTING:
        sent = plain[(plain.world_size == world) & (plain.engine != "accelerate")].set_index("strategy")
        k = int(sent.loc["ddp", "grad_accumulation"])
        assert k == 4 // world
        ratio = sent.communication_bytes / sent.loc["ddp", "communication_bytes"]
        ddp = 2 * (world - 1) / world * 4 * sent.loc["ddp", "parameters"]
        assert sent.loc["ddp", "communication_bytes"] == pytest.approx(ddp, rel=0.01)
        for strategy, volume in {
            "zero2": (k + 1) / 2,
            "fsdp_full_shard": 3 * k / 2,
            **(ON_TWO_RANKS if world == 2 else {}),
        }.items():
            assert ratio[strategy] == pytest.approx(volume, rel=0.05), (strategy, world)


def test_checkpointing_lowers_activations_and_the_peak(rows: pd.DataFrame) -> None:
    keys = ["strategy", "engine", "world_size"]
    none, full = (rows[rows.checkpointing == name].set_index(keys) for name in ("none", "full"))
    none = none.loc[full.index]
    assert (full.activation_bytes < none.activation_bytes / 2).all()
    assert (full.peak_allocated_bytes < none.peak_allocated_bytes).all()


def test_phases_account_for_the_step(rows: pd.DataFrame) -> None:
    """Python's time between phases is 1.7 % of the step in the median without other work, and 3.5 % beside some."""
    assert statistics.median(row_invariants.check_time(dict(row)) for _, row in rows.iterrows()) <= 0.08


def test_operations_are_the_models_and_the_recomputed(rows: pd.DataFrame) -> None:
    """Every layout does the same operations; full checkpointing adds the layers' forward less its last projection."""
    ran = rows.executed_flops / rows.model_flops
    assert rows.model_flops.nunique() == 1
    none, full = (ran[rows.checkpointing == name] for name in ("none", "full"))
    assert none.between(1, 1.02).all() and full.between(1.2, 1.34).all()
    assert none.nunique() == 1


def test_claims_of_the_literature_hold_or_say_why_not(sharded_records: list[Record]) -> None:
    """Reasons are DeepSpeed's masters, its defaults, its second gathers, and fully_shard's shards at rest."""
    checked = claims(lines_of(sharded_records))
    kinds = {claim.claim.split(",")[0].split(":")[0] for claim in checked}
    assert {"model state", "activations", "operations that ran"} <= kinds and len(checked) > 30
    differing = [claim for claim in checked if not claim.agrees]
    assert all(claim.reason for claim in differing), [claim for claim in differing if not claim.reason]
    assert all(claim.label.startswith(("zero", "fsdp_shard_grad_op")) for claim in differing), differing
