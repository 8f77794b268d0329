"""The proof that a step did the layout's work: operations, kernels, recomputation, schedule and bytes sent."""

import math
from collections.abc import Iterator, Mapping, Sequence

from harness.config.schema import Device, RunConfig
from harness.cost_model.expert_communication import RoutedRows
from harness.cost_model.flops import executed_flops_with, recomputed_layers, scaled_flops
from harness.cost_model.memory import saved_bytes
from harness.cost_model.pipeline import max_in_flight_micro_batches, split_passes
from harness.cost_model.ring import LAYOUT
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import stages_of_rank
from harness.layout.rank_groups import is_data_parallel_axis
from harness.layout.state_widths import StateWidths
from harness.metrics.columns import attention_kernels, communication_entries, executed_flops
from harness.records.rank_report import FUSED_KERNELS, RankReport

FLOPS_TOLERANCE = 0.01

OFFLOAD_TOLERANCE = 0.03  # the accuracy to which the cost model's activations are tested
# What operations along the axes of data and sequences do; along the other axes each operation is counted by itself.
DATA_KINDS = {"all_gather": "gather", "broadcast": "gather"} | dict.fromkeys(
    ("all_reduce", "reduce_scatter", "reduce"), "reduce"
)

# The least share of float8's range that a scaled matrix fills: scales of rows are rounded down to a power of two.
SCALED_RANGES = {"tensorwise": 1.0, "rowwise": 0.5}

ROUNDING_BYTES = 0.5  # of sums of shares such as two thirds of the bytes of a call, which is a whole number


def flops_problems(
    config: RunConfig, layout: Layout, widths: StateWidths, ranks: Sequence[RankReport]
) -> Iterator[str]:
    """Yield a problem unless all ranks together ran the model's operations once, and the checkpointed ones again.

    The attention kernel that ran decides whether backward recomputes the scores.
    """
    executed = executed_flops(ranks)
    if executed is None:
        return
    is_fused = not set(attention_kernels(config, ranks)).isdisjoint(FUSED_KERNELS)
    expected = executed_flops_with(config, layout, is_fused, widths.recomputes_last_projection)
    if abs(executed - expected) > FLOPS_TOLERANCE * expected:
        yield (
            f"a step ran {executed} floating-point operations, which is {executed / expected:.3f} x the {expected} of"
            f" this model with checkpointing={config.checkpointing.name}"
        )


