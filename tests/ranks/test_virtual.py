"""Virtual ranks against the same ranks of real runs: equal memory, operations and messages."""

from pathlib import Path
from typing import NamedTuple

import pytest

from harness.metrics.columns import sent_bytes
from harness.records.rank_report import RankReport
from harness.records.schema import Record
from harness.runner import launch_run
from harness.simulator.process import virtual_entry
from tests.support import combinations
from tests.support.combinations import COMBINATIONS, TWO_LAYERS, Combination, data_parallel, model_parallel
from tests.support.commands import Entry, assert_not_proven, long, run_with
from tests.support.faults import virtual as faults
from tests.support.row_invariants import check_bytes


class Case(NamedTuple):
    """A rank of a combination that is run alone."""

    combination: Combination
    rank: int

    def __str__(self) -> str:
        return f"{self.combination} rank {self.rank}"

    def virtual_record(self, results: Path, entry: Entry = virtual_entry) -> Record:
        """Return the record of the virtual run, in whose process `entry` runs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch_run, "virtual_entry", entry)
            strategy, world_size, options = self.combination
            sizes = (f"strategy={strategy}", f"world_size={world_size}", *options)
            return run_with(results, *sizes, "launch=virtual", f"simulate.rank={self.rank}", entry=entry)


EVENLY_ROUTED = ("model=moe_tiny", "model.routing=balanced", TWO_LAYERS)

FAST = [
    Case(data_parallel("ddp"), 0),
    Case(data_parallel("fsdp_full_shard"), 1),
    Case(data_parallel("zero3"), 1),
    Case(model_parallel("pp_1f1b"), 1),
    Case(model_parallel("tp"), 1),
    Case(Combination("ep", 2, EVENLY_ROUTED), 1),
]

OTHERS = [
    *(
        Combination("cp"),
        Combination("cp_ulysses"),
        Combination("3d", 4, ("model.num_hidden_layers=4",)),
        Combination("zero1_tp"),
    ),
    *(Combination("fsdp_hybrid_shard", 4), Combination("ddp_pp", 4), Combination("zero_offload")),
    Combination("fsdp_ep", 4, EVENLY_ROUTED),
    *(Combination("zero2", 2, ("strategy.engine=accelerate",)), model_parallel("pp_gpipe", 4, "full")),
]

LONG = [
    Case(combination, rank)
    for combination in (*COMBINATIONS, *combinations.LONG, *OTHERS)
    if combination.world_size > 1
    for rank in (0, combination.world_size - 1)
]


REAL_RUNS = 4  # at most, for a peak

PEAK = 1e-3


def differences(case: Case, virtual: Record, results: Path) -> list[str]:
    """Return where a virtual rank is not like the real one: peak, state, operations, bytes sent, passes in flight.

    While the peaks alone differ, the real ranks run again. Two real runs of one layout differ now and then by a tensor
    that gloo's thread, or autograd's, releases a moment after the main thread goes on: on a busy machine 361,276 bytes
    of 9 MB were seen under zero2. Everything else is equal.
    """
    problems: list[str] = []
    for number in range(REAL_RUNS):
        folder = results / f"real_{number}" if number else results  # which other tests share
        folder.mkdir(exist_ok=True)
        problems = differences_from(virtual, case.combination.record(folder).ranks[case.rank])
        if not all(problem.startswith("peak") for problem in problems) or not problems:
            return problems
    return problems


def differences_from(virtual: Record, real: RankReport) -> list[str]:
    """Return where a virtual rank is not like this real one."""
    rank = virtual.ranks[0]
    peak, real_peak = virtual.row["peak_allocated_bytes"], real.profiled.peak_without_backend_bytes
    pairs = {
        "peak": (peak, peak if abs(peak / real_peak - 1) <= PEAK else real_peak),
        "state": (rank.parameter_bytes + rank.optimizer_bytes, real.parameter_bytes + real.optimizer_bytes),
        "activations": (rank.profiled.activation_bytes, real.profiled.activation_bytes),
        "operations": (rank.profiled.flops, real.profiled.flops),
        "bytes sent": (sent_bytes(rank), sent_bytes(real)),
        "in flight": (rank.profiled.max_in_flight_micro_batches, real.profiled.max_in_flight_micro_batches),
    }
    return [f"{name}: {values[0]} and not {values[1]}" for name, values in pairs.items() if values[0] != values[1]]


def check_virtual_row(case: Case, virtual: Record) -> None:
    """Check that the row is proven without values, and that nothing in it looks like a measured step of a world."""
    row = virtual.row
    assert (row["status"], row["reason"], row["launch"]) == ("ok", "", "virtual")
    assert row["reference"].startswith("none: the other ranks of a virtual run do not exist")
    assert (virtual.proof["layout"], virtual.proof["reference"]) == ("proven", row["reference"])
    assert [rank.rank for rank in virtual.ranks] == [case.rank] == [row["peak_rank"]]
    whole_steps = ("step_seconds", "tokens_per_second", "mfu", "exposed_communication_seconds", "loss_first")
    assert {name: row.get(name) for name in whole_steps} == dict.fromkeys(whole_steps)
    assert min(row[f"{part}_seconds"] for part in ("forward", "backward", "optimizer")) > 0
    assert row["skipped_steps"] == 0 or row["precision"] == "fp16_mixed"
    check_bytes(virtual)


@pytest.mark.parametrize("case", [*FAST, *(long(case) for case in LONG)], ids=str)
def test_a_virtual_rank_is_like_the_real_one(results: Path, case: Case) -> None:
    virtual = case.virtual_record(results)
    check_virtual_row(case, virtual)
    assert differences(case, virtual, results) == []


@pytest.mark.parametrize(
    ("case", "fault", "problem"),
    [
        (Case(Combination("pp_1f1b"), 1), faults.nothing_received, "rank 1: the loss is not finite from step 0 on"),
        (Case(Combination("ddp"), 1), faults.bucket_not_reduced, "dp_replicate"),
    ],
)
def test_a_stand_in_that_does_not_do_its_part_is_an_error(
    results: Path, case: Case, fault: Entry, problem: str
) -> None:
    assert_not_proven(case.virtual_record(results, fault), problem)


@pytest.mark.long
def test_tokens_of_other_ranks_make_gradients_overflow(results: Path) -> None:
    deep = Combination("tp_sp", 2, ("model.num_hidden_layers=8", "precision=fp16_mixed", "train.global_batch=2"))
    assert Case(deep, 1).virtual_record(results).row["status"] == "ok"
    broken = Case(deep, 1).virtual_record(results, faults.whole_vocabulary)
    assert broken.row["status"] == "error" and "gradients overflowed in every warm-up step" in broken.row["reason"]


@pytest.mark.long
def test_messages_that_are_freed_early_show_in_the_peak(results: Path) -> None:
    model = ("hidden_size=256", "intermediate_size=772", "num_attention_heads=8", "num_hidden_layers=8")
    sizes = (*(f"model.{size}" for size in model), "model.vocab_size=579", "train.global_batch=16", "train.seq_len=32")
    case = Case(Combination("pp_gpipe", 4, ("checkpointing=selective", "data=synthetic", *sizes)), 3)
    assert differences(case, case.virtual_record(results), results) == []
    problems = differences(case, case.virtual_record(results, faults.sent_tensors_dropped), results)
    assert [problem.partition(":")[0] for problem in problems] == ["peak"]


def test_one_rank_of_every_stage_is_run_in_turn(results: Path) -> None:
    record = run_with(results, "strategy=pp_1f1b", "launch=virtual", "simulate.rank=all", entry=virtual_entry)
    assert (record.row["status"], [rank.rank for rank in record.ranks]) == ("ok", [0, 1])
    assert record.row["executed_flops"] == sum(rank.profiled.flops for rank in record.ranks)
