"""The sentences of a plan: what it decides, what its figures rest on, and what would make other layouts fit.

`sentences.j2` says them. Every figure in them is one of the rows', rounded as it is printed. Imports no torch.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.config.model_files import names_model
from harness.config.strategy import AXES
from harness.cost_model.fits import UNMEASURED_RANGE
from harness.cost_model.float8 import RECIPES
from harness.cost_model.optimizer_state import state_width
from harness.cost_model.parts import PEAK_PARTS
from harness.cost_model.prediction import SECONDS_PER_HOUR, Prediction
from harness.cost_model.timing.interval import TIE
from harness.cost_model.timing.kernels import device_peak_flops
from harness.layout.model_profile import parameter_count
from harness.layout.state_widths import STATE_KINDS
from harness.planner.row import run_settings
from harness.planner.search import SearchResult
from harness.planner.space import offers
from harness.util.sentences import Sentences
from harness.util.text import format_bytes, format_duration

BILLION = 1e9  # the tokens of a training, where they are not known

MOST_OFFERS = 4  # for a layout that does not fit

SAME = 0.001  # a difference of step time that no sentence makes anything of

# What sentences call the parts of a step.
TERMS = {
    "compute": "compute",
    **{f"exposed {axis}": f"exposed {axis} communication" for axis in reversed(AXES)},
    "bubble": "pipeline bubble",
    "copies": "copies to and from the host",
    "optimizer": "optimizer",
    "rest": "rest of the step",
}

_FORMATS = {"s": ".4g", "tokens/s": ",.0f", "%": ".1f", "GiB": ".2f"}  # of figures side by side, by their units

# Columns that a table lacks where no layout has any of them.
_SELDOM = {"copies", "between nodes", *(f"exposed {axis}" for axis in AXES)}

say = Sentences(
    Path(__file__).with_name("sentences.j2"),
    {
        "bytes": format_bytes,
        "duration": format_duration,
        "g": lambda number, figures=4: f"{number:.{figures}g}",
        "tokens": lambda tokens: f"{tokens / BILLION:,.10g} billion",
    },
    {
        "same": SAME,
        "seconds_per_hour": SECONDS_PER_HOUR,
        "unmeasured_range": UNMEASURED_RANGE,
        "terms": TERMS,
    },
)


def decision_sentences(first: Prediction, tokens: float | None, is_choice: bool) -> Iterator[str]:
    """Yield what a layout takes of a device and how long a training takes, and how sure that is and by what."""
    seconds = (tokens or BILLION) / first.tokens_per_second
    facts = {
        "decision": [{"tokens": tokens or BILLION, "seconds": seconds, "is_choice": is_choice}],
        "certainty": [{"seconds": seconds}],
    }
    return say.of(facts, entry=first)


def choice_sentences(result: SearchResult, planned: Sequence[str], tokens: float | None) -> Iterator[str]:
    """Yield what a search decides: the fastest that fits, what ties in less memory, and how to run and export it."""
    if not result.choices:
        yield say("no_choice")
        return
    first, *others = result.choices
    yield from decision_sentences(first, tokens, is_choice=True)
    risky = [entry for entry in result.best if entry.verdict.fits == "tight" and not is_tie(first, entry)]
    yield from (say("risky", entry=entry, first=first) for entry in risky[:1])
    alike = [entry for entry in others if is_tie(entry, first)]
    yield from say.of({"ties": bool(alike)}, first=first, entries=alike, percent=100 * TIE)
    yield from run_sentences(planned, first)


def is_tie(prediction: Prediction, first: Prediction) -> bool:
    """Return whether a plan does not tell the speed of a layout from that of a faster one."""
    return prediction.step_seconds <= (1 + TIE) * first.step_seconds


def separations(choices: Sequence[Prediction]) -> Iterator[str]:
    """Yield what each slower choice saves beside the fastest, and which part of its step takes longer."""
    for entry in choices[1:]:
        if not is_tie(entry, choices[0]):
            yield say("separation", entry=entry, first=choices[0], part=_slower_part(entry, choices[0]))


def against_sentence(prediction: Prediction, other: Prediction) -> str:
    """Return in one sentence which of two layouts is slower, and the part of the step's time that says why."""
    faster, slower = sorted((prediction, other), key=lambda entry: entry.step_seconds)
    return say("against", entry=slower, faster=faster, part=_slower_part(slower, faster))


def _slower_part(prediction: Prediction, faster: Prediction) -> str:
    """Return the part of the step that takes most longer than in a faster layout."""
    return max(TERMS, key=lambda name: prediction.parts_of_step[name] - faster.parts_of_step[name])


