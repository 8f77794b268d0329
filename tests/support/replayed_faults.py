"""Faults planted in the reports of a recorded run's ranks, in milliseconds.

Each changes the reports as a planted fault of tests.support.faults does with real ranks, whose run is marked long. The
run itself was proven, so that the problems are those of the change alone.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.config.command import read_run_config
from harness.cost_model.ring import LAYOUT
from harness.engines.base import load_engine
from harness.layout.layout import resolve_layout
from harness.proof.reference import merge_reports
from harness.proof.verify import verify_run
from harness.records.rank_report import RankReport, StateShard, TensorFingerprint, Traffic
from harness.records.run_folder import RunFolder
from tests.support.combinations import Combination
from tests.support.commands import COMPARISON, compose, run_folder

Reports = list[RankReport]

Fault = Callable[[Reports], Reports]

Change = dataclasses.replace


def problems_of(results: Path, combination: Combination, fault: Fault) -> list[str]:
    """Return the problems that the proof names in the recorded run after the fault has changed its reports."""
    record = combination.record(results)
    assert record.status == "ok", record.row["reason"]
    config = read_run_config(record.config)
    layout = resolve_layout(config.strategy, record.row["world_size"])
    widths = load_engine(layout.engine).state_widths(config, layout)
    ranks = run_folder(results, record).read_rank_reports(layout.world_size)
    note, reference = record.proof["reference"], None
    if note.startswith("compared with "):
        name = note.removeprefix("compared with ").partition(";")[0]
        folder = RunFolder(results / COMPARISON / "references" / name)
        reference = merge_reports(folder.read_rank_reports(layout.world_size))
    bounds = compose()[1].proof
    assert verify_run(config, bounds, layout, widths, ranks, reference, note).columns["status"] == "ok"
    verdict = verify_run(config, bounds, layout, widths, fault(ranks), reference, note)
    assert verdict.columns["status"] == "error"
    problems: list[str] = verdict.parts["proof"]["problems"]
    return problems


def profiled(ranks: Reports, **values: Any) -> Reports:
    """Return the reports with these values in their profiled step."""
    return [Change(rank, profiled=Change(rank.profiled, **values)) for rank in ranks]


def traffic(ranks: Reports, change: Callable[[Traffic], Traffic]) -> Reports:
    """Return the reports with every entry of traffic changed."""
    return [profiled([rank], communication=[*map(change, rank.profiled.communication)])[0] for rank in ranks]


def each(ranks: Reports, change: Callable[[Any], Any], *fields: str) -> Reports:
    """Return the reports with every tensor in these fields changed."""
    return [Change(rank, **{field: [*map(change, getattr(rank, field))] for field in fields}) for rank in ranks]


def scaled(entry: Traffic, factor: float) -> Traffic:
    """Return an entry with as many times the bytes in the same number of calls."""
    return Change(entry, bytes_sent=entry.bytes_sent * factor)


def whole(shard: Any) -> Any:
    """Return a shard or fingerprint that covers the whole tensor."""
    return shard._replace(box=tuple((0, size) for size in shard.shape))


# --- volume


def uncounted(ranks: Reports) -> Reports:
    """Leave out one kind of operation."""
    return traffic(ranks, lambda entry: scaled(entry, 0) if entry.operation == "reduce_scatter" else entry)


def lower_stage(ranks: Reports) -> Reports:
    """Send two thirds of the gradients' bytes, as ZeRO-1 sends of ZeRO-2's."""
    return traffic(ranks, lambda entry: scaled(entry, 2 / 3))


def boundary_sent_twice(ranks: Reports) -> Reports:
    """Send every activation to the next stage a second time."""
    return traffic(ranks, lambda entry: scaled(entry, 2) if entry.operation == "send" else entry)


def sequence_whole(ranks: Reports) -> Reports:
    """Send the sums of sequence parallelism as all-reduces."""

    def change(entry: Traffic) -> Traffic:
        is_scattered = entry.operation in ("reduce_scatter", "all_gather")
        return Change(entry, operation="all_reduce") if is_scattered else entry

    return traffic(ranks, change)


def gathered_once_more(ranks: Reports) -> Reports:
    """Gather the smallest tensor, such as the final norm's weight, once more than the layout does."""
    return smallest_call_counted(ranks, ("all_gather",), times=1)


def reduced_once_less(ranks: Reports) -> Reports:
    """Leave out one reduction of the smallest gradient that is reduced by itself."""
    return smallest_call_counted(ranks, ("reduce_scatter", "reduce"), times=-1)


