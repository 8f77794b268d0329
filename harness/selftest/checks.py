"""The checks of the self-test's steps: what the records of their runs must say, and a few words on what they say."""

import math
from collections.abc import Callable, Sequence

from harness.config.byte_size import format_bytes
from harness.cost_model.parts import STEP_PARTS
from harness.records.rank_report import RunStatus
from harness.records.schema import Record
from harness.selftest.bench import Bench, StepFailedError

MEMORY_TOLERANCE = 0.1  # of a predicted peak, relative to the measured one

BUBBLE_TOLERANCE = 0.1  # by which the measured share of bubbles may exceed the formula's

SAME_LOSS = 1e-3  # the relative difference of the last losses of two equal runs in 16 bit

HANGING_MODULE = "rank_variants.py"  # the file in which a rank hangs on purpose

AT_PEAK, BYTES = "at_peak_", "_bytes"  # the beginning and the end of the columns that say what filled the peak


def ran(bench: Bench, records: Sequence[Record]) -> str:
    """Require that every run is ok; return their speeds."""
    require_status(records, "ok")
    return _by_run(records, lambda record: f"{record.row['tokens_per_second']:,.0f} tokens/s")


def proven(bench: Bench, records: Sequence[Record]) -> str:
    """Require that every run is ok and was compared with a single process; return kernels and deviations."""
    require_status(records, "ok")
    deviations = []
    for record in records:
        deviation = record.row.get("grad_deviation")
        if deviation is None:
            raise StepFailedError(f"{_name(record)} was not compared: {record.proof.get('reference')}")
        deviations.append(deviation)
    kernels = ", ".join(dict.fromkeys(str(record.row.get("attention_kernel")) for record in records))
    return f"gradients deviate by {max(deviations):.1g} at most from a single process's; attention: {kernels}"


def memory_adds_up(bench: Bench, records: Sequence[Record]) -> str:
    """Require that the blocks at the peak are known and add up to it; return the largest parts."""
    require_status(records, "ok")
    for record in records:
        peak = record.row.get("peak_allocated_bytes")
        if peak is None:
            notes = "; ".join(record.notes) or "the record does not say why"
            raise StepFailedError(f"{_name(record)} has no peak of memory: {notes}")
        sizes = {name: size for name, size in record.row.items() if name.startswith(AT_PEAK) and name.endswith(BYTES)}
        parts = {name[len(AT_PEAK) : -len(BYTES)]: size for name, size in sizes.items() if size is not None}
        if not parts:
            raise StepFailedError(f"{_name(record)} has a peak of {format_bytes(peak)}, and what fills it is not known")
        if sum(parts.values()) != peak:
            raise StepFailedError(f"the parts of {_name(record)}'s peak add up to {sum(parts.values())}, not to {peak}")
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    words = ", ".join(f"{name} {parts[name] / peak:.0%}" for name in largest)
    return f"{format_bytes(sum(parts.values()))} at the peak: {words}"


def time_adds_up(bench: Bench, records: Sequence[Record]) -> str:
    """Require that the parts of a step are known and add up to it; return the shares of communication and idle time."""
    require_status(records, "ok")
    for record in records:
        row = record.row
        unknown = [name for name in STEP_PARTS if row.get(name) is None]
        if unknown:
            raise StepFailedError(f"{_name(record)} has no {', '.join(unknown)}: its trace could not be split")
        total = sum(row[name] for name in STEP_PARTS)
        if not math.isclose(total, row["step_seconds"], rel_tol=1e-6):
            raise StepFailedError(
                f"the parts of {_name(record)}'s step add up to {total} s, not to {row['step_seconds']} s"
            )
    exposed, idle = (row[name] / row["step_seconds"] for name in ("exposed_communication_seconds", "idle_seconds"))
    return f"a step takes {row['step_seconds'] * 1000:.1f} ms: {exposed:.0%} exposed communication, {idle:.0%} idle"


def out_of_memory(bench: Bench, records: Sequence[Record]) -> str:
    """Require that every run is recorded as out of memory; return where the last one was."""
    require_status(records, "oom")
    return str(records[-1].row["reason"])


def killed(bench: Bench, records: Sequence[Record]) -> str:
    """Require an error that names the killed rank and the signal."""
    require_status(records, "error")
    (record,) = records
    return _require_words(record, f"rank {record.row['world_size'] - 1} was killed by SIGKILL")


def hung(bench: Bench, records: Sequence[Record]) -> str:
    """Require a timeout with stack traces that show where the hanging rank is."""
    require_status(records, "timeout")
    (record,) = records
    stacks = bench.folder(record).stacks(record.row["world_size"] - 1)
    if not stacks.exists() or HANGING_MODULE not in stacks.read_text():
        raise StepFailedError(f"no stack traces show where the last rank hangs; the reason is: {record.row['reason']}")
    return _require_words(record, "without progress of any rank")


