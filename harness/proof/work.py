"""Whether a step did the layout's work: its operations, what it ran again, the bytes it sent, its passes' order."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from harness.config import RunConfig
from harness.engines import Widths
from harness.figures.speed import executed
from harness.figures.traffic import communication
from harness.layout import Layout
from harness.measure.communication import LAYOUT
from harness.placement import stages_of_rank
from harness.plan.flops import model_flops, recomputed_flops, remade_scores_flops, repeated_flops
from harness.plan.memory import moved_activation_bytes
from harness.plan.pipeline import in_flight
from harness.proof import Rank

VOLUME_TOLERANCE = 0.05  # for padding beside the papers' volume
FLOPS_TOLERANCE = 0.01
OFFLOAD_TOLERANCE = 0.03  # what the plan of activations is held to everywhere
_PADDING = 4096  # bytes, for models so tiny that 5 % is less


def flops_problems(config: RunConfig, layout: Layout, widths: Widths, ranks: Sequence[Rank]) -> list[str]:
    """Whether all ranks together ran the matrix products of the model once, and again what is checkpointed.

    Which attention kernel a GPU takes decides whether backward makes the scores again: both are allowed there.
    """
    ran = executed(ranks)
    if ran is None:
        return []
    least = model_flops(config) + repeated_flops(config, layout)
    least += recomputed_flops(config, layout, widths.whole_second_forward)
    most = least + remade_scores_flops(config, "cpu")
    if all(rank["device_name"] == "cpu" for rank in ranks):
        least = most
    if (1 - FLOPS_TOLERANCE) * least <= ran <= (1 + FLOPS_TOLERANCE) * most:
        return []
    return [
        f"a step ran {ran} floating-point operations, {ran / most:.3f} x the {most} of this model and checkpointing"
    ]


def checkpointing_problems(config: RunConfig, layout: Layout, rank: Rank) -> list[str]:
    """Whether every layer's forward ran a second time in every micro-batch, or none did.

    A backward in two halves runs it for each of them, but for the first stage, whose inputs need no gradient.
    """
    expected, found = 0, rank["profiled"]["recomputations"]
    if config.checkpointing.name == "full":
        for stage in stages_of_rank(config.model, layout, rank["rank"]):
            halves = 2 if splits_backward(layout) and not stage.holds_embedding else 1
            expected += halves * stage.layers * layout.accumulation(config.train)
    if found == expected:
        return []
    return [
        f"checkpointing={config.checkpointing.name}: {found} second forwards of a layer in a step of rank"
        f" {rank['rank']}, {expected} expected"
    ]


def offload_problems(config: RunConfig, layout: Layout, rank: Rank) -> list[str]:
    """Whether what the layers keep for backward was moved to the host, all of it, or nothing was.

    A GPU's kernels keep other tensors from version to version: there every layer's input at least must be among it.
    """
    place, asked = layout.coordinates(rank["rank"])["pp"], config.checkpointing.offload_activations
    on_cpu = rank["device_name"] == "cpu"
    inputs = dataclasses.replace(config, checkpointing=dataclasses.replace(config.checkpointing, name="full"))
    expected = moved_activation_bytes(config if on_cpu else inputs, layout, "cpu" if on_cpu else "cuda", place)
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
    micro_batches, place = layout.accumulation(config.train), layout.coordinates(rank["rank"])["pp"]
    expected = in_flight(layout, micro_batches, place) if layout.pp > 1 else 1
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
    for entry in communication(layout, rank):
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
