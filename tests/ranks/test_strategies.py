"""Every strategy trains the same and runs the layout it claims, as read back from the files of one real sweep."""

import itertools
import json
import statistics
from pathlib import Path

import pandas as pd
import pytest

from harness.config.command import read_run_config
from harness.engines.base import load_engine
from harness.layout.layout import resolve_layout
from harness.layout.state_widths import STATE_KINDS
from harness.records.run_folder import RunFolder
from harness.records.store import read_all, read_record
from harness.report.claims import claims
from tests.support import row_invariants
from tests.support.commands import read_rows, run_harness

STRATEGIES = dict.fromkeys(
    ("single", "ddp", "zero1_torch", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_no_shard"), "torch"
) | dict.fromkeys(("zero1", "zero2", "zero3", "zero1_defaults", "zero2_defaults", "zero3_defaults"), "deepspeed")

CHECKPOINTING = {2: ("none", "full"), 4: ("none",)}  # by world

# The batch is 8 sequences in micro-batches of 2: two micro-batches per rank at world 2, one at world 4.
BATCH = ("train.global_batch=8", "train.micro_batch=2", "train.seq_len=64", "train.steps=2", "train.warmup_steps=2")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Return the sweep's rows, with the record's folder in the column `folder`."""
    results = tmp_path_factory.mktemp("parity")
    for sweep in (f"strategy={','.join(STRATEGIES)}", "strategy=ddp strategy.engine=accelerate"):
        for world, kinds in CHECKPOINTING.items():
            asked = (*sweep.split(), f"world_size={world}", f"checkpointing={','.join(kinds)}")
            done = run_harness(results, "-m", "name=parity", *asked, *BATCH)
            assert done.returncode == 0, done.stderr[-3000:]
    found = read_rows(results, "parity")
    found["folder"] = [str(results / "parity" / run_id) for run_id in found.run_id]
    return found


def test_every_combination_is_a_proven_row(rows: pd.DataFrame) -> None:
    expected = {
        (strategy, engine, checkpointing, world)
        for (strategy, engine), (world, kinds) in itertools.product(STRATEGIES.items(), CHECKPOINTING.items())
        for checkpointing in kinds
        if strategy != "single"
    }
    expected |= {("single", "torch", kind, 1) for kind in ("none", "full")}
    expected |= {("ddp", "accelerate", kind, world) for world, kinds in CHECKPOINTING.items() for kind in kinds}
    keys = ["strategy", "engine", "checkpointing", "world_size"]
    assert set(rows[keys].itertuples(index=False, name=None)) == expected
    assert len(rows) == len(expected)
    assert set(rows.status) == {"ok"}
    assert rows.loss_deviation.max() < 1e-4
    assert rows.grad_deviation.max() < 1e-4
    parallel = rows[rows.strategy != "single"]
    assert parallel.loss_deviation.min() >= 0 and parallel.grad_deviation.min() > 0  # compared, not copied


def test_state_is_what_the_engine_says_it_allocates(rows: pd.DataFrame) -> None:
    """State is within 2 % of bytes per element over the layout's shards; momentary additions are named."""
    for row in rows.itertuples():
        record = read_record(Path(row.folder))
        config = read_run_config(record.config)
        if not config.strategy.literature:
            continue  # DeepSpeed's defaults keep parameters or gradients whole: the row shows it
        layout = resolve_layout(config.strategy, row.world_size)
        widths = load_engine(layout.engine).state_widths(config, layout)
        share = {kind: getattr(widths, kind) * row.parameters / layout.shard_count(kind) for kind in STATE_KINDS}
        assert row.parameter_bytes == pytest.approx(share["parameters"], rel=0.02), row.run_id
        assert row.optimizer_bytes == pytest.approx(share["optimizer"], rel=0.02), row.run_id
        on_top = 0.0
        if row.strategy == "zero1":  # whole gradients, and this rank's part of their sum while it is filled
            on_top = 4 * row.parameters / layout.dp_shard
        if row.strategy == "zero2":  # a part begins and ends inside a parameter, and one more is being reduced
            on_top = 3 * widths.gradients * config.model.vocab_size * config.model.hidden_size
        # ZeRO-2 adds a micro-batch to the sum before it, out of its bucket where that is large enough.
        least = 4 * row.parameters / layout.shard_count("gradients") if row.strategy == "zero2" else share["gradients"]
        assert 0.98 * least <= row.gradient_bytes <= 1.02 * share["gradients"] + on_top, row.run_id


def test_no_rank_starts_with_more_than_its_share(rows: pd.DataFrame) -> None:
    """Sharded parameters are made one at a time: a share of state, the engine's buffers, and one parameter's copy."""
    for row in rows[rows.strategy.isin(["fsdp_full_shard", "zero3"])].itertuples():
        record = read_record(Path(row.folder))
        config = read_run_config(record.config)
        layout = resolve_layout(config.strategy, row.world_size)
        widths = load_engine(layout.engine).state_widths(config, layout)
        # DeepSpeed makes masters and the buffer of gradients at once, FSDP2 nothing but parameters.
        state = 4 * row.parameters / layout.dp_shard * (3 if row.engine == "deepspeed" else 1)
        largest = 4 * config.model.vocab_size * config.model.hidden_size
        for rank in record.rank_entries:
            assert rank["start_peak_bytes"] <= state + widths.buffer_bytes + 4 * largest + 1024, row.run_id
            assert rank["start_peak_bytes"] < 4 * row.parameters + widths.buffer_bytes or row.world_size == 2


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
            "zero1_defaults": 1.5,
        }.items():
            assert ratio[strategy] == pytest.approx(volume, rel=0.05), (strategy, world)


