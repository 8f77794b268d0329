"""Whether a step did the layout's work: its operations, what it ran again, the bytes it sent, its passes' order."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from harness.config.schema import RunConfig
from harness.cost_model.communication import LAYOUT
from harness.cost_model.flops import executed_flops_with, recomputed_layers
from harness.cost_model.memory import moved_activation_bytes
from harness.cost_model.pipeline import max_in_flight_micro_batches
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_rank
from harness.layout.state_widths import StateWidths
from harness.metrics.kernels import attention_kernels
from harness.metrics.throughput import executed_flops
from harness.metrics.traffic import communication_entries
from harness.records.schema import FUSED_KERNELS, Rank

VOLUME_TOLERANCE = 0.05  # for padding beside the papers' volume

FLOPS_TOLERANCE = 0.01

OFFLOAD_TOLERANCE = 0.03  # what the plan of activations is held to everywhere

_PADDING = 4096  # bytes, for models so tiny that 5 % is less


def flops_problems(config: RunConfig, layout: Layout, widths: StateWidths, ranks: Sequence[Rank]) -> list[str]:
    """Whether all ranks together ran the matrix products of the model once, and again what is checkpointed.

    The attention kernel that ran decides whether backward makes the scores again.
    """
    ran = executed_flops(ranks)
    if ran is None:
        return []
    fused = not set(attention_kernels(config, ranks)).isdisjoint(FUSED_KERNELS)
    expected = executed_flops_with(config, layout, fused, widths.recomputes_last_projection)
    if abs(ran - expected) <= FLOPS_TOLERANCE * expected:
        return []
    return [
        f"a step ran {ran} floating-point operations, {ran / expected:.3f} x the {expected} of this model and"
        " checkpointing"
    ]


def kernel_problems(config: RunConfig, ranks: Sequence[Rank]) -> list[str]:
    """Whether all ranks ran one attention kernel, that of the model where it has its own, and the optimizer's."""
    if any(rank["devices"] != 1 for rank in ranks):  # devices driven by threads that nobody hears
        return []
    found, problems = attention_kernels(config, ranks), []
    by_rank = {tuple(attention_kernels(config, [rank])) for rank in ranks}
    if len(found) != 1 or len(by_rank) != 1:
        problems.append(f"attention ran as {' and '.join(found) or 'no kernel that is known'}, not one on all ranks")
    elif (found == ["eager"]) != (config.model.attention == "eager"):
        problems.append(f"attention ran as {found[0]}, not as model.attention={config.model.attention} says")
    wanted = "fused" if config.train.fused_optimizer else "foreach"
    for rank in ranks:
        ran = "+".join(rank["profiled"]["optimizers"])
        if ran != wanted:
            said = str(config.train.fused_optimizer).lower()
            problems.append(
                f"rank {rank['rank']} ran the optimizer as {ran or 'another'}, train.fused_optimizer={said}"
            )
    return problems


def compile_problems(config: RunConfig, rank: Rank) -> list[str]:
    """Whether the layers ran compiled, in the profiled step as in the timed ones, and the compiler in neither."""
    problems, asked = [], config.train.compile
    known = config.model.asked is None  # a library's activation function may be many operators; it is never compiled
    if known and rank["devices"] == 1 and rank["profiled"]["layers_compiled"] != asked:
        how = "operator by operator" if asked else "compiled"
        problems.append(f"rank {rank['rank']} ran its layers {how}, train.compile={str(asked).lower()}")
    if rank["graphs_in_timed_steps"]:
        problems.append(
            f"rank {rank['rank']} compiled {rank['graphs_in_timed_steps']} graphs in the timed steps: choose more"
            " train.warmup_steps"
        )
    return problems


