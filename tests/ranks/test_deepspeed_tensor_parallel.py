"""DeepSpeed's tensor-parallel layers under ZeRO 1 and 2: proven rows, detected faults, and refused configurations."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.engines.base import load_engine
from harness.engines.deepspeed.shards import ParamSlice
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import resolve_layout
from harness.layout.model_profile import model_profile, parameter_count
from harness.proof.layout import _overlap, box_numel
from harness.runner import local_machine
from harness.worker import main as worker_main
from tests.support import faults, row_invariants
from tests.support.commands import assert_not_proven, compose_config, run_folder, run_with

TWO = "strategy.tp=2 strategy.vocabulary_parallel=false"

LONG = [
    f"strategy=zero_offload {TWO} checkpointing=full",
    f"strategy=zero2 {TWO} precision=bf16_mixed",
    "strategy=zero1_tp precision=bf16_mixed model.attention=eager",
    f"strategy=zero1_defaults {TWO} precision=bf16_mixed",
    "strategy=zero1_tp strategy.offload=optimizer precision=bf16_mixed",
    "strategy=zero1_tp model.tie_word_embeddings=true checkpointing.offload_activations=true",
]


@pytest.mark.parametrize("case", ["strategy=zero1_tp", *(pytest.param(case, marks=pytest.mark.long) for case in LONG)])
def test_data_and_tensor_parallel_is_proven_and_explained(results: Path, case: str) -> None:
    """Two replicas of a model in two parts have ZeRO shards that begin inside the rows of column-parallel matrices."""
    record = run_with(results, worker_main.main, "world_size=4", *case.split(), "train.gradient_clipping=0.5")
    row = record.row
    assert (row["status"], row["reason"]) == ("ok", ""), case
    assert (row["dp_shard"], row["tp"]) == (2, 2)
    if row["precision"] == "fp32":
        assert row["loss_deviation"] < 1e-5 and row["grad_deviation"] < 1e-4
    assert row["activation_bytes"] == pytest.approx(row["predicted_activation_bytes"], rel=0.03)
    if row["offload"] != "none":  # what goes back and forth is this rank's part of each matrix
        assert row["peak_allocated_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.06)
    row_invariants.check_memory(row, run_folder(results, record).read_rank_reports(4))
    row_invariants.check_bytes(record)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (faults.autotp_rows_not_summed, "along tp all_reduce, which is 0.71 x the"),
        (faults.autotp_not_marked, "first moments"),  # clipped by a norm that is too small
        (faults.autotp_parts_swapped, "gradient deviates"),
        (
            faults.autotp_dropped,
            "layers.0.self_attn.q_proj.weight: 2 of 2 ranks hold them, and the layout has 1 copies",
        ),
    ],
)
def test_a_fault_is_an_error(results: Path, fault: Callable[[str], None], problem: str) -> None:
    assert_not_proven(run_with(results, fault, "strategy=zero1_tp"), problem)


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16_mixed", 2)])
def test_offload_buffers_have_the_size_of_a_ranks_part(precision: str, width: int) -> None:
    """On four ranks the embedding is whole and the layers' matrices are halves, and ZeRO divides both by two."""
    config = compose_config("strategy=zero_offload", *TWO.split(), f"precision={precision}")
    layout = resolve_layout(config.strategy, 4)
    widths = load_engine("deepspeed").state_widths(config, layout)
    shapes = model_profile(config.model).parameter_shapes
    halved = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers") and len(shape) == 2)
    own = parameter_count(config.model) - halved // 2
    table = config.model.vocab_size * config.model.hidden_size
    half_matrix = config.model.intermediate_size * config.model.hidden_size // 2
    assert widths.host_buffer_bytes == width * (max(table, half_matrix) + own // 2)
    whole = dataclasses.replace(layout, tp=1)
    assert load_engine("deepspeed").state_widths(config, whole).host_buffer_bytes > widths.host_buffer_bytes


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ("strategy=zero1_tp strategy.vocabulary_parallel=true", "does not shard embedding and head; choose false"),
        ("strategy=zero1_tp strategy.sequence_parallel=true", "strategy.sequence_parallel=true is not supported by"),
        (f"strategy=zero3 {TWO}", "strategy.tp=2 with strategy.zero_stage=3: DeepSpeed's tensor-parallel layers"),
        ("strategy=ddp strategy.vocabulary_parallel=false", "is not supported by strategy.engine=torch: choose true"),
        ("strategy=zero1_tp strategy.tp=4", "strategy.tp=4 does not divide model.num_key_value_heads=2"),
    ],
)
def test_unsupported_combinations_are_refused(overrides: str, reason: str) -> None:
    config = compose_config(*overrides.split(), "world_size=4")
    layout = resolve_layout(config.strategy, 4)
    engine = load_engine(layout.engine)
    problems = [
        *incompatibilities(config, layout),
        *engine.unsupported(config, layout, local_machine.detect_machine(config.cluster)),
    ]
    assert len(problems) == 1 and reason in problems[0] and "choose" in problems[0]


@pytest.mark.parametrize("box", [((0, 5), (0, 6)), ((2, 5), (0, 6)), ((0, 5), (0, 3)), ((0, 5), (3, 6))])
def test_a_range_of_a_shard_is_at_most_three_boxes(box: tuple[tuple[int, int], ...]) -> None:
    """Every [start, stop) of the flattened shard belongs exactly where its boxes say."""
    whole = np.arange(30).reshape(5, 6)
    shard = ParamSlice("w", (5, 6), box)
    flat = whole[tuple(slice(*edges) for edges in box)].reshape(-1)
    for start, stop in itertools.combinations(range(flat.size + 1), 2):
        parts = list(shard.boxes(start, stop))
        assert len(parts) <= 3 and [parts[0][0], parts[-1][1]] == [start, stop]
        for first, end, shape, target in parts:
            assert np.array_equal(
                whole.reshape(shape)[tuple(slice(*edges) for edges in target)].reshape(-1), flat[first:end]
            )
        assert sum(box_numel(target) for *_, target in parts) == stop - start


def test_overlapping_boxes_are_detected_in_any_order() -> None:
    apart = [((0, 3), (0, 2)), ((0, 3), (2, 4)), ((3, 4), (0, 4))]
    assert not _overlap(apart)
    assert _overlap([((0, 4), (0, 1)), ((0, 1), (1, 4)), ((3, 4), (0, 4))])  # the first and the last alone
