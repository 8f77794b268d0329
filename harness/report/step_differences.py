"""The difference of a simulated step from the plan: the parts in which it lies, and the operators that take longest."""

from collections.abc import Mapping, Sequence

from harness.metrics.simulation import slowest_simulated_time
from harness.metrics.step_time import PHASE_COLUMNS
from harness.records.rank_report import OUTSIDE_PHASES, SimulatedTime
from harness.records.schema import PredictedStepEntry, Record
from harness.report.text import duration_text, join_words, percent_text

LONGEST = 3  # operators that are named of each kind

MOST_PARTS = 3  # that are named

SMALL_SHARE = 0.1  # a part with a smaller share of all differences is not named

SMALLEST_SHARE = 0.001  # of a step that is written as a number

COPIES = "copies between device and host"

WAITS = "waiting for the host"

PLANNED_WAITS = (
    "The plan counts waits for the host to forward and backward, and those for an update on the host to the optimizer."
)

# What the parts of a step are called, by the columns of a row that its phases count to.
_PART_OF_COLUMN = {
    "data_seconds": "the rest of the step",
    "other_seconds": "the rest of the step",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "the optimizer",
}


def step_difference(record: Record) -> str:
    """Return where and by which operators a simulated step differs from the plan; '' if it is in the plan's interval.

    Nothing is returned either where the step has no time, or the record has no plan of it.
    """
    planned, simulated = record.predicted_step, slowest_simulated_time(record.ranks)
    if planned is None or simulated is None:
        return ""
    low, high = planned["low_seconds"], planned["high_seconds"]
    if low <= simulated.step_seconds <= high:
        return ""
    sentences = [
        f"the simulated step takes {duration_text(simulated.step_seconds)}, outside the interval of"
        f" {duration_text(low)} to {duration_text(high)} around the {duration_text(planned['step_seconds'])} of the"
        " formula.",
        *parts_sentences(planned_parts(planned), simulated_parts(simulated)),
        *operator_sentences(simulated),
    ]
    return " ".join(sentences)


def planned_parts(planned: PredictedStepEntry) -> dict[str, float]:
    """Return the planned seconds of a step by part; waits for the host are in those that PLANNED_WAITS names."""
    return {
        "forward": planned["forward_seconds"],
        "backward": planned["backward_seconds"],
        "the optimizer": planned["optimizer_seconds"],
        "the rest of the step": planned["other_seconds"],
        "the pipeline's bubble": planned["bubble_seconds"],
        COPIES: planned["copy_seconds"],
        **_exposed_parts(planned["exposed_seconds"]),
    }


def simulated_parts(simulated: SimulatedTime) -> dict[str, float]:
    """Return the simulated seconds of a step by part, which add up to the step."""
    parts = _exposed_parts(simulated.exposed_seconds)
    for phase, seconds in simulated.phase_seconds.items():
        name = _PART_OF_COLUMN[PHASE_COLUMNS[phase]]
        parts[name] = parts.get(name, 0.0) + seconds
    parts[COPIES] = simulated.copy_seconds
    parts["the pipeline's bubble"] = simulated.bubble_seconds
    parts[WAITS] = simulated.idle_seconds - simulated.bubble_seconds
    return parts


def parts_sentences(planned: Mapping[str, float], simulated: Mapping[str, float]) -> list[str]:
    """Return a sentence on the parts in which the seconds differ most."""
    names = dict.fromkeys((*planned, *simulated))
    changes = {name: simulated.get(name, 0.0) - planned.get(name, 0.0) for name in names}
    whole = sum(abs(change) for change in changes.values())
    largest = sorted(changes, key=lambda name: -abs(changes[name]))[:MOST_PARTS]
    named = [name for name in largest if abs(changes[name]) >= SMALL_SHARE * whole > 0]
    if not named:
        return []
    texts = [
        f"{name}, {_seconds(simulated.get(name))} simulated and {_seconds(planned.get(name))} planned" for name in named
    ]
    verb, noun = ("is", "part") if len(texts) == 1 else ("are", "parts")
    sentences = [f"The {noun} that differ{'s' if verb == 'is' else ''} most {verb} {'; '.join(texts)}."]
    if WAITS in named:
        sentences.append(PLANNED_WAITS)
    return sentences


def operator_sentences(simulated: SimulatedTime) -> list[str]:
    """Return a sentence on the operators that compute longest, and one on those that communicate longest."""
    communicating = set(simulated.communication_operators)
    kinds = (
        ("compute", {key: s for key, s in simulated.operator_seconds.items() if key not in communicating}),
        ("communicate", {key: s for key, s in simulated.operator_seconds.items() if key in communicating}),
    )
    sentences = [
        f"The operators that {verb} longest are {join_words(_operator_texts(seconds, simulated.step_seconds))}."
        for verb, seconds in kinds
        if any(seconds.values())
    ]
    return [*sentences, "The seconds of an operator are those of its kernels if each runs alone."] if sentences else []


def _operator_texts(seconds: Mapping[str, float], step_seconds: float) -> Sequence[str]:
    longest = sorted(seconds, key=lambda key: -seconds[key])[:LONGEST]
    return [
        f"{_operator(key)} ({duration_text(seconds[key])}, {_share(seconds[key] / step_seconds)} of the step)"
        for key in longest
        if seconds[key]
    ]


def _operator(key: str) -> str:
    """Return the operator of a key such as forward/mm in words."""
    phase, _, name = key.partition("/")
    return f"{name} outside of the phases" if phase == OUTSIDE_PHASES else f"{name} in {phase.replace('_', ' ')}"


def _share(share: float) -> str:
    return percent_text(share) if share >= SMALLEST_SHARE else f"less than {percent_text(SMALLEST_SHARE)}"


def _exposed_parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return exposed communication by part; what runs along several axes counts to the outermost, as in the plan."""
    parts: dict[str, float] = {}
    for axes, own in seconds.items():
        where = "among all ranks" if axes == "world" else f"along {axes.partition('+')[0]}"
        name = f"exposed communication {where}"
        parts[name] = parts.get(name, 0.0) + own
    return parts


def _seconds(seconds: float | None) -> str:
    return duration_text(seconds) if seconds else "nothing"
