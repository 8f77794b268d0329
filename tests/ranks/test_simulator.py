"""Ranks of every engine on a simulated CUDA device, held to the plan for CUDA: every case is a real model's width.

What a step runs is counted by the harness's own profiler from the operators that would run on a GPU. See
docs/development/testing.md for what this does not show.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from harness.config.schema import RunConfig
from harness.cost_model.communication import expected_bytes
from harness.cost_model.flops import executed_flops, takes_fused_kernel
from harness.cost_model.memory import estimate_memory, saved_bytes
from harness.cost_model.rank_memory import fullest_rank
from harness.layout.layout import Layout, resolve_layout
from harness.layout.partition import split_into_stages
from harness.layout.state_widths import StateWidths
from harness.proof.step import checkpointing_problems, kernel_problems, schedule_problems, volume_problems
from harness.records.rank_report import FUSED_KERNELS, RankReport
from harness.simulator.process import StepRequest
from tests.support.commands import compose_config, long, widths_of
from tests.support.simulated_steps import simulate_steps

ACTIVATION_TOLERANCE = 1e-3  # token ids of other micro-batches share a storage with those that are saved


# The relative accuracy of the plan's peak; gathers, reductions and passes are planned at few moments of a step.
EXACT_PEAK, PEAK_OF_MOMENTS = 1e-3, 0.02

LAYOUTS = ("single x 1", "tp x 8", "tp_sp x 8", "cp x 4 strategy.data_parallel=fsdp train.global_batch=2")


@dataclass(frozen=True)
class Case:
    """A configuration, and one rank of every pipeline stage, whose work all other ranks of the stage do as well.

    Under stages 1 and 2 of DeepSpeed, which divide all parameters as one tensor, every rank holds other parameters.
    """

    config: RunConfig
    layout: Layout

    @property
    def partitions_flat(self) -> bool:
        return self.layout.uses_deepspeed_zero and self.layout.zero_stage < 3

    @property
    def ranks(self) -> range:
        stage_ranks = 1 if self.partitions_flat else self.layout.world_size // self.layout.pp
        return range(0, self.layout.world_size, stage_ranks)

    @property
    def requests(self) -> list[StepRequest]:
        return [StepRequest(self.config, self.layout, rank, device_bytes=None) for rank in self.ranks]


def case(line: str) -> Case:
    """Return the case of a line such as `tp x 2 model=7b`, on which every data-parallel rank has one micro-batch."""
    strategy, world, *overrides = re.split(r"(?: x)? ", line)
    config = compose_config(f"strategy={strategy}", "train.global_batch=1", *overrides)
    return Case(config, resolve_layout(config.strategy, int(world)))


Reports = Mapping[str, list[RankReport]]


def simulated(lines: list[str], module: str = "tests.support.simulated_steps", *arguments: str) -> Reports:
    """Return the reports of every case's ranks, all of them simulated in one process."""
    cases = {line: case(line) for line in lines}
    requests = [request for entry in cases.values() for request in entry.requests]
    reports = iter(simulate_steps(requests, module=(module, *arguments)))
    return {line: [next(reports) for _ in entry.ranks] for line, entry in cases.items()}


