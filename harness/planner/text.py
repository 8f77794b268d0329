"""A plan for a terminal: a table of predictions, and what fills memory and time of each. Imports no torch."""

from collections.abc import Iterator, Sequence

from harness.config.byte_size import format_bytes
from harness.config.strategy import AXES
from harness.planner.predict import Prediction
from harness.planner.row import PEAK_PARTS
from harness.planner.sentences import fit_sentence, terms


def table_lines(predictions: Sequence[Prediction], swept: Sequence[str]) -> list[str]:
    """Return a table of predictions, with a column of exposed communication for each axis that has any.

    Under it stands what each layout is, after the settings in which it differs in a sweep.
    """
    exposures = [prediction.time.exposed_communication_seconds for prediction in predictions]
    axes = [axis for axis in reversed(AXES) if any(exposure.get(axis) for exposure in exposures)]
    has_copies = any(prediction.copy_seconds for prediction in predictions)
    exposed = tuple(f"exposed {axis}" for axis in axes)
    head = (
        "",
        "step s",
        "nine of ten",
        "tokens/s",
        "per device",
        "MFU",
        "peak",
        "reserved",
        "fits",
        "compute",
        *exposed,
    )
    lines = [(*head, *(("copies",) if has_copies else ()), "bubble", "optimizer", "rest")]
    for number, prediction in enumerate(predictions, 1):
        time, mfu = prediction.time, prediction.mfu
        seconds = [time.compute_seconds, *(time.exposed_communication_seconds.get(axis, 0.0) for axis in axes)]
        seconds += [prediction.copy_seconds] if has_copies else []
        seconds += [time.bubble_seconds, time.optimizer_seconds, time.other_seconds]
        is_gpu = prediction.cluster.device == "cuda"
        lines.append(
            (
                str(number),
                f"{prediction.step_seconds:.4g}",
                "{:.3g} to {:.3g}".format(*prediction.step_interval),
                f"{prediction.tokens_per_second:,.0f}",
                f"{prediction.tokens_per_second / prediction.layout.world_size:,.0f}",
                "" if mfu is None else f"{100 * mfu:.1f} %",
                format_bytes(prediction.memory.peak_bytes),
                format_bytes(prediction.peak.memory.reserved_bytes) if is_gpu else "",
                prediction.verdict.fits,
                *(f"{part:.3g}" for part in seconds),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    labels = [
        f"{text}: {entry.label()}" if text else entry.label() for text, entry in zip(swept, predictions, strict=True)
    ]
    return [*table, "", *(f"{number}  {label}" for number, label in enumerate(labels, 1))]


def detail_lines(prediction: Prediction) -> Iterator[str]:
    """Yield what fills memory at the peak and time in a step, and what is sent, a line each."""
    memory, peak = prediction.memory, prediction.peak
    parts = ", ".join(f"{part} {format_bytes(size)}" for part in PEAK_PARTS if (size := memory.at_peak.get(part, 0)))
    is_planned = prediction.stack.memory.fragmentation > 0  # else what fragments waste is not on file
    reserved = f"{'' if is_planned else 'at least '}{format_bytes(peak.memory.reserved_bytes)}"
    also = f"; torch reserves {reserved}" if prediction.cluster.device == "cuda" else ""
    yield f"memory: rank {peak.rank} peaks at {format_bytes(memory.peak_bytes)} in {peak.phase}: {parts}{also}."
    yield f"fits: {fit_sentence(prediction)}"
    seconds = ", ".join(f"{name} {size:.4g} s" for name, size in terms(prediction).items() if size)
    yield f"step: {prediction.step_seconds:.4g} s: {seconds}."
    volumes = ", ".join(f"{name} {format_bytes(size)}" for name, size in prediction.sent_bytes.items() if size)
    yield f"sent by one rank in a step: {volumes or 'nothing'}."
