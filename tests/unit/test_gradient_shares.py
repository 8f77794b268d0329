"""The proof that ranks of ZeRO's stage 2 hold no more gradients than their share."""

import pytest

from harness.api import compose_run_config
from harness.engines.base import load_engine
from harness.layout.layout import resolve_layout
from harness.proof.layout import gradient_problems
from harness.records.rank_report import ProfiledStep, RankReport

# Draw 4082 of results/random_runs.csv.
OVERRIDES = (
    *("strategy=zero2", "strategy.engine=accelerate", "world_size=6", "precision=fp32", "checkpointing=selective"),
    *("model=tiny", "model.num_hidden_layers=5", "model.num_attention_heads=8", "model.num_key_value_heads=8"),
    *("model.hidden_size=448", "model.intermediate_size=1194", "model.vocab_size=960"),
    *("train.global_batch=12", "train.micro_batch=2", "train.seq_len=32"),
)


@pytest.mark.parametrize(
    ("gradient_bytes", "is_refused"), [(16_052_736, False), (25_700_000, True), (51_400_000, True)]
)
def test_whole_gradients_at_the_edges_of_a_partition_are_no_error(gradient_bytes: int, is_refused: bool) -> None:
    """A partition of 8.6 MB holds parts of parameters of 2.1 MB; half of all gradients is more than that."""
    config, _ = compose_run_config(*OVERRIDES)
    layout = resolve_layout(config.strategy, 6)
    widths = load_engine(layout.engine).state_widths(config, layout)
    ranks = [RankReport(rank=rank, profiled=ProfiledStep(gradient_bytes=gradient_bytes)) for rank in range(6)]
    assert any(gradient_problems(config.model, layout, widths, ranks)) == is_refused
