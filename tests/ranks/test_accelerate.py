"""Accelerate's sharded layouts: DeepSpeed's really runs on a CPU, and what it would drop there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engines import accelerate as accelerate_engine
from harness.launcher.launch import launch
from harness.records.schema import Record
from harness.worker import main as worker_main
from tests.support import accelerate_entries, commands


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fully_shard through Accelerate start on a CPU."""
    monkeypatch.setattr(accelerate_engine, "fsdp_unsupported", lambda *arguments: iter(()))


def run_with(results: Path, entry: Callable[[str], None], overrides: str) -> Record:
    return commands.run_with(results, entry, "strategy.engine=accelerate", *overrides.split())


@pytest.mark.parametrize(
    ("entry", "overrides"),
    [
        (worker_main.main, "strategy=zero1"),
        (accelerate_entries.sharded_on_cpu, "strategy=fsdp_full_shard"),
        *(
            pytest.param(entry, overrides, marks=pytest.mark.long)
            for entry, overrides in (
                (worker_main.main, "strategy=zero3"),
                (worker_main.main, "strategy=zero2 checkpointing=full"),
                (worker_main.main, "strategy=zero2 precision=bf16_mixed"),
                (worker_main.main, "strategy=zero3 precision=bf16_mixed"),
                (worker_main.main, "strategy=zero3_defaults"),
                (accelerate_entries.sharded_on_cpu, "strategy=fsdp_shard_grad_op"),
                (
                    accelerate_entries.sharded_on_cpu,
                    "strategy=fsdp_full_shard precision=bf16_mixed checkpointing=full",
                ),
                (accelerate_entries.sharded_on_cpu, "strategy=fsdp_full_shard model=gpt_tiny"),
                (
                    accelerate_entries.sharded_on_cpu,
                    "world_size=4 strategy=fsdp_hybrid_shard strategy.dp_replicate=2",
                ),
            )
        ),
    ],
)
@pytest.mark.usefixtures("allowed")
def test_sharding_through_accelerate_is_proven_on_a_cpu(
    results: Path, entry: Callable[[str], None], overrides: str
) -> None:
    """DeepSpeed runs there, and Accelerate's own prepare shards over gloo; every proof applies to the row."""
    record = run_with(results, entry, overrides)
    row = record.row
    assert (row["status"], row["reason"], row["engine"]) == ("ok", "", "accelerate")
    assert record.proof["layout"] == "proven"
    bound = 1e-4 if row["precision"] == "fp32" else 0.05
    assert row["loss_deviation"] < bound and row["grad_deviation"] < bound


@pytest.mark.parametrize(
    ("fault", "strategy", "reason"),
    [
        (
            accelerate_entries.sharding_ignored,
            "fsdp_full_shard",
            "Accelerate dropped its plugin for FSDP2",
        ),
        pytest.param(
            *(accelerate_entries.one_group, "fsdp_full_shard", "groups of 4 layers, embedding and head"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(accelerate_entries.root_left_gathered, "fsdp_full_shard", "Accelerate does not reshard as"),
            marks=pytest.mark.long,
        ),
        (accelerate_entries.other_stage, "zero2", "Accelerate built DeepSpeed with (stage, ranks,"),
    ],
)
@pytest.mark.usefixtures("allowed")
def test_another_layout_than_configured_is_an_error(
    results: Path, fault: Callable[[str], None], strategy: str, reason: str
) -> None:
    row = run_with(results, fault, f"strategy={strategy} proof.reference=false").row
    assert row["status"] == "error" and reason in row["reason"]


def test_accelerate_drops_sharding_on_a_cpu(tmp_path: Path) -> None:
    """Accelerate on a CPU makes DistributedDataParallel with all of the model on every rank, so it is refused there."""
    outcome = launch(accelerate_entries.prepare_linear, tmp_path, 2, device="cpu", timeout_seconds=180)
    assert outcome.status == "ok", outcome.reason
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result == {"wrapper": "DistributedDataParallel", "elements": 4 * 4 + 4, "ranks": 2}
