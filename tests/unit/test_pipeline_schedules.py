"""Bubbles and passes in flight: formulas beside torch's own schedules, by unit times and by NCCL's stream rules."""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from harness.cost_model.pipeline import PassKind, bubble_ratio, max_in_flight_micro_batches, split_passes, v_passes
from harness.layout.layout import Layout, resolve_layout
from harness.layout.partition import balanced_layers
from harness.runner import plan
from harness.simulator.stage_times import MAIN, DeadlockError, StageKernel, play_kernels
from tests.support.commands import compose_config
from tests.support.nvml_tables import gpus
from tests.support.recorded_pipelines import Steps, record_pipeline, step_seconds
from tests.support.schedules import Order, laid_out, order

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # forward, whole backward, or its halves for inputs and weights


def simulated_seconds(orders: Order, layout: Layout) -> float:
    """Return when the last rank ends if each operation starts once its inputs are there."""
    places = {  # a whole backward is one for inputs, too
        (stage, operation.replace("B", "I"), number): (rank, place)
        for rank, actions in orders.items()
        for place, (stage, operation, number) in enumerate(actions)
    }

    @cache
    def end(rank: int, place: int) -> float:
        """Return when a rank has done so many operations."""
        stage, operation, index = orders[rank][place]
        needs = [(stage, "I", index)] if operation == "W" else [(stage, "F", index)]
        if operation == "F":
            needs = [(stage - 1, "F", index)] if stage else []
        elif operation in "BI" and stage < layout.num_stages - 1:
            needs.append((stage + 1, "I", index))
        waited = [end(rank, place - 1) if place else 0.0, *(end(*places[need]) for need in needs)]
        return max(waited) + SECONDS[operation] / layout.virtual_stages

    return max(end(*place) for place in sorted(places.values(), key=itemgetter(1)))


def max_in_flight(actions: list[tuple[int, str, int]]) -> int:
    """Return the most micro-batches whose backward has not ended."""
    return max(itertools.accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[operation] for _, operation, _ in actions))


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(
    ("schedule", "v"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
        ("zbv", 2),
    ],
)
def test_formulas_agree_with_torchs_schedules(schedule: str, v: int, p: int, rounds: int) -> None:
    layout = laid_out(schedule, p, v)
    micro_batches = p * rounds + p * layout.is_v_shaped  # at least one for each stage
    orders = order(layout, micro_batches)
    working = 3 * micro_batches
    assert (simulated_seconds(orders, layout) - working) / working == pytest.approx(bubble_ratio(layout, micro_batches))
    assert [max_in_flight(orders[pp_rank]) for pp_rank in range(p)] == [
        max_in_flight_micro_batches(layout, micro_batches, pp_rank) for pp_rank in range(p)
    ]


