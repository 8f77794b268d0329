"""The checks of the self-test's steps: what the records of their runs must say, and a few words on what they say."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from harness.cost_model.parts import STEP_PARTS
from harness.records.rank_report import RunStatus
from harness.records.schema import Record
from harness.selftest.bench import Bench, StepFailedError
from harness.util.text import format_bytes

MEMORY_TOLERANCE = 0.1  # of a predicted peak, relative to the measured one
BUBBLE_TOLERANCE = 0.1  # by which the measured share of bubbles may exceed the formula's
SAME_LOSS = 1e-3  # the relative difference of the last losses of two equal runs in 16 bit
HANGING_MODULE = "rank_variants.py"  # the file in which a rank hangs on purpose
PART_AT_PEAK = r"at_peak_(\w+)_bytes"  # the columns that say what filled the peak


def require(holds: bool, problem: str) -> None:
    """Raise StepFailedError with the problem unless something holds."""
    if not holds:
        raise StepFailedError(problem)


def require_status(records: Sequence[Record], status: RunStatus) -> None:
    """Raise StepFailedError that names every run which did not end with this status."""
    problems = [
        f"{_name(record)} ended as {record.status}, and {status} is expected:"
        f" {record.row['reason'] or 'no reason is recorded'}"
        for record in records
        if record.status != status
    ]
    require(not problems, "; ".join(problems))


def ran(bench: Bench, records: Sequence[Record]) -> str:
    """Return the speeds of runs."""
    return ", ".join(f"{record.row['strategy']} {record.row['tokens_per_second']:,.0f} tokens/s" for record in records)


def proven(bench: Bench, records: Sequence[Record]) -> str:
    """Require that every run was compared with a single process; return kernels and deviations."""
    deviations: list[Any] = [record.row.get("grad_deviation") for record in records]
    for record, deviation in zip(records, deviations, strict=True):
        require(deviation is not None, f"{_name(record)} was not compared: {record.proof.get('reference')}")
    kernels = ", ".join(dict.fromkeys(str(record.row.get("attention_kernel")) for record in records))
    return f"gradients deviate by {max(deviations):.1g} at most from a single process's; attention: {kernels}"


def memory_adds_up(bench: Bench, records: Sequence[Record]) -> str:
    """Require that the blocks at the peak are known and add up to it; return the largest parts."""
    (record,) = records
    name, peak = _name(record), record.row["peak_allocated_bytes"]
    notes = "; ".join(record.notes) or "the record does not say why"
    require(peak is not None, f"{name} has no peak of memory: {notes}")
    matches = ((re.fullmatch(PART_AT_PEAK, column), size) for column, size in record.row.items())
    parts = {match[1]: size for match, size in matches if match and size is not None}
    require(bool(parts), f"{name} has a peak of {format_bytes(peak)}, and what fills it is not known")
    total = sum(parts.values())
    require(total == peak, f"the parts of {name}'s peak add up to {total}, not to {peak}")
    largest = sorted(parts, key=lambda part: -parts[part])[:3]
    return f"{format_bytes(total)} at the peak: " + ", ".join(f"{part} {parts[part] / peak:.0%}" for part in largest)


def time_adds_up(bench: Bench, records: Sequence[Record]) -> str:
    """Require that the parts of a step are known and add up to it; return the shares of communication and idle time."""
    (record,) = records
    name, row = _name(record), record.row
    unknown = ", ".join(part for part in STEP_PARTS if row.get(part) is None)
    require(not unknown, f"{name} has no {unknown}: its trace could not be split")
    total, step = sum(row[part] for part in STEP_PARTS), row["step_seconds"]
    adds_up = math.isclose(total, step, rel_tol=1e-6)
    require(adds_up, f"the parts of {name}'s step add up to {total} s, not to {step} s")
    exposed, idle = (row[part] / step for part in ("exposed_communication_seconds", "idle_seconds"))
    return f"a step takes {step * 1000:.1f} ms: {exposed:.0%} exposed communication, {idle:.0%} idle"


def reason(bench: Bench, records: Sequence[Record], words: str = "") -> str:
    """Return why the last run ended as it did. Require that its reason has these words."""
    text = str(records[-1].row["reason"])
    require(words in text, f"the reason of {_name(records[-1])} does not say '{words}': {text}")
    return text


def killed(bench: Bench, records: Sequence[Record]) -> str:
    """Require an error that names the killed rank and the signal."""
    return reason(bench, records, f"rank {records[-1].row['world_size'] - 1} was killed by SIGKILL")


def hung(bench: Bench, records: Sequence[Record]) -> str:
    """Require a timeout with stack traces that show where the hanging rank is."""
    (record,) = records
    stacks = bench.folder(record).stacks(record.row["world_size"] - 1)
    shows_place = stacks.exists() and HANGING_MODULE in stacks.read_text()
    require(shows_place, f"no stack traces show where the last rank hangs; the reason is: {record.row['reason']}")
    return reason(bench, records, "without progress of any rank")


def memory_as_predicted(bench: Bench, records: Sequence[Record]) -> str:
    """Require that predicted peaks are near the measured ones; return the ratio of every run."""
    for record in records:
        require(bool(record.row.get("peak_allocated_bytes")), f"{_name(record)} has no measured peak")
    ratios = [record.row["predicted_peak_bytes"] / record.row["peak_allocated_bytes"] for record in records]
    words = ", ".join(f"{_name(record)} {ratio:.2f}" for record, ratio in zip(records, ratios, strict=True))
    is_near = all(abs(ratio - 1) <= MEMORY_TOLERANCE for ratio in ratios)
    require(is_near, f"predicted over measured peak is not within {MEMORY_TOLERANCE:.0%} of 1: {words}")
    return f"predicted over measured peak: {words}"


def same_twice(bench: Bench, records: Sequence[Record]) -> str:
    """Require that two equal runs end with nearly the same loss; return the difference."""
    first, second = (record.row["loss_last"] for record in records)
    difference = abs(first - second) / abs(first)
    require(difference <= SAME_LOSS, f"the last losses of two equal runs are {first} and {second}")
    return f"the last losses differ by {difference:.0e}"


def learns_at_every_rate(bench: Bench, records: Sequence[Record]) -> str:
    """Require falling losses from the same first one, before which a learning rate changes nothing."""
    firsts = [record.row["loss_first"] for record in records]
    is_same = max(firsts) - min(firsts) <= SAME_LOSS * min(firsts)
    require(is_same, f"the first losses differ with the learning rate: {', '.join(map(str, firsts))}")
    changes = [record.row["loss_last"] - record.row["loss_first"] for record in records]
    rates = [record.config["train"]["lr"] for record in records]
    words = ", ".join(f"{change:+.2g} at {rate:g}" for change, rate in zip(changes, rates, strict=True))
    require(max(changes) < 0, f"a loss does not fall: {words}")
    return f"the first loss is {firsts[0]:.4f} at every learning rate, and it changes by {words}"


def no_better_with_bound_devices(bench: Bench, records: Sequence[Record]) -> str:
    """Require that pipelines have no larger bubbles than with process groups that are bound to devices."""
    usual = [bench.usual_run(record) for record in records]
    require_status(usual, "ok")
    pairs = zip(usual, records, strict=True)
    bubbles = ((bound, free.row["pipeline_bubble"], bound.row["pipeline_bubble"]) for free, bound in pairs)
    return "bubbles beside those with device_id: " + _bubbles(bubbles, "larger than with device_id")


def bubbles_as_in_theory(bench: Bench, records: Sequence[Record]) -> str:
    """Require that bubbles are not far above their formulas; return both."""
    bubbles = ((record, record.row["pipeline_bubble"], record.row["pipeline_bubble_theory"]) for record in records)
    return "bubbles beside the formulas': " + _bubbles(bubbles, "far above the formulas'")


def _bubbles(bubbles: Iterable[tuple[Record, float, float]], problem: str) -> str:
    """Return the bubble of each run, with the one in parentheses that it must not exceed by more than the tolerance."""
    words = []
    for record, bubble, limit in bubbles:
        words.append(f"{record.row['strategy']} {bubble:.3f} ({limit:.3f})")
        require(bubble <= limit + BUBBLE_TOLERANCE, f"bubbles are {problem} (in parentheses): {', '.join(words)}")
    return ", ".join(words)


def _name(record: Record) -> str:
    row = record.row
    name = f"{row['strategy']}, model={row['model']}, checkpointing={row['checkpointing']}"
    return name if row["engine"] == "torch" else f"{name}, engine={row['engine']}"
