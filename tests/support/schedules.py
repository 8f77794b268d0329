"""The order in which torch's own pipeline schedules run their operations."""

from typing import Any

from harness.config.strategy import StrategyConfig
from harness.engines.torch.pipeline_parallel import SCHEDULES
from harness.layout.layout import Layout, resolve_layout

Order = dict[int, list[tuple[int, str, int]]]  # by rank: stage, operation, micro-batch


def by_hand(schedule: str, p: int, rank: int, micro_batches: int) -> list[tuple[int, str, int]]:
    """Return one rank's order in GPipe or 1F1B, which torch writes as loops that send and receive."""
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, p - rank)
    turns = [("F", index) for index in range(ahead)]
    for index in range(micro_batches):
        turns += [("B", index)] + ([("F", index + ahead)] if index + ahead < micro_batches else [])
    return [(rank, operation, index) for operation, index in turns]


def laid_out(schedule: str, p: int, v: int) -> Layout:
    return resolve_layout(StrategyConfig("pp", pp=p, schedule=schedule, virtual_stages=v), p)


def order(layout: Layout, micro_batches: int) -> Order:
    """Return what each rank computes, in order, by torch's own schedule without any stages."""
    p, v = layout.pp, layout.virtual_stages
    if layout.schedule in ("gpipe", "1f1b"):
        return {rank: by_hand(layout.schedule, p, rank, micro_batches) for rank in range(p)}
    schedule: Any = object.__new__(SCHEDULES[layout.schedule])
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = p, v, micro_batches
    schedule.num_stages = layout.num_stages
    schedule.number_of_rounds = max(1, micro_batches // p)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    actions_by_rank = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(p)}
    # A forward and a backward that overlap are one action, which torch runs part by part.
    parts = {rank: [part for a in own if a for part in a.sub_actions or (a,)] for rank, own in actions_by_rank.items()}
    return {
        rank: [(part.stage_index, part.computation_type.value, part.microbatch_index) for part in own]
        for rank, own in parts.items()
    }