def problems(entry: Case, ranks: list[RankReport]) -> list[str]:
    """Return where the ranks did not do what the plan for CUDA says: operations, kernels, volume, activations, peak."""
    config, layout = entry.config, entry.layout
    failures = [f"{rank.status}: {rank.reason} {rank.traceback}" for rank in ranks if rank.status != "ok"]
    if failures:
        return failures
    widths = widths_of(config, layout)
    flops = sum(rank.profiled.flops for rank in ranks) * (layout.world_size // len(ranks))
    planned_flops = executed_flops(config, layout, "cuda", widths.recomputes_last_projection)
    result = [*kernel_problems(config, ranks)]
    result += [f"{flops} operations, planned {planned_flops}"] if flops != planned_flops else []
    is_fused = {kernel in FUSED_KERNELS for rank in ranks for kernel in rank.profiled.attention_kernels}
    if is_fused != {takes_fused_kernel(config, "cuda")}:
        result.append(f"attention ran as {ranks[0].profiled.attention_kernels}")
    for rank in ranks:
        expected, padded = (
            expected_bytes(config, layout, widths, rank.rank, is_padded=is_padded) for is_padded in (False, True)
        )
        if config.strategy.literature:  # else the library sends more than the papers count
            result += volume_problems(layout, rank, expected, padded)
        result += [*checkpointing_problems(config, layout, rank), *schedule_problems(config, layout, rank)]
        saved = rank.profiled.activation_bytes
        planned = saved_bytes(config, layout, "cuda", layout.coordinates(rank.rank)["pp"])[0]
        if saved != pytest.approx(planned, rel=ACTIVATION_TOLERANCE):
            result.append(f"rank {rank.rank} saved {saved} bytes for backward, {saved / planned:.4f} x the plan")
        result += allocator_problems(layout, rank)
    return result + peak_problems(entry, widths, ranks)


MASK_BYTES = 16  # of the two numbers by which the profiled step knows a mask of dropout


def allocator_problems(layout: Layout, rank: RankReport) -> list[str]:
    """Return where the logged peak, its parts, and the allocator's model disagree.

    The allocator's model has nothing of what the profiled step itself keeps, which is something of each mask.
    """
    parts, peak = rank.profiled.at_peak.bytes, rank.profiled.peak_allocated_bytes
    roles = {part.role for part in rank.profiled.at_peak.parts}
    on_device = {"parameters": "parameter", "optimizer": "optimizer"}
    expected = {role for kind, role in on_device.items() if kind not in layout.offloaded_state}
    result = [] if expected <= roles else [f"the parts at the peak are {roles}"]
    readings = (parts, peak, rank.peak_requested_bytes, rank.peak_allocated_bytes, rank.peak_reserved_bytes)
    kept = peak - readings[2]
    is_of_masks = (
        kept == 0 if rank.profiled.masks.elements == 0 else 0 < kept < MASK_BYTES * 100 and not kept % MASK_BYTES
    )
    if not (parts == peak and is_of_masks and readings[2] <= (readings[3] or 0) <= (readings[4] or 0)):
        result.append(f"parts, peak, requested, allocated and reserved bytes are {readings}")
    return result


def peak_problems(entry: Case, widths: StateWidths, ranks: list[RankReport]) -> list[str]:
    """Return by how much the highest peak of the ranks' storages is not the plan's, where it can be compared.

    It must be that of the rank which simulate.rank=peak chooses. Where FSDP2 keeps parameters whole over several
    micro-batches, the plan may be 6 % too high.
    """
    config, layout = entry.config, entry.layout
    accumulates = layout.grad_accumulation_steps(config.train) > 1
    if layout.data_parallel == "fsdp" and layout.zero_stage < 3 and accumulates:
        return []
    takes_moments = layout.data_parallel == "fsdp" or layout.pp_enabled or layout.offload != "none"
    peaks = {rank.rank: rank.profiled.peak_allocated_bytes or 0 for rank in ranks}
    peak = max(peaks.values())
    if entry.partitions_flat:
        chosen = fullest_rank(config, layout, widths, split_into_stages(config.model, layout))
        if peaks[chosen] < peak:
            return [f"rank {chosen} has {peaks[chosen]} bytes at its peak, others {peak}"]
    planned = estimate_memory(config, layout, widths, "cuda").peak_bytes
    is_right = peak == pytest.approx(planned, rel=PEAK_OF_MOMENTS if takes_moments else EXACT_PEAK)
    return [] if is_right else [f"the peak is {peak} bytes, {peak / planned:.4f} x the plan"]


TWO_LAYERS = "model.num_hidden_layers=2"

FOUR_LAYERS, SHORT = "model.num_hidden_layers=4", "train.seq_len=64"

TWO_NODES, IN_8_BITS = (
    "cluster.gpus_per_node=8 train.seq_len=64 train.global_batch=16",
    "+strategy.options.zero_quantized_weights=true",
)

EVERY_SECOND = "checkpointing=selective checkpointing.saved_products=every_second"

FOUR_PARTS = "train.loss_chunks=4"

FOUR_PASSES = "model.vocab_size=4000 train.global_batch=4 train.seq_len=512"

TALL, TIED = "model.vocab_size=20001 model.num_hidden_layers=2 train.seq_len=16", "model.tie_word_embeddings=true"

MIXTURE = f"{TWO_LAYERS} model.routing=balanced train.seq_len=512"

SMALL_VOCABULARY_EAGER = "model.vocab_size=1024 model.attention=eager"

CASES = [
    f"single x 1 model=1b precision=fp32 {TWO_LAYERS}",
    f"cp x 2 model=7b precision=fp32 {TWO_LAYERS} strategy.data_parallel=ddp",
    f"cp x 2 model=7b precision=bf16_mixed {TWO_LAYERS}",
    f"cp_ulysses x 16 model=8b precision=bf16_mixed {TWO_LAYERS}",  # twice as many ranks as heads of keys
    f"tp_sp x 8 model=70b precision=bf16_mixed {TWO_LAYERS}",
    f"tp x 2 model=1b precision=fp32 {TWO_LAYERS} checkpointing=selective",
    # The peak is in the first layer's MLP, when both of its widening matrices have made gradients of their input.
    f"tp x 8 model=7b precision=fp32 {TWO_LAYERS} checkpointing=full",
    f"fsdp_full_shard x 4 model=1b precision=bf16_mixed {TWO_LAYERS} train.global_batch=4 checkpointing=full",
    # The embedding's last reduction is alive until the next micro-batch, and an end of backward is the peak.
    f"fsdp_full_shard x 2 model=350m precision=fp32 {TWO_LAYERS} train.global_batch=4 train.seq_len=64",
    f"fsdp_full_shard x 2 model=350m precision=fp32 {TWO_LAYERS} train.global_batch=2 train.seq_len=64",
    f"ddp x 2 model=7b precision=bf16_mixed {TWO_LAYERS} train.global_batch=2",
    "pp_interleaved x 2 model=7b precision=bf16_mixed model.num_hidden_layers=4 train.global_batch=2",
    f"zero2 x 2 model=1b precision=fp32 {TWO_LAYERS} train.global_batch=2 checkpointing=selective {SHORT}",
    f"fsdp_full_shard x 2 model=8b precision=bf16_mixed {TWO_LAYERS} train.global_batch=2 {EVERY_SECOND}",
    # The head's gradients of the parts of a loss are summed in place, and those of a tied matrix.
    f"zero3 x 256 model=3b precision=bf16 {TWO_LAYERS} train.global_batch=256 {SHORT} {FOUR_PARTS}",
    # Gradients larger than a bucket are kept one after another, as activations are freed.
    f"zero2 x 1 model=350m precision=bf16_mixed {TWO_LAYERS} {FOUR_PASSES}",
    # A tall vocabulary: what a rank owns is copied whole, a tied matrix has three gradients, and norms are in fp64.
    f"zero1 x 3 model=tiny precision=bf16_mixed {TALL} train.global_batch=3",
    f"zero2 x 2 model=tiny precision=bf16 {TALL} {TIED} train.global_batch=2",
    f"ddp x 2 model=1b precision=fp32 {TWO_LAYERS} train.global_batch=2 strategy.engine=accelerate",
    # Experts: divided, and groups of their own beside their layers.
    f"ep x 4 model=mixtral_8x7b precision=fp32 {MIXTURE} train.global_batch=4 strategy.ep=4 checkpointing=selective",
    f"fsdp_ep x 4 model=mixtral_8x7b precision=bf16_mixed {MIXTURE} train.global_batch=4",
    # Fewer experts than shards, and layers that are large beside activations.
    f"fsdp_shard_grad_op x 16 model=mixtral_8x7b precision=fp32 {MIXTURE} train.global_batch=16 checkpointing=full",
]

LONG_CASES = (
    [
        f"{layout} model={model} precision={precision} {TWO_LAYERS} checkpointing={checkpointing}"
        for layout in LAYOUTS
        for precision in ("fp32", "bf16_mixed")
        for model, kinds in (
            ("1b", ("none", "selective", "attention")),
            ("7b", ("none", "full", "selective", "attention", "every_n")),
            ("70b", ("none", "selective", "attention")),
        )
        for checkpointing in kinds
    ]
    + [
        f"{schedule} x 4 model=7b precision={precision} model.num_hidden_layers=8 train.global_batch=4"
        for schedule in ("pp_gpipe", "pp_1f1b", "pp_interleaved", "pp_zero_bubble")
        for precision in ("fp32", "bf16_mixed")
    ]
    + [
        f"zero3 x 4 model=7b precision=bf16_mixed {TWO_LAYERS} train.global_batch=8 checkpointing=full",
        f"zero1 x 2 model=1b precision=bf16_mixed {TWO_LAYERS} train.global_batch=2 {SHORT}",
        f"zero3 x 256 model=3b precision=bf16 {TWO_LAYERS} train.global_batch=256 {SHORT}",
        f"zero1 x 5 model=tiny precision=bf16 {TALL} train.global_batch=5",
        f"tp_sp x 2 model=qwen3_30b_a3b precision=bf16_mixed {MIXTURE} checkpointing=full",
        "single x 1 model=1b precision=fp32",
        "single x 1 model=7b precision=bf16_mixed checkpointing=full",
        "tp x 8 model=7b precision=fp32",
        "fsdp_full_shard x 8 model=7b precision=bf16_mixed train.global_batch=8",
        "tp_sp x 8 model=70b precision=bf16_mixed checkpointing=selective",
        f"fsdp_full_shard x 8 model=8b precision=bf16_mixed train.global_batch=8 {EVERY_SECOND}",
        f"tp_sp x 8 model=70b precision=bf16_mixed {TWO_LAYERS} {EVERY_SECOND}",
        f"tp x 2 model=7b precision=fp32 {TWO_LAYERS} model.attention=eager {EVERY_SECOND}",
        f"tp x 8 model=gpt_1.3b model.vocab_size=51200 precision=fp32 {TWO_LAYERS} {EVERY_SECOND}",
        f"single x 1 model=gpt_1.3b model.dropout=0.1 precision=fp32 {TWO_LAYERS} {EVERY_SECOND}",
        f"cp x 2 model=7b precision=bf16_mixed {TWO_LAYERS} strategy.data_parallel=ddp {EVERY_SECOND}",
        *(
            f"cp_ulysses x 4 model={model} {TWO_LAYERS} checkpointing={checkpointing}"
            for model in ("7b precision=fp32", "8b precision=fp32", "70b precision=bf16_mixed")
            for checkpointing in ("none", "full", "selective", "attention")
        ),
        f"pp_1f1b x 2 model=8b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=4 {EVERY_SECOND}",
        *(
            f"{name} x 2 model=7b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=8 checkpointing=full"
            for name in ("pp_zbv", "pp_dualpipev")
        ),
        "fsdp_full_shard x 8 strategy.secondary_shards=4 model=7b precision=bf16_mixed train.global_batch=16"
        f" {TWO_LAYERS}",
        f"zero3_plus_plus x 16 model=7b precision=bf16_mixed {TWO_LAYERS} {TWO_NODES} train.global_batch=32",
        f"zero3_plus_plus x 16 model=gpt_1.3b model.vocab_size=51200 precision=bf16 {TWO_LAYERS} {TWO_NODES}",
        f"zero3_plus_plus x 16 model=7b precision=fp16_mixed {TWO_LAYERS} {TWO_NODES} checkpointing=full",
        f"zero3 x 16 model=7b precision=bf16 model.vocab_size=1024 {TWO_LAYERS} {TWO_NODES} {IN_8_BITS}",
        f"zero3 x 16 model=3b precision=fp32 {TWO_LAYERS} {TWO_NODES} {IN_8_BITS}",
        f"zero3 x 4 model=7b precision=bf16_mixed {TWO_LAYERS} train.global_batch=4 {EVERY_SECOND}",
        "3d x 8 model=7b precision=bf16_mixed train.global_batch=4",
        "fsdp_hybrid_shard x 8 model=7b precision=bf16_mixed train.global_batch=8",
        "fsdp_tp x 8 model=70b precision=bf16_mixed train.global_batch=4",
        f"fsdp_no_shard x 2 model=7b precision=bf16_mixed {TWO_LAYERS} train.global_batch=4",
        f"fsdp_shard_grad_op x 2 model=7b precision=bf16_mixed {TWO_LAYERS} train.global_batch=4",
        f"zero1_torch x 2 model=7b precision=fp32 {TWO_LAYERS} train.global_batch=4",
        "fsdp_pp x 4 model=7b precision=bf16_mixed model.num_hidden_layers=4 train.global_batch=8",
        f"zero1_tp x 4 model=7b precision=bf16_mixed {TWO_LAYERS} train.global_batch=4",
        f"zero1_defaults x 2 model=7b precision=bf16_mixed {TWO_LAYERS} train.global_batch=4",
        f"zero2_tuned x 4 model=7b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=4 {SHORT}",
        f"zero2 x 4 model=7b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=8 {SHORT}",
        f"zero2 x 4 model=7b precision=fp32 {FOUR_LAYERS} train.global_batch=4 {SHORT}",
        f"zero_offload x 4 model=7b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=4 {SHORT}",
        f"zero_offload x 4 model=7b precision=fp32 {FOUR_LAYERS} train.global_batch=4 {SHORT}",
        f"zero3 x 4 model=7b precision=bf16 {TWO_LAYERS} train.global_batch=4 {SHORT}",
        f"zero3 x 4 model=7b precision=fp32 {TWO_LAYERS} train.global_batch=4 checkpointing=selective",
        f"zero3 x 8 model=7b precision=bf16_mixed {TWO_LAYERS} train.global_batch=8",
        f"zero3 x 4 model=7b precision=bf16_mixed {TWO_LAYERS} train.global_batch=4 strategy.offload=parameters",
        f"zero3_defaults x 4 model=1b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=4 {SHORT}",
        f"zero3_tuned x 4 model=7b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=4 {SHORT}",
        f"zero3_tuned x 4 model=7b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=4 checkpointing=full {SHORT}",
        # Tied weights, whose gradients are summed. A bucket is reduced in the middle of ten layers.
        f"zero1_defaults x 2 model=1b precision=bf16_mixed {TWO_LAYERS} train.global_batch=2 {SHORT}",
        f"zero1 x 2 model=1b precision=bf16_mixed {TWO_LAYERS} train.global_batch=4 {SHORT} strategy.offload=optimizer",
        f"zero2 x 4 model=1b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=4 {SHORT}",
        f"zero2_defaults x 4 model=1b precision=bf16_mixed {FOUR_LAYERS} train.global_batch=8 {SHORT}",
        f"zero2_defaults x 4 model=1b precision=fp32 {FOUR_LAYERS} train.global_batch=4 {SHORT}",
        f"zero3_defaults x 2 model=1b precision=fp32 model.num_hidden_layers=10 train.global_batch=2 {SHORT}",
        f"zero3 x 2 model=1b precision=bf16_mixed {TWO_LAYERS} train.global_batch=4 {SHORT} strategy.engine=accelerate",
        "fsdp_full_shard x 2 model=tiny train.global_batch=2 strategy.engine=accelerate",
        "fsdp_hybrid_shard x 4 model=tiny precision=bf16_mixed train.global_batch=4 strategy.engine=accelerate",
    ]
    + [
        f"{layout} model={model} precision={precision} {MIXTURE} checkpointing={kind} train.global_batch={batch}"
        for layout, batch in (
            ("single x 1", 1),
            ("ddp x 2", 2),
            ("ep x 2", 2),
            ("fsdp_ep x 4", 4),
            ("fsdp_full_shard x 4", 4),
            ("zero1 x 2", 2),
            ("zero2 x 2", 2),
            ("tp x 2", 1),
        )
        for model in ("mixtral_8x7b", "qwen3_30b_a3b")
        for precision in ("fp32", "bf16_mixed")
        for kind in ("none", "full", "selective")
    ]
    # The peak is in attention, in a second forward, at a sum of the loss's parts, or at the embedding, and elsewhere.
    + [
        f"{layout} model={model} model.num_hidden_layers={layers} checkpointing={checkpointing}"
        for layout, model, layers, checkpointing in (
            ("tp x 2", "7b precision=bf16_mixed", 3, "full"),
            ("tp x 4", "7b precision=fp32 train.loss_chunks=8", 1, "full"),
            ("tp x 4", "7b precision=bf16_mixed train.loss_chunks=16", 3, "selective"),
            ("tp_sp x 2", "8b precision=fp32 train.loss_chunks=16", 3, "none"),
            ("tp_sp x 2", "7b precision=fp32 train.loss_chunks=16", 4, "every_n checkpointing.every=3"),
            ("tp_sp x 8", "7b precision=bf16_mixed train.micro_batch=2 train.global_batch=2", 3, "full"),
            ("tp_sp x 8", "70b precision=fp32 train.seq_len=512", 4, "full"),
            ("tp_sp x 8", "gpt_1.3b model.vocab_size=51200 precision=bf16_mixed train.loss_chunks=16", 3, "full"),
            ("tp x 8", "gpt_1.3b model.vocab_size=51200 model.attention=eager precision=fp32", 4, "selective"),
            ("single x 1", "gpt_1.3b model.attention=eager precision=bf16_mixed", 3, "full"),
            ("single x 1", "gpt_1.3b model.attention=eager model.dropout=0.1 precision=fp32", 2, "attention"),
            ("tp x 4", "gpt_1.3b model.vocab_size=51200 model.dropout=0.1 precision=fp32", 2, "full"),
            ("tp_sp x 4", "gpt_1.3b model.vocab_size=51200 model.dropout=0.1 precision=bf16_mixed", 2, "selective"),
            ("single x 1", "8b precision=fp32 train.loss_chunks=8", 3, "selective"),
            ("single x 1", "8b precision=fp32 train.seq_len=1024 train.loss_chunks=2", 1, "selective"),
            ("cp x 2", f"gpt_1.3b {SMALL_VOCABULARY_EAGER} precision=fp32 strategy.data_parallel=ddp", 2, "selective"),
            ("fsdp_full_shard x 8", "1b precision=fp32 train.loss_chunks=16 train.global_batch=8", 4, "selective"),
        )
    ]
)


@functools.cache
def reports(is_long: bool) -> Reports:
    return simulated(LONG_CASES if is_long else CASES)


@pytest.mark.parametrize(
    ("line", "is_long"),
    [
        *((line, False) for line in CASES),
        *(long(line, True) for line in LONG_CASES),
    ],
)
def test_a_rank_on_cuda_does_what_the_plan_says(line: str, is_long: bool) -> None:
    assert problems(case(line), reports(is_long)[line]) == []


# A tensor-parallel rank, and a sharded one, which resizes storages between operators.
ASKED = [line for line in CASES if line.startswith(("tp x 8", "fsdp_full_shard x 4"))]


def test_gradients_need_not_be_sampled_after_every_operator() -> None:
    """Only what may allocate makes a new peak. A reading of memory takes longer than a small kernel."""
    for line, always in simulated(ASKED, "tests.support.simulated_faults", "always_asked").items():
        assert [rank.reason for rank in always] == [""] * len(always)
        for rank, other in zip(reports(False)[line], always, strict=True):
            assert rank.profiled == other.profiled, line
