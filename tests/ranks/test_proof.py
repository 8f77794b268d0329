"""Every guarantee of a row is tested with the fault that it guards against, in real ranks or in their reports."""

import math
from pathlib import Path

import pytest

from harness.proof.deviations import _mean, copies_of_tensors, differences
from harness.records.rank_report import RankReport
from harness.runner import reference_runs
from tests.support import faults, replayed_faults
from tests.support.combinations import (
    TENSOR_SIZE,
    TIED,
    TWO_LAYERS,
    Combination,
    data_parallel,
    in_precision,
    model_parallel,
)
from tests.support.commands import Entry, assert_not_proven, long, run_with

DDP, FSDP, ZERO2 = map(data_parallel, ("ddp", "fsdp_full_shard", "zero2"))

BF16 = {combination.strategy: combination for combination in in_precision("bf16_mixed")}

TP, TP_SP, PP_1F1B, PP_GPIPE, PP_ZERO_BUBBLE = (
    model_parallel(name) for name in ("tp", "tp_sp", "pp_1f1b", "pp_gpipe", "pp_zero_bubble")
)

SMALL_TENSOR = " ".join(TENSOR_SIZE.options())

DROPPING = Combination("tp", 2, ("model=gpt_tiny", "model.dropout=0.1", "checkpointing=full"))

HEADS = "the heads of rank 0 drew the masks of tensor-parallel ranks [None], and [0] are expected"

TIED_ENDS = f"pp_1f1b {TIED} model.num_hidden_layers=4"

GPT_SP = "tp_sp model=gpt_tiny"

COMPILED = "ddp train.compile=true"

CHUNKED = "train.loss_chunks=4 train.global_batch=4 train.micro_batch=2 train.seq_len=160"

PRODUCT = "train.micro_batch=1 train.seq_len=32"

HYBRID = f"fsdp_hybrid_shard strategy.dp_replicate=2 world_size=4 {PRODUCT}"

ONE_MICRO_BATCH = "train.global_batch=4 train.micro_batch=2 train.steps=4"

OFFLOADED = "ddp checkpointing.offload_activations=true model.num_hidden_layers=4"


# Faults that show in the reports of a proven run, and by the same words in ranks of their own.
REPLAYED = [
    (replayed_faults.uncounted, FSDP, "along dp_shard reduce, which is 0.00 x the"),
    (replayed_faults.boundary_sent_twice, PP_GPIPE, "along pp send, which is 2.00 x the"),
    (replayed_faults.sequence_whole, TP_SP, "along tp reduce_scatter, which is 0.00 x the"),
    (replayed_faults.layer_twice, FSDP, "a step ran"),
    (
        replayed_faults.never_recomputed,
        data_parallel("ddp", checkpointing="full"),
        "rank 0 ran 0 second forwards of a layer in a step, and 4 are expected",
    ),
    (
        replayed_faults.other_schedule,
        PP_1F1B,
        "rank 0 had 4 micro-batches in flight, and strategy.schedule=1f1b has 2",
    ),
    (
        replayed_faults.weights_not_put_off,
        PP_ZERO_BUBBLE,
        "deferred the weights' gradients of 0 backwards in a step, and 4 are expected",
    ),
    (replayed_faults.other_optimizer, DDP, "exp_avg in float32 are not held"),
    (replayed_faults.summed_in_16_bit, BF16["zero2"], "gradients: they are accumulated in bfloat16"),
    (replayed_faults.tensor_parallel_dropped, TP, "parameters of embed_tokens.weight: 2 of 2 ranks hold them"),
    (
        replayed_faults.whole_gradient,
        TP,
        "gradients of embed_tokens.weight: 2 of 2 ranks hold them, and the layout has 1 copies",
    ),
    (replayed_faults.other_layers, PP_1F1B, "its pipeline stage does not have this parameter"),
    (replayed_faults.whole_model_built, PP_1F1B, "bytes while it was built"),
    (replayed_faults.halved, BF16["ddp"], "layers.1.input_layernorm.weight"),
    (replayed_faults.not_finite, DDP, "the loss is not finite from step 0 on, in warm-up"),
    (replayed_faults.loss_of_its_own, PP_1F1B, "the loss of the same data is not the same"),
    (replayed_faults.norms_drift, BF16["tp"], "master of norm.weight is not the same on all ranks"),
    (replayed_faults.offload_dropped, Combination("zero_offload"), "was built to keep nothing on the host"),
]