@pytest.mark.parametrize("more", [0, 1, 5, 40])
@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_the_order_of_a_v_is_torchs(schedule: Any, p: int, more: int) -> None:
    """From the first rank, which has both ends, to the last one, whose stages send each other nothing."""
    layout, micro_batches = laid_out(schedule, p, 2), 2 * p + more
    for pp_rank, actions in order(layout, micro_batches).items():
        own = layout.stage_indices(pp_rank)
        expected = [
            ({"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}[kind], own.index(stage))
            for stage, kind, _ in actions
        ]
        assert list(v_passes(schedule, p, micro_batches, pp_rank)) == expected
        assert sum(split_passes(layout, micro_batches, pp_rank)) == sum(kind == "inputs" for kind, _ in expected)
        most = max_in_flight_micro_batches(layout, micro_batches, pp_rank)
        assert most == max_in_flight(actions) == 2 * p + (schedule == "dualpipev")


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(0, 6), st.floats(0, 8), st.floats(0, 8))
def test_no_other_split_of_layers_is_more_even(count: int, more: int, first: float, last: float) -> None:
    depth = count + more

    def sizes(split: Sequence[int]) -> list[float]:
        """Return the sizes of the stages."""
        return list(map(sum, zip(split, [first, *[0.0] * (count - 2), last], strict=True))) if count > 1 else [0.0]

    layers = balanced_layers(depth, first, last, count)
    assert len(layers) == count and sum(layers) == depth and min(layers) >= 1
    cuts = itertools.combinations(range(1, depth), count - 1)
    splits = [sizes([end - start for start, end in itertools.pairwise((0, *inner, depth))]) for inner in cuts]
    assert max(sizes(layers)) <= min(map(max, splits)) + 1e-9
    assert math.hypot(*sizes(layers)) <= min(itertools.starmap(math.hypot, splits)) + 1e-9


STRATEGIES = ("pp_gpipe", "pp_1f1b", "pp_interleaved", "pp_zero_bubble", "pp_zbv", "pp_dualpipev")

DEGREES = (2, 4, 8)

# Seconds of a forward through all of a rank's stages are 1. A 7b model on 8 H100 sends 34 MB between stages, which
# takes 0.08 ms at 450 GB/s, and a forward of 7 TFLOP takes 14 ms at half of the peak.
TRANSFER_SECONDS = 0.01

Pipelines = dict[tuple[str, int], Steps]  # by strategy and degree

MARGIN = 0.02  # of the bubble above its formula, which counts no transfers


def layout_of(strategy: str, pp: int) -> Layout:
    return resolve_layout(compose_config(f"strategy={strategy}").strategy, pp)


@pytest.fixture(scope="module")
def pipelines() -> Pipelines:
    """Return the steps of every pipeline, with four micro-batches for each rank."""
    keys = [(strategy, pp) for strategy in STRATEGIES for pp in DEGREES]
    return {key: record_pipeline(layout_of(*key), 4 * key[1]) for key in keys}


def bubble(steps: Steps, layout: Layout, transfer_seconds: float, eager: bool) -> float:
    """Return the idle time of a step in units of the working time, which is 3 for every micro-batch."""
    share = 1 / layout.virtual_stages
    seconds: dict[PassKind, float] = {"forward": share, "backward": 2 * share, "inputs": share, "weights": share}
    working = 3 * 4 * layout.pp
    return (step_seconds(steps, seconds, transfer_seconds, eager) - working) / working


@pytest.mark.parametrize("pp", DEGREES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bubble_is_the_formulas(strategy: str, pp: int, pipelines: Pipelines) -> None:
    """Without the time of transfers it is exactly the formula's, and with it no more than the margin above.

    No device is bound to the group, as tests/unit/test_process_group.py shows of the worker's.
    """
    layout, recorded = layout_of(strategy, pp), pipelines[strategy, pp]
    formula = bubble_ratio(layout, 4 * pp)
    assert bubble(recorded, layout, 0.0, eager=False) == pytest.approx(formula)
    assert formula <= bubble(recorded, layout, TRANSFER_SECONDS, eager=False) <= formula + MARGIN


@pytest.mark.parametrize("pp", [4, 8])
def test_a_bound_device_would_make_interleaving_wait(pp: int, pipelines: Pipelines) -> None:
    """With device_id all single sends and receives of a group share a stream, and interleaving is worse than 1F1B."""
    interleaved, plain = (layout_of(strategy, pp) for strategy in ("pp_interleaved", "pp_1f1b"))
    eager = bubble(pipelines["pp_interleaved", pp], interleaved, TRANSFER_SECONDS, eager=True)
    assert eager > bubble(pipelines["pp_1f1b", pp], plain, TRANSFER_SECONDS, eager=True)
    assert eager > bubble_ratio(interleaved, 4 * pp) + 4 * MARGIN


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_torch_that_batches_every_message_trains_on_gpus_what_does_not_wait_there(
    strategy: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is what _batch_p2p did in torch 2.11: then the bubbles of the refused layouts grow, and no others."""
    monkeypatch.setattr(schedules, "_batch_p2p", lambda ops, desc=None: dist.batch_isend_irecv(ops) if ops else [])
    monkeypatch.setattr(plan, "torch_release", lambda: (2, 11))
    layout, micro_batches = layout_of(strategy, pp), 4 * pp
    batched = bubble(record_pipeline(layout, micro_batches), layout, TRANSFER_SECONDS, eager=False)
    problems = list(plan.machine_problems(compose_config(f"strategy={strategy}"), layout, gpus(pp)))
    assert ("waits for itself before torch 2.12" in str(problems)) is (
        batched > bubble_ratio(layout, micro_batches) + MARGIN
    )


def compute(rank: int, *after: StageKernel) -> StageKernel:
    return StageKernel(rank, MAIN, 1.0, after)


def transfer(
    rank: int, direction: Any, peer: int, *after: StageKernel, seconds: float = 0.0, stream: str | None = None
) -> StageKernel:
    pair = f"pair {min(rank, peer)}:{max(rank, peer)}"
    return StageKernel(rank, stream or pair, seconds, after, ((direction, peer, 0),))


def test_transfers_take_their_time_from_the_later_side() -> None:
    sends, receives = transfer(0, "send", 1, first := compute(0), seconds=0.5), transfer(1, "receive", 0, seconds=0.5)
    assert play_kernels([[first, sends], [receives, compute(1, receives)]]) == 2.5


def test_a_receive_that_nobody_waits_for_yet_delays_nothing_but_its_own_stream() -> None:
    """Rank 1 has work before the message comes: its stream computes while the transfer's waits."""
    sends, receives = transfer(0, "send", 1, first := compute(0)), transfer(1, "receive", 0)
    assert play_kernels([[first, sends], [receives, compute(1), compute(1, receives)]]) == 2.0


@pytest.mark.parametrize(("stream", "expected"), [(None, 2.0), ("group", 3.0)])
def test_a_stream_of_the_group_keeps_a_send_behind_a_receive(stream: str | None, expected: float) -> None:
    """Rank 1 first launches a receive from rank 0, which sends late, then a send to rank 2, which waits for it."""
    late = [compute(0), second := compute(0), transfer(0, "send", 1, second, stream=stream)]
    middle = [transfer(1, "receive", 0, stream=stream), transfer(1, "send", 2, stream=stream)]
    receives = transfer(2, "receive", 1, stream=stream)
    assert play_kernels([late, middle, [receives, compute(2, receives)]]) == expected


def test_sends_that_wait_for_each_other_are_a_deadlock() -> None:
    both = [[transfer(rank, "send", 1 - rank), transfer(rank, "receive", 1 - rank)] for rank in (0, 1)]
    with pytest.raises(DeadlockError, match=r"waits for itself on rank 0 \(pair 0:1\), rank 1 \(pair 0:1\)"):
        play_kernels(both)
    batches = [
        [StageKernel(rank, "group", 0.5, transfers=(("send", 1 - rank, 0), ("receive", 1 - rank, 0)))]
        for rank in (0, 1)
    ]
    assert play_kernels(batches) == 0.5  # a batch is one kernel


def test_a_single_send_never_meets_a_receive_in_a_batch() -> None:
    """Without a bound device they run over communicators of their own."""
    with pytest.raises(DeadlockError, match="sends 0 times to rank 1 on the stream group"):
        play_kernels([[transfer(0, "send", 1)], [transfer(1, "receive", 0, stream="group")]])
    assert (
        play_kernels([[transfer(rank, way, 1 - rank, stream="group")] for rank, way in ((0, "send"), (1, "receive"))])
        == 0.0
    )
