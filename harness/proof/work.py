"""Whether a step did the layout's work: the bytes it sent, what it ran a second time, the order of its passes."""

from collections.abc import Mapping

from harness.config import RunConfig
from harness.layout import Layout
from harness.measure.communication import axis_of
from harness.placement import stages_of_rank
from harness.plan.pipeline import in_flight
from harness.proof import Rank

VOLUME_TOLERANCE = 0.05  # for norms, flags and padding beside the papers' volume
_SCALARS = 4096  # bytes of norms and flags, for models so tiny that 5 % is less


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
    for entry in rank["profiled"]["communication"]:
        axis = axis_of(entry["group_ranks"], layout)
        key = f"{axis} {entry['operation']}" if axis in ("tp", "pp") else "data"
        sent[key] = sent.get(key, 0.0) + entry["bytes_sent"]
    problems = []
    for key, bytes_sent in sent.items():
        wanted = expected.get(key, 0.0)
        if abs(bytes_sent - wanted) > VOLUME_TOLERANCE * wanted + _SCALARS:
            ratio = f"{bytes_sent / wanted:.2f} x" if wanted else "not"
            problems.append(
                f"rank {rank['rank']} sent {bytes_sent:.0f} bytes a step along {key}, {ratio} the {wanted:.0f} of this"
                " layout in the papers (strategy.literature=false lifts this)"
            )
    return problems