@pytest.mark.parametrize(
    ("fault", "combination", "problem"),
    [
        (replayed_faults.lower_stage, ZERO2, "0.67 x the"),
        (replayed_faults.parameters_in_16_bit, DDP, "parameters: values in bfloat16 are held but are no part of"),
        (replayed_faults.norm_of_its_own, TP, "the global gradient norm is not the same"),
        long(
            replayed_faults.recomputed_once_less,
            model_parallel("pp_zero_bubble", checkpointing="full"),
            "rank 1 ran 15 second forwards of a layer in a step, and 16 are expected",
        ),
        *REPLAYED,
        long(replayed_faults.heads_drop_alike, DROPPING, HEADS),
    ],
)
def test_a_fault_in_the_reports_is_an_error(
    results: Path, fault: replayed_faults.Fault, combination: Combination, problem: str
) -> None:
    problems = replayed_faults.problems_of(results, combination, fault)
    assert any(problem in text for text in problems), problems


# Faults that only real ranks can show: they train something else.
@pytest.mark.parametrize(
    ("fault", "strategy", "problem"),
    [
        (faults.sharding_dropped, "fsdp_full_shard", "parameters of embed_tokens.weight: 2 of 2 ranks hold them"),
        (faults.other_data, "ddp", "loss deviates"),
        (faults.never_broadcast, "zero1_torch", "the parameter of embed_tokens.weight is not the same on all ranks"),
        (faults.unsynchronized, "ddp", "sent 0 bytes a step along dp_replicate"),
        (faults.unsynchronized, "ddp", "gradient deviates by"),  # each rank's copy: their average would be right
        (faults.rows_not_summed, f"tp {SMALL_TENSOR}", "0.50 x the"),
        (faults.norms_not_summed, f"tp_sp {SMALL_TENSOR}", "layernorm.weight's "),
        (faults.other_weights, "pp_1f1b model.num_hidden_layers=4", "layers.3."),
        (faults.tied_gradients_apart, TIED_ENDS, "gradient deviates by"),
        (faults.tied_at_one_end, TIED_ENDS, "the parameter of embed_tokens.weight is not the same on all ranks"),
        (faults.tied_norm_twice, TIED_ENDS, "'s first moments"),
        (faults.clipped_elsewhere, "tp precision=bf16_mixed", "first moments"),
        (faults.without_decay, "fsdp_full_shard precision=bf16_mixed", "with weight_decay=0.0 in step 1"),
        long(faults.without_decay, "zero3 precision=bf16_mixed", "with weight_decay=0.0 in step 1"),
        (faults.vectors_learn_faster, "ddp precision=bf16_mixed", "with lr=0.0006 in step 1"),
        (faults.rate_doubled_later, "ddp precision=bf16_mixed", "with lr=0.0006 in step 6"),
        (faults.decay_undone, "zero2 precision=bf16_mixed", "is not that of AdamW"),
        (faults.matrix_left_out_once, "fsdp_full_shard precision=bf16_mixed", "elements by AdamW in each of"),
        *(
            case(faults.gradient_left_out_once, f"{options} {ONE_MICRO_BATCH}", "gradient at step 4")
            for case, options in (
                (pytest.param, "fsdp_full_shard precision=bf16_mixed"),
                (long, "zero3"),
                (long, "zero2 precision=bf16_mixed"),
            )
        ),
        (
            faults.lower_stage,  # without accumulation both stages send the same
            "zero2 train.micro_batch=4 strategy.options.overlap_comm=false strategy.options.reduce_bucket_size=30000",
            "gradients: rank 0 held",
        ),
        (faults.bias_summed_twice, "tp model=gpt_tiny", ".bias's first gradients"),
        (faults.products_not_kept, "ddp checkpointing=selective", "a step ran"),
        (
            faults.every_product_kept,
            "ddp checkpointing=selective checkpointing.saved_products=every_second",
            "a step ran",
        ),
        (
            faults.every_layer_recomputed,
            "ddp checkpointing=every_n",
            "rank 0 ran 4 second forwards of a layer in a step, and 2 are expected",
        ),
        (faults.never_compiled, COMPILED, "ran its layers operator by operator"),
        (faults.autotp_rows_not_summed, "zero1_tp", "along tp all_reduce, which is 0.71 x the"),
        (faults.last_layer_not_offloaded, OFFLOADED, "activations on the host, and"),
        (faults.stale_copy, OFFLOADED, "gradient deviates"),
        (faults.keys_in_other_order, f"cp {PRODUCT}", "loss deviates"),
        (faults.replicas_apart, HYBRID, "dp_replicate reduce, which is 0.00 x"),
        (faults.parts_of_the_loss_kept, f"ddp {CHUNKED}", "0 second forwards"),
        (faults.parts_of_the_loss_mixed, f"tp_sp {CHUNKED}", "loss deviates"),
        (faults.other_kernel_of_the_optimizer, "ddp train.fused_optimizer=false", "ran the optimizer as fused"),
        (faults.eager_on_one_rank, "ddp", "attention ran as flash and math, and not as one kernel on all ranks"),
        (faults.fused_attention, "ddp model.attention=eager", "attention ran as flash, and model.attention=eager"),
        *(long(getattr(faults, fault.__name__), str(combination), problem) for fault, combination, problem in REPLAYED),
        *(
            long(fault, strategy, problem)
            for fault, strategy, problem in (
                (faults.halved, "ddp", "layers.1.input_layernorm.weight"),
                (faults.vocabulary_shifted, f"tp {SMALL_TENSOR}", "loss deviates"),
                (faults.tied_gradients_twice, TIED_ENDS, "norm of embed_tokens.weight's first gradients"),
                (faults.every_layer_recomputed, "ddp checkpointing=attention", "a step ran"),
                (faults.never_recomputed, "ddp checkpointing=attention", "0 second forwards"),
                (faults.summed, "ddp", "gradient deviates by"),
                (faults.autotp_not_marked, "zero1_tp", "first moments"),  # clipped by a norm that is too small
                (faults.autotp_parts_swapped, "zero1_tp", "gradient deviates"),
                (faults.heads_in_other_order, f"cp_ulysses {PRODUCT}", "loss deviates"),
                (faults.tensor_parallel_dropped, f"tp_pp world_size=4 {PRODUCT}", "2 of 4 ranks hold them"),
                (
                    faults.autotp_dropped,
                    "zero1_tp",
                    "layers.0.self_attn.q_proj.weight: 2 of 2 ranks hold them, and the layout has 1 copies",
                ),
                (
                    faults.shards_not_offloaded,
                    "fsdp_full_shard strategy.offload=parameters",
                    "was built to keep nothing on the host",
                ),
                (faults.halved, "zero2 precision=bf16", "layers.1.input_layernorm.weight"),
                (faults.scale_never_taken_out, "ddp precision=fp16_mixed", "gradient deviates"),
                (faults.lower_stage, "zero2", "along dp_shard reduce, which is 0.50 x the"),
                (faults.halved, "fsdp_full_shard", "layers.1.input_layernorm.weight"),
                (faults.never_recomputed, "fsdp_full_shard checkpointing=full", "0 second forwards of a layer"),
                (faults.never_recomputed, "pp_1f1b checkpointing=full", "0 second forwards of a layer"),
                (faults.rows_not_summed, "tp", "loss deviates"),
                (faults.norm_of_one_stage, "pp_gpipe", "the global gradient norm is not the same"),
                (faults.norms_not_summed, GPT_SP, "input_layernorm.bias is not the same"),
                (faults.positions_not_summed, GPT_SP, "embed_positions.weight"),
                (faults.compiled_again, COMPILED, "in the timed steps"),
                (faults.positions_from_the_start, f"cp {PRODUCT}", "gradient deviates"),
                (faults.positions_from_the_start, f"cp_ulysses {PRODUCT}", "gradient deviates"),
                (faults.own_keys_alone, f"cp {PRODUCT}", "along cp gather, which is 0."),
                (faults.own_positions_alone, f"cp_ulysses {PRODUCT}", "along cp all_to_all, which is 0.00 x"),
                (faults.sharding_over_all, HYBRID, "1 of 4 ranks hold them"),
            )
        ),
    ],
)
def test_a_fault_in_the_ranks_is_an_error(results: Path, fault: Entry, strategy: str, problem: str) -> None:
    record = run_with(results, *f"{TWO_LAYERS} strategy={strategy}".split(), entry=fault)
    assert_not_proven(record, problem)
    row = record.row
    assert row.get("tokens_per_second") is None and row.get("peak_allocated_bytes") is None