def misfit_sentence(prediction: Prediction) -> str:
    """Return what a layout that does not fit would take and need, and what would make it fit."""
    if prediction.replay is not None:
        return say("refuted", entry=prediction)
    if not prediction.room.host_holds(prediction.memory):
        return say("host_misfit", entry=prediction)
    return say("misfit", entry=prediction, offers=list(itertools.islice(offers(prediction), MOST_OFFERS)))


def scaled_rate(prediction: Prediction) -> float:
    """Return how many times as fast as in 16 bits the device multiplies scaled matrices, by its datasheet."""
    hardware, precision = prediction.cluster.hardware, prediction.config.precision
    peaks = (device_peak_flops(hardware, dtype) or 1.0 for dtype in (RECIPES[precision.recipe][0], precision.compute))
    return next(peaks) / next(peaks)


def basis_sentences(prediction: Prediction) -> Iterator[str]:
    """Yield what the figures of a prediction rest on, and what a training needs beside them."""
    hardware = prediction.cluster.hardware
    processes = min(prediction.cluster.gpus_per_node, prediction.layout.world_size)
    whole_bytes = parameter_count(prediction.config.model) * prediction.config.precision.compute_bytes
    offloads = prediction.layout.offload != "none" or prediction.config.checkpointing.offload_activations
    copies = offloads and prediction.cluster.device == "cuda"
    facts = {
        "datasheet_only": hardware.datasheet_only,
        "of_library": prediction.is_of_library,
        "scaled": [{"rate": scaled_rate(prediction)}] if prediction.config.precision.has_recipe else [],
        "free_copies": copies and hardware.host_bandwidth is None,
        "host_memory": copies,
        "left_out": [{"whole_bytes": whole_bytes, "processes": processes}],
    }
    return say.of(facts, entry=prediction)


def run_sentences(planned: Sequence[str], first: Prediction) -> Iterator[str]:
    """Yield the commands that run a layout and export it, if these engines train it."""
    is_of_library = any(word == "model=hf" or names_model(word) for word in planned)
    is_own = not first.is_of_library
    facts = {"run_of_library": is_of_library and is_own, "run": not (is_of_library and is_own)}
    facts["exported"] = is_own and not (first.config.model.adapter.is_enabled and first.layout.tp_enabled)
    yield from say.of(facts, settings=run_settings(planned, first.config)) if first.is_runnable else ()


def misfit_sentences(result: SearchResult) -> Iterator[str]:
    """Yield what devices with more memory would bring, or where nothing fits, what would make the front's ends fit."""
    if not result.choices:
        yield from map(misfit_sentence, result.front[:1] + result.front[1:][-1:])
    for entry in result.front[: bool(result.choices)]:
        if not entry.fits and not is_tie(result.choices[0], entry):
            yield say("more_memory", entry=entry, first=result.choices[0])


def search_sentences(result: SearchResult) -> Iterator[str]:
    """Yield what the choices save, what would make a faster layout fit, and what the search went through."""
    yield from separations(result.choices)
    yield from misfit_sentences(result)
    yield from layout_sentences(result)
    yield say("counts", result=result)


def layout_sentences(result: SearchResult) -> Iterator[str]:
    """Yield what a word of labels stands for, which layouts a simulation refuted, and which had none and why."""
    yield from say.of({"tuned": any("tuned for speed" in prediction.label() for prediction in result.choices)})
    yield from (say("refuted", entry=prediction) for prediction in result.refuted)
    yield from not_simulated_sentences(result.best)