def test_checkpointing_keeps_less_and_costs_no_memory_elsewhere(rows: pd.DataFrame) -> None:
    keys = ["strategy", "engine", "world_size"]
    both = rows[rows.world_size <= 2]
    none, full = (both[both.checkpointing == name].set_index(keys).sort_index() for name in ("none", "full"))
    assert (full.activation_bytes < none.activation_bytes / 2).all()
    assert (full.peak_allocated_bytes < none.peak_allocated_bytes).all()


def test_the_parts_are_the_whole(rows: pd.DataFrame) -> None:
    unaccounted = []
    for folder in map(Path, rows.folder):
        record = read_record(folder)
        ranks = RunFolder(folder).read_rank_reports(record.row["world_size"])
        row_invariants.check_memory(record.row, ranks)
        unaccounted.append(row_invariants.check_time(record.row))
        row_invariants.check_bytes(record)
    assert statistics.median(unaccounted) <= 0.025  # alone on a machine it is 0.017


def test_operations_are_the_models_and_what_is_run_again(rows: pd.DataFrame) -> None:
    """Every layout does the same operations; full checkpointing adds the layers' forward less its last projection."""
    ran = rows.executed_flops / rows.model_flops
    assert rows.model_flops.nunique() == 1
    none, full = (ran[rows.checkpointing == name] for name in ("none", "full"))
    assert none.between(1, 1.02).all() and full.between(1.2, 1.34).all()
    assert none.nunique() == 1


def test_literature_agrees_where_it_is_exact(rows: pd.DataFrame) -> None:
    """A claim agrees or says why not: DeepSpeed's masters, defaults, second gathers; fully_shard's shards at rest."""
    found = claims(read_all(Path(rows.folder[0]).parent).records)
    kinds = {claim.claim.split(",")[0].split(":")[0] for claim in found}
    assert {"model state", "activations", "operations that ran"} <= kinds and len(found) > 40
    differing = [claim for claim in found if not claim.agrees]
    assert all(claim.reason for claim in differing), [claim for claim in differing if not claim.reason]
    assert all(claim.label.startswith(("zero", "fsdp_shard_grad_op")) for claim in differing), differing


def test_steps_are_kept_beside_the_record(rows: pd.DataFrame) -> None:
    for folder in rows.folder:
        steps = [json.loads(line) for line in (Path(folder) / "steps.jsonl").read_text().splitlines()]
        assert [step["phase"] for step in steps] == [*["warm-up"] * 2, *["timed"] * 2, *["traced"] * 2, "profiled"]
        assert all(step["loss"] > 0 and step["grad_norm"] > 0 for step in steps)