def test_a_failed_reference_is_an_error(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_runs, "worker_entry", faults.not_finite)
    row = run_with(results, "strategy=ddp", "train.seed=5").row
    assert row["status"] == "error"
    assert row["reason"].startswith("the reference single-none-tiny-w1-"), row["reason"]
    assert "failed, and nothing else proves this run: not proven: the loss is not" in row["reason"]
    assert row["reference"].startswith("none: the reference single-none-tiny-w1-")


def test_a_block_missing_in_the_memory_log_is_an_error(results: Path) -> None:
    row = run_with(results, "strategy=ddp", entry=faults.block_unlogged).row
    assert row["status"] == "error" and "are logged at the peak of" in row["reason"]


def test_an_incomplete_copy_of_a_tensor_is_not_a_number() -> None:
    """Two ranks hold shards A and B, and a third holds A too: it has no counterpart, so it cannot agree."""
    halves = (((0, 2),), ((2, 4),))

    def rank(box: tuple[tuple[int, int], ...], square: float) -> RankReport:
        return RankReport.from_json({"last_gradients": [["w", [4], box, square, 1.0]]})

    empty = rank(((4, 4),), 0.0)
    whole = [rank(halves[0], 3.0), rank(halves[1], 1.0), empty, empty]
    assert copies_of_tensors([rank.last_gradients for rank in whole]) == {"w": [(4.0, 2.0)]}
    first, second = copies_of_tensors([rank.last_gradients for rank in (*whole, rank(halves[0], 3.0))])["w"]
    assert first == (4.0, 2.0) and all(map(math.isnan, second))


