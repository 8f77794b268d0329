"""Data parallelism: state, volume, operations and memory of every strategy, as its record says and the papers do."""

import statistics
from pathlib import Path

import pandas as pd
import pytest

from harness.config.command import read_run_config
from harness.config.schema import ModelConfig
from harness.engines.base import load_engine
from harness.layout.layout import Layout, resolve_layout
from harness.layout.state_widths import STATE_KINDS, StateWidths
from harness.records.schema import Record
from harness.report.claims import claims
from harness.report.lines import lines_of
from tests.support import row_invariants
from tests.support.combinations import CHECKPOINTING, DATA_PARALLEL, DEFAULTS


@pytest.fixture(scope="module")
def records(results: Path) -> list[Record]:
    """Return the records of the combinations, each of which tests/ranks/test_combinations.py shows to be proven."""
    return [combination.record(results) for combination in DATA_PARALLEL]


@pytest.fixture(scope="module")
def rows(records: list[Record]) -> pd.DataFrame:
    return pd.DataFrame([record.row for record in records])


def widths_of(record: Record) -> tuple[ModelConfig, Layout, StateWidths]:
    config = read_run_config(record.config)
    layout = resolve_layout(config.strategy, record.row["world_size"])
    return config.model, layout, load_engine(layout.engine).state_widths(config, layout)


def test_state_has_the_engines_bytes_per_element(records: list[Record]) -> None:
    """State is within 2 % of bytes per element over the layout's shards; momentary additions are named.

    DeepSpeed's defaults keep parameters or gradients whole: the row shows it.
    """
    for record in (record for record in records if record.config["strategy"]["literature"]):
        row, (model, layout, widths) = record.row, widths_of(record)
        share = {kind: getattr(widths, kind) * row["parameters"] / layout.shard_count(kind) for kind in STATE_KINDS}
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


def test_no_rank_starts_with_more_than_its_share(records: list[Record]) -> None:
    """Sharded parameters are made one at a time: a share of state, the engine's buffers, and one parameter's copy."""
    for record in (record for record in records if record.row["strategy"] in ("fsdp_full_shard", "zero3")):
        row, (model, layout, widths) = record.row, widths_of(record)
        # DeepSpeed makes masters and the buffer of gradients at once, FSDP2 nothing but parameters.
        state = 4 * row["parameters"] / layout.dp_shard * (3 if row["engine"] == "deepspeed" else 1)
        largest = 4 * model.vocab_size * model.hidden_size
        for start_peak in (rank["start_peak_bytes"] for rank in record.rank_entries):
            assert start_peak <= state + widths.buffer_bytes + 4 * largest + 1024, record.run_id
            assert start_peak < 4 * row["parameters"] + widths.buffer_bytes or row["world_size"] == 2


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
            "zero1": 1.0,
            "zero2": (k + 1) / 2,
            "fsdp_shard_grad_op": (k + 1) / 2,
            "zero3": 3 * k / 2,
            "fsdp_full_shard": 3 * k / 2,
            "fsdp_no_shard": 1.0,
            **({"zero1_defaults": 1.5} if world == 2 else {}),
        }.items():
            assert ratio[strategy] == pytest.approx(volume, rel=0.05), (strategy, world)


def test_checkpointing_lowers_activations_and_the_peak(rows: pd.DataFrame) -> None:
    keys = ["strategy", "engine", "world_size"]
    both = rows[(rows.world_size <= 2) & ~rows.strategy.isin(DEFAULTS)]
    none, full = (both[both.checkpointing == name].set_index(keys).sort_index() for name in ("none", "full"))
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


def test_claims_of_the_literature_hold_or_say_why_not(records: list[Record]) -> None:
    """Reasons are DeepSpeed's masters, its defaults, its second gathers, and fully_shard's shards at rest."""
    checked = claims(lines_of(records))
    kinds = {claim.claim.split(",")[0].split(":")[0] for claim in checked}
    assert {"model state", "activations", "operations that ran"} <= kinds and len(checked) > 40
    differing = [claim for claim in checked if not claim.agrees]
    assert all(claim.reason for claim in differing), [claim for claim in differing if not claim.reason]
    assert all(claim.label.startswith(("zero", "fsdp_shard_grad_op")) for claim in differing), differing
