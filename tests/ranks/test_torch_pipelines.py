"""The plan of fully_shard in a pipeline that torch reduces at its end, as torchtitan's, against ranks that run it."""

import dataclasses
from pathlib import Path

import pytest

from harness.config.schema import RunConfig
from harness.engines import torch as engine
from harness.layout.layout import Layout
from harness.layout.partition import split_into_stages
from harness.layout.state_widths import StateWidths
from tests.support.commands import SMALL_BATCH, compose_layout, long, run_with
from tests.support.rank_memory import estimate_rank_memory
from tests.support.torch_pipelines import pipelined_by_torch

# About ten million parameters, with rows that two ranks do not divide evenly.
LARGER = (
    "model.hidden_size=320 model.num_attention_heads=5 model.num_key_value_heads=5 model.intermediate_size=1001"
    " model.vocab_size=8001 model.num_hidden_layers=8 train.seq_len=96"
)

V_SHAPED = "strategy.schedule=zbv strategy.virtual_stages=2 train.global_batch=32"

OPTIONS = (
    *("", "checkpointing=full train.global_batch=32", "model.tie_word_embeddings=true", V_SHAPED),
    *(
        f"{options} strategy.schedule=interleaved_1f1b strategy.virtual_stages=2"
        for options in ("", "checkpointing=full")
    ),
    "strategy.schedule=zero_bubble train.global_batch=32",
)


@pytest.mark.parametrize(
    "overrides",
    [
        "precision=bf16_mixed",
        *(
            long(f"precision={precision} {options} {size}")
            for size in ("", LARGER)
            for precision in ("fp32", "bf16_mixed")
            for options in OPTIONS
            if (precision, options, size) != ("bf16_mixed", "", "")
        ),
    ],
)
def test_ranks_send_and_need_what_is_planned(results: Path, monkeypatch: pytest.MonkeyPatch, overrides: str) -> None:
    """They are proven as torchtitan's are planned: whole gradients add up, and are reduced once a step."""
    ordinary = engine.state_widths

    def state_widths(config: RunConfig, layout: Layout) -> StateWidths:
        return dataclasses.replace(ordinary(config, layout), reduces_at_end=layout.pp_enabled)

    monkeypatch.setattr(engine, "state_widths", state_widths)
    settings = (*SMALL_BATCH, "strategy=fsdp_pp", "world_size=4", "train.global_batch=16", *overrides.split())
    record = run_with(results, *settings, entry=pipelined_by_torch)
    assert record.row["status"] == "ok", record.row["reason"]
    config, layout = compose_layout(4, *settings)
    stages = split_into_stages(config.model, layout)
    for report in record.ranks:
        pp_rank = layout.coordinates(report.rank)["pp"]
        own = [stages[index] for index in layout.stage_indices(pp_rank)]
        planned = estimate_rank_memory(config, layout, state_widths(config, layout), "cpu", pp_rank, own)
        most = 1.05 if layout.splits_backward else 1.01  # what weights' backwards leave is planned to stay for a pass
        assert 0.99 < planned.peak_bytes / report.peak_allocated_bytes < most, report.rank
