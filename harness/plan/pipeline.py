"""What the papers say of a pipeline schedule: the idle time it leaves and the micro-batches it keeps in flight."""

from harness.layout import Layout


def bubble(layout: Layout, micro_batches: int) -> float:
    """Idle time of a stage in units of its working time, were all stages equal and communication free.

    (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) interleaved (arXiv 2104.04473, section 2.2). Zero bubble leaves
    (p - 1)(F + B - W) of m (F + B + W) (ZB-H1, arXiv 2401.10241, table 2), a third of that where forward, backward for
    inputs and backward for weights take equally long.
    """
    fraction = (layout.pp - 1) / (layout.virtual_stages * micro_batches)
    return fraction / 3 if layout.schedule == "zero_bubble" else fraction


def in_flight(layout: Layout, micro_batches: int, place: int) -> int:
    """The most passes through one of its stages that the rank at this place of the pipeline keeps for backward.

    As torch's schedules order them: GPipe all, 1F1B as many as there are stages from here on, the looped ones their
    warm-up and one more; zero bubble keeps each until its weights' gradients are made, `place` passes later.
    """
    p, v = layout.pp, layout.virtual_stages
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "1f1b":
        return min(micro_batches, p - place)
    warm_up = (v - 1) * round_size(layout, micro_batches)
    if layout.schedule == "interleaved_1f1b":
        return min(v * micro_batches, warm_up + 2 * (p - 1 - place) + 1)
    return min(v * micro_batches, warm_up + (p - 1 - place) + 1 + place)


def round_size(layout: Layout, micro_batches: int) -> int:
    """Micro-batches that the looped schedules take through one stage before they turn to the rank's next."""
    return micro_batches // max(1, micro_batches // layout.pp)