def checkpointing_problems(config: RunConfig, layout: Layout, rank: Rank) -> list[str]:
    """Whether the forwards that checkpointing names, and no other, ran a second time in every micro-batch.

    And the parts of the loss, where there are several.
    """
    held, found = stages_of_rank(config.model, layout, rank["rank"]), rank["profiled"]["recomputations"]
    calls, chunks = sum(recomputed_layers(config, layout, stage) for stage in held), config.train.loss_chunks
    calls += chunks if chunks > 1 and held[-1].holds_head else 0
    expected = layout.grad_accumulation_steps(config.train) * calls
    if found == expected:
        return []
    return [
        f"checkpointing={config.checkpointing.name}: {found} second forwards of a layer in a step of rank"
        f" {rank['rank']}, {expected} expected{', parts of the loss among them' if chunks > 1 else ''}"
    ]


def offload_problems(config: RunConfig, layout: Layout, rank: Rank) -> list[str]:
    """Whether what the layers keep for backward was moved to the host, all of it, or nothing was.

    A GPU's kernels keep other tensors from version to version: there every layer's input at least must be among it.
    """
    place, asked = layout.coordinates(rank["rank"])["pp"], config.checkpointing.offload_activations
    on_cpu = rank["device_name"] == "cpu"
    if asked and not on_cpu:
        inputs = dataclasses.replace(config.checkpointing, name="full", every=1)
        config = dataclasses.replace(config, checkpointing=inputs)
    expected = moved_activation_bytes(config, layout, "cpu" if on_cpu else "cuda", place) if asked else 0
    found = rank["profiled"]["offloaded_activation_bytes"]
    most = math.inf if asked and not on_cpu else (1 + OFFLOAD_TOLERANCE) * expected
    if (1 - OFFLOAD_TOLERANCE) * expected <= found <= most:
        return []
    return [
        f"checkpointing.offload_activations={str(asked).lower()}: rank {rank['rank']} held {found} bytes of activations"
        f" on the host, {expected} expected"
    ]


def schedule_problems(config: RunConfig, layout: Layout, rank: Rank) -> list[str]:
    """Whether the rank ran its micro-batches in the order of its schedule, told by how many it had in flight."""
    micro_batches, place = layout.grad_accumulation_steps(config.train), layout.coordinates(rank["rank"])["pp"]
    expected = max_in_flight_micro_batches(layout, micro_batches, place) if layout.pp > 1 else 1
    found, split = rank["profiled"]["in_flight"], rank["profiled"]["split_backwards"]
    problems = []
    if found != expected:
        problems.append(
            f"rank {rank['rank']} had {found} passes in flight, strategy.schedule={layout.schedule} says {expected}"
        )
    passes = layout.virtual_stages * micro_batches if splits_backward(layout) else 0
    if split != passes:
        problems.append(
            f"rank {rank['rank']} put off the weights' gradients of {split} backwards in a step, {passes} expected"
        )
    return problems


def splits_backward(layout: Layout) -> bool:
    return layout.pp > 1 and layout.schedule == "zero_bubble"


def volume_problems(layout: Layout, rank: Rank, expected: Mapping[str, float]) -> list[str]:
    """Whether the layout's volume was sent along each axis: neither a synchronisation less nor one more."""
    sent = dict.fromkeys(expected, 0.0)
    for entry in communication_entries(layout, rank):
        key = f"{entry['axis']} {entry['operation']}" if entry["axis"] in ("tp", "pp") else entry["axis"]
        if entry["purpose"] == LAYOUT:
            sent[key] = sent.get(key, 0.0) + entry["bytes"]
    problems = []
    for key, bytes_sent in sent.items():
        wanted = expected.get(key, 0.0)
        if abs(bytes_sent - wanted) > VOLUME_TOLERANCE * wanted + _PADDING:
            ratio = f"{bytes_sent / wanted:.2f} x" if wanted else "not"
            problems.append(
                f"rank {rank['rank']} sent {bytes_sent:.0f} bytes a step along {key}, {ratio} the {wanted:.0f} of this"
                " layout in the papers (strategy.literature=false lifts this)"
            )
    return problems
