"""The one report of a reference that several ranks trained: what a single process would have reported of it."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from harness.proof.deviations import gradients_at
from harness.records.rank_report import Box, RankReport, TensorFingerprint


def merge_reports(ranks: Sequence[RankReport]) -> RankReport:
    """Return the report of a run's ranks together: mean losses and fingerprints of whole tensors.

    Whatever else there is comes from the first rank. The run must be proven: its ranks agree, and have every tensor.
    """
    merged: RankReport = _merge(ranks)
    return merged


def _merge(reports: Sequence[Any]) -> Any:
    """Return the first report with the losses and fingerprints of all, also in the reports that it contains."""
    first = reports[0]
    if len(reports) == 1:
        return first
    changes: dict[str, Any] = {}
    for entry in dataclasses.fields(first):
        values = [getattr(report, entry.name) for report in reports]
        if entry.name == "losses":
            changes[entry.name] = [_mean(losses) for losses in zip(*values, strict=True)]
        elif entry.name == "gradient_squares":
            steps = range(min(len(squares) for squares in values))
            whole = [_whole_tensors(gradients_at(step, report) for report in reports) for step in steps]
            changes[entry.name] = [[tensor.square for tensor in tensors] for tensors in whole]
        elif any(_is_fingerprints(value) for value in values):
            changes[entry.name] = _whole_tensors(values)
        elif any(value is None for value in values):
            changes[entry.name] = None
        elif hasattr(values[0], "losses"):  # the report of another training by the same ranks
            changes[entry.name] = _merge(values)
    return dataclasses.replace(first, **changes)


def _is_fingerprints(value: Any) -> bool:
    """Return whether a field's value is a list of fingerprints that is not empty."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], TensorFingerprint)


def _whole_tensors(of_ranks: Iterable[Sequence[TensorFingerprint]]) -> list[TensorFingerprint]:
    """Return the fingerprint of every whole tensor: the sums over its shards, of which copies count once."""
    shards: dict[str, dict[Box, TensorFingerprint]] = {}
    for fingerprints in of_ranks:
        for fingerprint in fingerprints:
            shards.setdefault(fingerprint.name, {}).setdefault(fingerprint.box, fingerprint)
    return [_whole_tensor(list(boxes.values())) for boxes in shards.values()]


def _whole_tensor(shards: Sequence[TensorFingerprint]) -> TensorFingerprint:
    first = shards[0]
    box = tuple((0, size) for size in first.shape)
    square = _sum(shard.square for shard in shards)
    return first._replace(box=box, square=square, projection=_sum(shard.projection for shard in shards))


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None, as in a file for what is not finite, if any value is None."""
    numbers = list(values)
    return None if None in numbers else math.fsum(number for number in numbers if number is not None)


def _mean(values: Sequence[float | None]) -> float | None:
    total = _sum(values)
    return None if total is None else total / len(values)
