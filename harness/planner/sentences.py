"""The sentences of a plan: what its figures rest on, what separates layouts, and what would make others fit.

Every figure in them is one of the rows', rounded as it is printed. Imports no torch.
"""

import itertools
from collections.abc import Iterator, Sequence

from harness.config.byte_size import format_bytes
from harness.config.strategy import AXES
from harness.cost_model.fits import UNMEASURED_RANGE
from harness.cost_model.parts import PEAK_PARTS
from harness.cost_model.prediction import Prediction
from harness.planner.problems import offers
from harness.planner.run_overrides import run_command
from harness.planner.search import SearchResult

MOST_SMALLER = 3  # layouts that need less memory than the fastest that fits, each with a sentence

SAME = 0.001  # a difference of step time that no sentence makes anything of


COPIES = "copies to and from the host"


def terms(prediction: Prediction) -> dict[str, float]:
    """Return the seconds of a step by what they are spent on."""
    time = prediction.time
    by_axis = time.exposed_communication_seconds
    exposed = {f"exposed {axis} communication": by_axis[axis] for axis in reversed(AXES) if axis in by_axis}
    parts = {"compute": time.compute_seconds} | exposed | {"pipeline bubble": time.bubble_seconds}
    parts |= {COPIES: prediction.copy_seconds} if prediction.copy_seconds else {}
    return parts | {"optimizer": time.optimizer_seconds, "rest of the step": time.other_seconds}


def longer_text(prediction: Prediction, fastest: Prediction) -> str:
    """Return how much longer a step takes than the fastest layout's."""
    slower = prediction.step_seconds / fastest.step_seconds - 1
    return f"takes {100 * slower:.1f} % longer" if slower >= SAME else "is as fast within 0.1 %"


def separation(prediction: Prediction, fastest: Prediction) -> str:
    """Return in one sentence which term of the step's time separates a layout from the fastest one."""
    if prediction.step_seconds / fastest.step_seconds - 1 < SAME:
        return f"{prediction.label()} {longer_text(prediction, fastest)}."
    own, other = terms(prediction), terms(fastest)
    changes = {name: own.get(name, 0.0) - other.get(name, 0.0) for name in own | other}
    name = max(changes, key=lambda term: changes[term])
    takes = "take" if name == COPIES else "takes"
    return (
        f"{prediction.label()} {longer_text(prediction, fastest)}: its {name} {takes} {own.get(name, 0.0):.4g} s"
        f" a step, and {other.get(name, 0.0):.4g} s in the first."
    )


def memory_sentences(result: SearchResult) -> Sequence[str]:
    """Return one sentence for each of the fastest layouts that need less memory than the fastest that fits."""
    if not result.best:
        return []
    first = result.best[0]
    smaller = [entry for entry in result.front if entry.memory.peak_bytes < first.memory.peak_bytes]
    return [
        f"{entry.label()} needs {format_bytes(entry.memory.peak_bytes)}, {format_bytes(first.memory.peak_bytes)}"
        f" in the fastest, and {longer_text(entry, first)}."
        for entry in smaller[:MOST_SMALLER]
    ]


def fit_sentence(prediction: Prediction) -> str:
    """Return whether a layout fits, with the interval that says so and where that is from."""
    verdict, memory = prediction.verdict, prediction.judged_stack
    low, high = memory.measured_over_predicted or UNMEASURED_RANGE
    has_own = memory.measured_over_predicted is not None
    source = f"stack={prediction.stack.name}" if has_own else "the least predictable stack on file"
    return (
        f"{verdict.fits}: measured peaks of {source} were {low} to {high} of predicted ones, so that this one lies"
        f" between {format_bytes(verdict.low_bytes)} and {format_bytes(verdict.high_bytes)};"
        f" {format_bytes(prediction.available_bytes - prediction.memory.process_bytes)} of a device are for tensors."
    )


def misfit_sentence(prediction: Prediction) -> str:
    """Return what a layout that does not fit would take and need, and what would make it fit."""
    available = prediction.host_available_bytes
    if available is not None and not prediction.fits_host:
        return (
            f"{prediction.label()} would take {prediction.step_seconds:.4g} s but needs"
            f" {format_bytes(prediction.memory.host_bytes)} of the {format_bytes(available)} that a device has of its"
            " host's memory."
        )
    choice = ", or ".join(itertools.islice(offers(prediction), 4)) or "a smaller model or a larger cluster"
    return (
        f"{prediction.label()} would take {prediction.step_seconds:.4g} s but needs"
        f" {format_bytes(prediction.needed_bytes)} of the {format_bytes(prediction.available_bytes)} of a device:"
        f" {choice} would fit."
    )