def kernel_problems(config: RunConfig, ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield where ranks ran several attention kernels, another than model.attention, or another optimizer."""
    if any(rank.devices != 1 for rank in ranks):  # their devices are driven by threads that are not observed
        return
    kernels = attention_kernels(config, ranks)
    by_rank = {tuple(attention_kernels(config, [rank])) for rank in ranks}
    if len(kernels) != 1 or len(by_rank) != 1:
        names = " and ".join(kernels) or "no known kernel"
        yield f"attention ran as {names}, and not as one kernel on all ranks"
    elif (kernels == ["eager"]) != (config.model.attention == "eager"):
        yield f"attention ran as {kernels[0]}, and model.attention={config.model.attention}"
    has_forms = any(rule.kernels for rule in config.optimizer.spec.rules)
    expected = ("fused" if config.train.fused_optimizer else "foreach") * has_forms
    for rank in ranks:
        executed = "+".join(rank.profiled.optimizers)
        if executed != expected:
            yield (
                f"rank {rank.rank} ran the optimizer as {executed or 'an unknown kernel'}, and train.fused_optimizer="
                f"{str(config.train.fused_optimizer).lower()}"
            )


def recipe_problems(config: RunConfig, layout: Layout, rank: RankReport) -> Iterator[str]:
    """Yield a problem unless all projections of a rank multiplied by the recipe, and all scales fitted their matrices.

    A scale brings the largest magnitude of a matrix, or of each of its rows, to the end of the dtype's range, or to the
    next power of two below it.
    """
    recipe, scaled = config.precision.recipe, dict(rank.profiled.scaled_flops)
    flops = scaled_flops(config, layout, rank.rank) if config.precision.has_recipe else 0
    if scaled != ({recipe: flops} if flops else {}):
        by_recipe = " and ".join(f"{count} {name}" for name, count in scaled.items()) or "none"
        yield (
            f"precision: rank {rank.rank} multiplied scaled matrices in {by_recipe} operations of a step, and {flops}"
            f" by precision.recipe={recipe} are expected"
        )
    least = 0.0 if layout.tp_enabled else SCALED_RANGES.get(recipe, 0.0)  # one scale for the parts of several ranks
    if rank.profiled.least_scaled_range is not None and rank.profiled.least_scaled_range < least:
        yield (
            f"precision: rank {rank.rank} scaled a matrix to {rank.profiled.least_scaled_range:.3f} of the range of"
            f" float8, and precision.recipe={recipe} fills at least {least}"
        )


def compile_problems(config: RunConfig, rank: RankReport) -> Iterator[str]:
    """Yield where layers were not run as train.compile says, and where the compiler ran in the timed steps."""
    is_compiled = config.train.compile
    # The activation function of a library's model, which is never compiled, may be many operators.
    is_observable = model_profile(config.model).is_project_decoder and rank.devices == 1
    if is_observable and rank.profiled.layers_compiled != is_compiled:
        mode = "operator by operator" if is_compiled else "compiled"
        yield f"rank {rank.rank} ran its layers {mode}, and train.compile={str(is_compiled).lower()}"
    if rank.graphs_in_timed_steps:
        yield (
            f"rank {rank.rank} compiled {rank.graphs_in_timed_steps} graphs in the timed steps: choose"
            " more train.warmup_steps"
        )


def checkpointing_problems(config: RunConfig, layout: Layout, rank: RankReport) -> Iterator[str]:
    """Yield a problem if other forwards ran a second time per micro-batch than checkpointing recomputes.

    The chunks of the loss are recomputed as well, where there are several.
    """
    stages, recomputations = stages_of_rank(config.model, layout, rank.rank), rank.profiled.recomputations
    calls, chunks = sum(recomputed_layers(config, layout, stage) for stage in stages), config.train.loss_chunks
    calls += chunks if chunks > 1 and stages[-1].holds_head else 0
    expected = layout.grad_accumulation_steps(config.train) * calls
    if recomputations != expected:
        chunks_text = ", including the chunks of the loss" if chunks > 1 else ""
        yield (
            f"checkpointing={config.checkpointing.name}: rank {rank.rank} ran {recomputations} second forwards of a"
            f" layer in a step, and {expected} are expected{chunks_text}"
        )


def offload_problems(config: RunConfig, layout: Layout, rank: RankReport) -> Iterator[str]:
    """Yield a problem unless all activations, or none, were moved to the host, as offload_activations says.

    A GPU's kernels may save more than those that the plan is for, so that only less is a problem there.
    """
    stage, is_offloaded = layout.coordinates(rank.rank)["pp"], config.checkpointing.offload_activations
    device: Device = "cpu" if rank.device_name == "cpu" else "cuda"
    expected = saved_bytes(config, layout, device, stage)[1] if is_offloaded else 0
    offloaded = rank.profiled.offloaded_activation_bytes
    upper_bound = math.inf if is_offloaded and device == "cuda" else (1 + OFFLOAD_TOLERANCE) * expected
    if not (1 - OFFLOAD_TOLERANCE) * expected <= offloaded <= upper_bound:
        yield (
            f"checkpointing.offload_activations={str(is_offloaded).lower()}: rank {rank.rank} held {offloaded} bytes of"
            f" activations on the host, and {expected} are expected"
        )


def schedule_problems(config: RunConfig, layout: Layout, rank: RankReport) -> Iterator[str]:
    """Yield a problem if the rank had other micro-batches in flight, or split other backwards, than its schedule."""
    micro_batches, stage = layout.grad_accumulation_steps(config.train), layout.coordinates(rank.rank)["pp"]
    expected = max_in_flight_micro_batches(layout, micro_batches, stage) if layout.pp_enabled else 1
    in_flight, split = rank.profiled.max_in_flight_micro_batches, rank.profiled.split_backwards
    if in_flight != expected:
        yield (
            f"rank {rank.rank} had {in_flight} micro-batches in flight, and strategy.schedule={layout.schedule} has"
            f" {expected}"
        )
    passes = sum(split_passes(layout, micro_batches, stage))
    if split != passes:
        yield (
            f"rank {rank.rank} deferred the weights' gradients of {split} backwards in a step, and {passes} are"
            " expected"
        )


def routed_rows(layout: Layout, rank: RankReport, ranks: Sequence[RankReport]) -> RoutedRows | None:
    """Return how many rows a rank sent to others' experts, and received for its own, by what the ranks counted.

    None where not all of its group are known.
    """
    along = {axis: place for axis, place in layout.coordinates(rank.rank).items() if axis != "ep"}
    group = [other for other in ranks if along.items() <= layout.coordinates(other.rank).items()]
    if not layout.ep_enabled or len(group) < layout.ep:
        return None
    counts = {other.rank: dict(other.expert_tokens) for other in group}
    part, place = len(rank.expert_tokens[0][1]) // layout.ep, layout.coordinates(rank.rank)["ep"]
    own = slice(place * part, (place + 1) * part)

    def rows(layer: int) -> tuple[int, int]:
        to_own = {number: sum(of_layers[layer][own]) for number, of_layers in counts.items()}
        staying = to_own.pop(rank.rank)
        return sum(counts[rank.rank][layer]) - staying, sum(to_own.values())

    return rows


def volume_problems(
    layout: Layout, rank: RankReport, papers: Mapping[str, float], padded: Mapping[str, float]
) -> Iterator[str]:
    """Yield along which axes a rank's volume is not exactly the layout's, of which `padded` is what it must be.

    The smallest tensor that is sent once more or once less is a problem.
    """
    sent = dict.fromkeys(padded, 0.0)
    for entry in communication_entries(layout, rank):
        if entry["purpose"] == LAYOUT:
            key = f"{entry['axis']} {volume_kind(entry['axis'], entry['operation'])}"
            sent[key] = sent.get(key, 0.0) + entry["bytes"]
    for key, bytes_sent in sent.items():
        volume = padded.get(key, 0.0)
        if abs(bytes_sent - volume) > ROUNDING_BYTES:
            ratio = f"which is {bytes_sent / volume:.2f} x" if volume else "and not"
            yield (
                f"rank {rank.rank} sent {bytes_sent:.0f} bytes a step along {key}, {ratio} the {volume:.0f} of this"
                f" layout with its padding ({papers.get(key, 0.0):.0f} in the papers):"
                " strategy.literature=false skips this proof"
            )


def volume_kind(axis: str, operation: str) -> str:
    """Return the kind of volume that an operation along this axis counts to, as the formulas name it."""
    return DATA_KINDS.get(operation, operation) if is_data_parallel_axis(axis) else operation
