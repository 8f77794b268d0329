"""Whether a step did the layout's work: the bytes it sent, what it ran a second time, the order of its passes."""

from harness.config import RunConfig
from harness.layout import Layout
from harness.placement import stages_of_rank
from harness.plan.pipeline import in_flight
from harness.proof import Rank

VOLUME_TOLERANCE = 0.05  # for norms, flags and padding beside the papers' volume
_SCALARS = 4096  # bytes of norms and flags, for models so tiny that 5 % is less


def checkpointing_problems(config: RunConfig, layout: Layout, rank: Rank) -> list[str]:
    """Whether every layer's forward ran a second time in every micro-batch, or none did."""
    layers = sum(stage.layers for stage in stages_of_rank(config.model, layout, rank["rank"]))
    passes = layers * layout.accumulation(config.train)
    expected, found = passes if config.checkpointing.name == "full" else 0, rank["profiled"]["recomputations"]
    # torch's backward in two halves runs the second forward again for the weights, one by one.
    if found == expected or (splits_backward(layout) and 0 < expected < found):
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
        problems.append(f"rank {rank['rank']} ran {split} backwards in two halves in a step, {passes} expected")
    return problems


def splits_backward(layout: Layout) -> bool:
    return layout.pp > 1 and layout.schedule == "zero_bubble"


def volume_problems(rank: int, sent_bytes: float, expected_bytes: float) -> list[str]:
    """Whether the layout's volume was sent: neither a synchronisation less nor one more."""
    if abs(sent_bytes - expected_bytes) <= VOLUME_TOLERANCE * expected_bytes + _SCALARS:
        return []
    ratio = f"{sent_bytes / expected_bytes:.2f} x" if expected_bytes else "not"
    return [
        f"rank {rank} sent {sent_bytes:.0f} bytes a step, {ratio} the {expected_bytes:.0f} of this layout in the papers"
        " (strategy.literature=false lifts this)"
    ]