def not_simulated_sentences(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield why layouts that leave open whether they fit had no simulation."""
    reasons = dict.fromkeys(prediction.not_simulated for prediction in predictions)
    for reason in filter(None, reasons):
        labels = [prediction.label() for prediction in predictions if prediction.not_simulated == reason]
        yield say("not_simulated", labels=labels, reason=reason)


def table_lines(predictions: Sequence[Prediction], swept: Sequence[str]) -> list[str]:
    """Return a table of predictions, and under it what each layout is, after the settings that differ in a sweep."""
    rows = [_table_cells(number, prediction) for number, prediction in enumerate(predictions, 1)]
    columns = [name for name in rows[0] if name not in _SELDOM or any(row[name] not in ("0", "0 B") for row in rows)]
    table = _aligned([columns, *([row[name] for name in columns] for row in rows)])
    labels = (f"{text}: {entry.label()}".removeprefix(": ") for text, entry in zip(swept, predictions, strict=True))
    return [*table, "", *(f"{number}  {label}" for number, label in enumerate(labels, 1))]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of cells as text in which each column ends at one place."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in lines]


def against_lines(first: Prediction, other: Prediction) -> list[str]:
    """Return a table of two layouts side by side, of what their steps take, their memory and what a rank sends."""
    figures = _figures(first), _figures(other)
    lines = [["", "1", "2", "2 less 1"], ["fits", first.verdict.fits, other.verdict.fits, ""]]
    for name in figures[0] | figures[1]:
        values = [side.get(name, 0.0) for side in figures]
        if any(values):
            shown = _FORMATS[name.split()[-1]]
            lines.append([name, *(format(value, shown) for value in (*values, values[1] - values[0]))])
    width = max(len(line[0]) for line in lines)
    table = _aligned([[line[0].ljust(width), *line[1:]] for line in lines])
    return [*table, "", f"1  {first.label()}", f"2  {other.label()}", against_sentence(first, other)]


def _figures(prediction: Prediction) -> dict[str, float]:
    """Return what two layouts are compared by, each by its name with a unit; parts are indented under their sum."""
    memory, sent = prediction.memory, prediction.sent_bytes
    sizes: dict[str, float] = {
        "allocated": memory.peak_bytes,
        **{f"  {part}": memory.at_peak.get(part, 0) for part in PEAK_PARTS},
        "reserved": prediction.reserved_bytes if prediction.cluster.device == "cuda" else 0,
        "of the host": memory.host_bytes,
        "sent by a rank in a step": sum(sent.values()),
        **{f"  {name}": size for name, size in sent.items()},
        "between nodes": prediction.between_nodes_bytes,
    }
    return {
        "step s": prediction.step_seconds,
        **{f"  {TERMS[part]} s": seconds for part, seconds in prediction.parts_of_step.items()},
        "tokens/s": prediction.tokens_per_second,
        "MFU %": 100 * (prediction.mfu or 0.0),
        **{f"{name} GiB": size / 2**30 for name, size in sizes.items()},
    }


def _table_cells(number: int, prediction: Prediction) -> dict[str, str]:
    """Return the cells of a prediction's line by the heads of their columns."""
    mfu, rate, is_gpu = prediction.mfu, prediction.tokens_per_second, prediction.cluster.device == "cuda"
    return {
        "": str(number),
        "step s": f"{prediction.step_seconds:.4g}",
        "nine of ten": "{:.3g} to {:.3g}".format(*prediction.step_interval),
        "tokens/s": f"{rate:,.0f}",
        "per device": f"{rate / prediction.layout.world_size:,.0f}",
        "MFU": "" if mfu is None else f"{100 * mfu:.1f} %",
        "allocated": format_bytes(prediction.memory.peak_bytes),
        "reserved": format_bytes(prediction.reserved_bytes) if is_gpu else "",
        "fits": prediction.verdict.fits,
        **{part: f"{seconds:.3g}" for part, seconds in prediction.parts_of_step.items()},
        "between nodes": format_bytes(prediction.between_nodes_bytes),
    }


def detail_lines(prediction: Prediction) -> Iterator[str]:
    """Yield what fills memory at the peak and time in a step, and what is sent, a line each."""
    parts = {part: prediction.memory.at_peak.get(part, 0) for part in PEAK_PARTS}
    return say.of({"peak": [{"parts": parts}], "verdict": True, "step": True, "sent": True}, entry=prediction)


def explanation(prediction: Prediction) -> Iterator[str]:
    """Yield the derivation of each figure of a prediction, a line each."""
    time = prediction.time
    beside = time.compute_seconds - time.micro_batches * (time.forward_seconds + time.backward_seconds)
    facts = {
        "predicted_peak_bytes": True,
        "peak_reserved_bytes": prediction.cluster.device == "cuda",
        "fits": True,
        "state_bytes": [
            {
                "kinds": kind,
                "kind": kind.removesuffix("s"),
                "width": state_width(prediction.config, prediction.widths, kind),
            }
            for kind in STATE_KINDS
        ]
        * prediction.has_own_memory,
        "activation_bytes": True,
        "predicted_step_seconds": True,
        "forward_seconds": True,
        "backward_seconds": [{"beside": beside}],
        "exposed_seconds": [{"axis": axis} for axis in time.exposed_communication_seconds],
        "idle_seconds": prediction.layout.pp_enabled,
        "exposed_copy_seconds": time.copy_seconds,
        "optimizer_seconds": True,
        "tokens_per_second": True,
        "mfu": prediction.mfu is not None,
        "cost_per_billion_tokens": prediction.cost_per_billion_tokens is not None,
        "communication_bytes": True,
        "between_nodes_bytes": prediction.between_nodes_bytes > 0,
    }
    return say.of(facts, entry=prediction)