def smallest_call_counted(ranks: Reports, operations: Sequence[str], times: int) -> Reports:
    """Return the reports in which the smallest call of these operations runs so many times more."""

    def change(entry: Traffic) -> Traffic:
        if entry.operation not in operations or entry.purpose != LAYOUT:
            return entry
        sizes = {int(size): count for size, count in entry.sizes.items()}
        moved = sum(size * count for size, count in sizes.items())
        return Change(entry, bytes_sent=entry.bytes_sent * (moved + times * min(sizes)) / moved)

    return traffic(ranks, change)


# --- operations


def layer_twice(ranks: Reports) -> Reports:
    """Run every layer a second time in forward."""
    return [profiled([rank], flops=rank.profiled.flops * 4 // 3)[0] for rank in ranks]


def recomputed_once_less(ranks: Reports) -> Reports:
    """Leave out one second forward."""
    return [profiled([rank], recomputations=rank.profiled.recomputations - 1)[0] for rank in ranks]


def never_recomputed(ranks: Reports) -> Reports:
    """Run no forward a second time."""
    return profiled(ranks, recomputations=0)


def other_schedule(ranks: Reports) -> Reports:
    """Keep every micro-batch in flight, as GPipe does."""
    return profiled(ranks, max_in_flight_micro_batches=4)


def weights_not_put_off(ranks: Reports) -> Reports:
    """Compute the weights' gradients in zero bubble's backward for inputs as well."""
    return profiled(ranks, split_backwards=0)


# --- state


def other_optimizer(ranks: Reports) -> Reports:
    """Hold no moments, as plain SGD."""
    return [Change(rank, optimizer_shards=[], optimizer_bytes=0) for rank in ranks]


def parameters_in_16_bit(ranks: Reports) -> Reports:
    """Hold parameters in the data type of mixed precision's compute."""
    return each(ranks, lambda shard: shard._replace(dtype="bfloat16"), "parameter_shards")


def summed_in_16_bit(ranks: Reports) -> Reports:
    """Sum gradients in the data type of the compute."""
    return profiled(ranks, gradient_dtypes=["bfloat16"])


def tensor_parallel_dropped(ranks: Reports) -> Reports:
    """Hold every parameter whole on every rank."""
    return each(ranks, whole, "parameter_shards")


def whole_gradient(ranks: Reports) -> Reports:
    """Hold the embedding's gradient whole on every rank."""
    name = "embed_tokens.weight"
    return each(ranks, lambda gradient: whole(gradient) if gradient.name == name else gradient, "first_gradients")


def other_layers(ranks: Reports) -> Reports:
    """Hold the first stage's layers on both stages."""

    def change(shard: StateShard) -> StateShard:
        return shard._replace(name=shard.name.replace("layers.2.", "layers.0.").replace("layers.3.", "layers.1."))

    return each(ranks, change, "parameter_shards")


def whole_model_built(ranks: Reports) -> Reports:
    """Make all of the model's weights on every stage while it is built."""
    peak = sum(rank.parameter_bytes for rank in ranks)
    return [Change(rank, start_peak_bytes=(rank.start_peak_bytes or 0) + peak) for rank in ranks]


def offload_dropped(ranks: Reports) -> Reports:
    """Keep no state on the host."""
    return [Change(rank, host_state=[]) for rank in ranks]


# --- training


def halved(ranks: Reports) -> Reports:
    """Halve the gradient of one small parameter."""

    def change(gradient: TensorFingerprint) -> TensorFingerprint:
        if gradient.name != "layers.1.input_layernorm.weight":
            return gradient
        return gradient._replace(square=gradient.square / 4, projection=gradient.projection / 2)

    return each(ranks, change, "first_gradients", "last_gradients")


def not_finite(ranks: Reports) -> Reports:
    """Report a loss that is not a number, which files have as null."""
    return [Change(rank, losses=[None] * len(rank.losses)) for rank in ranks]


def loss_of_its_own(ranks: Reports) -> Reports:
    """Report another loss on each rank, with the right mean."""
    return [Change(rank, losses=[(loss or 0) * (1.5 - rank.rank) for loss in rank.losses]) for rank in ranks]


def norm_of_its_own(ranks: Reports) -> Reports:
    """Report another gradient norm on each rank, as if each clipped by that of its own part."""
    return [Change(rank, grad_norms=[(norm or 0) * (1.5 - rank.rank) for norm in rank.grad_norms]) for rank in ranks]


def norms_drift(ranks: Reports) -> Reports:
    """Never update rank 1's masters of the norms."""

    def change(master: TensorFingerprint) -> TensorFingerprint:
        return master._replace(square=float(master.shape[0])) if "norm" in master.name else master

    return [ranks[0], *each(ranks[1:], change, "last_masters")]


def heads_drop_alike(ranks: Reports) -> Reports:
    """Drop the same elements of attention on all tensor-parallel ranks."""
    return [Change(rank, dropout_rng_ranks=[None]) for rank in ranks]