def test_a_missing_loss_makes_the_mean_not_a_number() -> None:
    assert _mean([1.0, 3.0]) == 2.0 and math.isnan(_mean([1.0, None])) and math.isnan(_mean([]))


@pytest.mark.parametrize(("moment", "expected"), [("first_gradients", 0.5), ("last_gradients", 0.1)])
def test_a_gradient_below_rounding_errors_is_compared_with_them_at_the_last_step(moment: str, expected: float) -> None:
    """At the first step, and in fp32, every gradient is compared with itself however small it is."""
    small = 0.2 * 2.0**-8  # of the average; between two 16-bit runs it may differ by as much as itself

    def rank(query: float) -> RankReport:
        entries = [["v.weight", [4], ((0, 4),), 8.0, 0.5], ["q.weight", [4], ((0, 4),), query**2, query]]
        still = [[name, shape, box, 1.0, 0.5] for name, shape, box, _, _ in entries]
        moments = dict.fromkeys(("first_gradients", "first_moments", "last_gradients"), still)
        losses = {"rank": 0, "losses": [1.0], "grad_norms": [1.0]}
        return RankReport.from_json(losses | moments | {moment: entries})

    def deviation(query: float, compute: str) -> float:
        return max(difference.value for difference in differences(rank(2 * small), [rank(query)], compute))

    assert deviation(small, "float32") == pytest.approx(0.5)
    assert deviation(small, "bfloat16") == pytest.approx(expected)
    assert deviation(2.0, "bfloat16") > 100  # larger than it should be, it is found