def memory_as_predicted(bench: Bench, records: Sequence[Record]) -> str:
    """Require that predicted peaks are near the measured ones; return the ratio of every run."""
    require_status(records, "ok")
    ratios = {}
    for record in records:
        measured = record.row.get("peak_allocated_bytes")
        if not measured:
            raise StepFailedError(f"{_name(record)} has no measured peak")
        ratios[_name(record)] = record.row["predicted_peak_bytes"] / measured
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    if any(abs(ratio - 1) > MEMORY_TOLERANCE for ratio in ratios.values()):
        raise StepFailedError(f"predicted over measured peak is not within {MEMORY_TOLERANCE:.0%} of 1: {words}")
    return f"predicted over measured peak: {words}"


def same_twice(bench: Bench, records: Sequence[Record]) -> str:
    """Require that two equal runs end with nearly the same loss; return the difference."""
    require_status(records, "ok")
    first, second = (record.row["loss_last"] for record in records)
    difference = abs(first - second) / abs(first)
    if difference > SAME_LOSS:
        raise StepFailedError(f"the last losses of two equal runs are {first} and {second}")
    return f"the last losses differ by {difference:.0e}"


def learns_at_every_rate(bench: Bench, records: Sequence[Record]) -> str:
    """Require falling losses from the same first one, before which a learning rate changes nothing."""
    require_status(records, "ok")
    firsts = [record.row["loss_first"] for record in records]
    if max(firsts) - min(firsts) > SAME_LOSS * min(firsts):
        raise StepFailedError(f"the first losses differ with the learning rate: {', '.join(map(str, firsts))}")
    changes = [(record.config["train"]["lr"], record.row["loss_last"] - record.row["loss_first"]) for record in records]
    words = ", ".join(f"{change:+.2g} at {rate:g}" for rate, change in changes)
    if any(change >= 0 for _, change in changes):
        raise StepFailedError(f"a loss does not fall: {words}")
    return f"the first loss is {firsts[0]:.4f} at every learning rate, and it changes by {words}"


def no_better_with_bound_devices(bench: Bench, records: Sequence[Record]) -> str:
    """Require that pipelines have no larger bubbles than with process groups that are bound to devices."""
    require_status(records, "ok")
    words = []
    for record in records:
        other = bench.usual_run(record)
        require_status([other], "ok")
        bound, unbound = record.row["pipeline_bubble"], other.row["pipeline_bubble"]
        words.append(f"{record.row['strategy']} {unbound:.3f} ({bound:.3f})")
        if unbound > bound + BUBBLE_TOLERANCE:
            raise StepFailedError(f"bubbles are larger than with device_id (in parentheses): {', '.join(words)}")
    return f"bubbles beside those with device_id: {', '.join(words)}"


def bubbles_as_in_theory(bench: Bench, records: Sequence[Record]) -> str:
    """Require that bubbles are not far above their formulas; return both."""
    require_status(records, "ok")
    words = []
    for record in records:
        bubble, theory = record.row["pipeline_bubble"], record.row["pipeline_bubble_theory"]
        words.append(f"{record.row['strategy']} {bubble:.3f} ({theory:.3f})")
        if bubble > theory + BUBBLE_TOLERANCE:
            raise StepFailedError(f"bubbles are far above the formulas' (in parentheses): {', '.join(words)}")
    return f"bubbles beside the formulas': {', '.join(words)}"


def require_status(records: Sequence[Record], status: RunStatus) -> None:
    """Raise StepFailedError that names every run which did not end with this status."""
    problems = [
        f"{_name(record)} ended as {record.status}, and {status} is expected:"
        f" {record.row['reason'] or 'no reason is recorded'}"
        for record in records
        if record.status != status
    ]
    if problems:
        raise StepFailedError("; ".join(problems))


def _require_words(record: Record, words: str) -> str:
    reason = str(record.row["reason"])
    if words not in reason:
        raise StepFailedError(f"the reason of {_name(record)} does not say '{words}': {reason}")
    return reason


def _by_run(records: Sequence[Record], text: Callable[[Record], str]) -> str:
    return ", ".join(f"{record.row['strategy']} {text(record)}" for record in records)


def _name(record: Record) -> str:
    row = record.row
    name = f"{row['strategy']}, model={row['model']}, checkpointing={row['checkpointing']}"
    return name if row["engine"] == "torch" else f"{name}, engine={row['engine']}"