def basis_sentences(prediction: Prediction) -> Iterator[str]:
    """Yield what the figures of a prediction rest on."""
    hardware, name = prediction.cluster.hardware, prediction.cluster.name
    if hardware.datasheet_only:
        yield f"cluster={name} is datasheet-only: no published measurement stands behind its efficiencies."
    if prediction.is_of_nearest_decoder:
        yield (
            f"model={prediction.config.model.name} is a library's: its parameters and operations are those of a trace,"
            " its activations those of the nearest layer with formulas here."
        )
    offloads = prediction.layout.offload != "none" or prediction.config.checkpointing.offload_activations
    if offloads and prediction.cluster.device == "cuda":
        if hardware.host_bandwidth is None:
            yield f"cluster={name} has no cluster.hardware.host_bandwidth: the copies of offload are counted as free."
        available = prediction.host_available_bytes
        has = "which no plan checks" if available is None else f"of which it has {format_bytes(available)}"
        yield (
            f"A device needs {format_bytes(prediction.memory.host_bytes)} of its host's memory, {has};"
            " copies to the host are predicted by the datasheet of its link alone."
        )


def error_sentences(prediction: Prediction) -> Iterator[str]:
    """Yield how far predictions of this stack were from measurements, and how wide the interval of a step is."""
    memory = prediction.judged_stack.measured_over_predicted
    name = prediction.stack.name
    if memory is None:
        yield (
            f"No peak of such models under stack={name} was measured: the interval of memory is that of the least"
            " predictable stack."
        )
    else:
        yield f"Measured peaks of stack={name} were {memory[0]} to {memory[1]} of predicted ones."
    low, high = prediction.step_interval
    seconds = prediction.step_seconds
    measured = prediction.stack.timing.measured_over_predicted is not None
    source = (
        f"measured steps of stack={name}"
        if measured
        else "a range that contains those of all measured stacks, as this one has no measured steps"
    )
    yield f"Its step is expected to take {low / seconds:.2f} to {high / seconds:.2f} of the prediction, by {source}."


def count_sentence(result: SearchResult) -> str:
    """Return how many candidates a search went through."""
    could_run = f"{result.valid} could run"
    if result.beyond:
        could_run = f"{result.beyond} need two devices' memory for their state alone, {result.valid} others could run"
    return (
        f"{result.considered} candidates were considered: {could_run}, and {result.memory_estimates} needed an exact"
        " estimate of memory."
    )


def run_sentences(planned: Sequence[str], result: SearchResult) -> Iterator[str]:
    """Yield the command that runs the fastest layout that fits, if these engines train it, and how to simulate it."""
    if "model=hf" in planned and result.best and not result.best[0].is_of_nearest_decoder:
        yield (
            "These are plans of this project's own layers with the sizes of that config.json. A run of model=hf trains"
            " the library's layers, which refuse checkpointing=selective and attention, pipelines, context and sequence"
            " parallelism: plan one of its layouts by strategy=."
        )
    elif result.best and result.best[0].is_runnable:
        yield f"Run the fastest with: {run_command(planned, result.best[0].config)}"
        yield "With launch=simulated as well it runs one rank's code without the devices."


def misfit_sentences(result: SearchResult) -> Iterator[str]:
    """Yield what would make the fastest layout fit, and where nothing fits, the smallest."""
    misfits = [entry for entry in (result.fastest_misfit,) if entry is not None]
    misfits += [result.smallest] if result.smallest and not result.smallest.fits else []
    for prediction in {id(entry): entry for entry in misfits}.values():
        yield misfit_sentence(prediction)


def search_sentences(result: SearchResult) -> Iterator[str]:
    """Yield what a search went through, what separates the best, what needs less memory, and what would make fit."""
    yield count_sentence(result)
    for prediction in result.best[1:]:
        yield separation(prediction, result.best[0])
    yield from memory_sentences(result)
    yield from misfit_sentences(result)


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
                format_bytes(prediction.peak.reserved_bytes) if is_gpu else "",
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
    reserved = f"{'' if is_planned else 'at least '}{format_bytes(peak.reserved_bytes)}"
    also = f"; torch reserves {reserved}" if prediction.cluster.device == "cuda" else ""
    yield f"memory: rank {memory.rank} peaks at {format_bytes(memory.peak_bytes)} in {memory.phase}: {parts}{also}."
    yield f"fits: {fit_sentence(prediction)}"
    seconds = ", ".join(f"{name} {size:.4g} s" for name, size in terms(prediction).items() if size)
    yield f"step: {prediction.step_seconds:.4g} s: {seconds}."
    volumes = ", ".join(f"{name} {format_bytes(size)}" for name, size in prediction.sent_bytes.items() if size)
    yield f"sent by one rank in a step: {volumes or 'nothing'}."
