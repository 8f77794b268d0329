"""When a device runs what a step launches: hand-checked schedules of one host, streams, waits and pipeline stages."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.hardware import FittedHardware
from harness.cost_model.parts import STEP_PARTS
from harness.layout.layout import resolve_layout
from harness.metrics.columns import simulated_time_columns
from harness.records.rank_report import RankReport, SimulatedTime
from harness.simulator.kernel_work import (
    AttentionKernel,
    Collective,
    HostLinkCopy,
    HostWork,
    Movement,
    Product,
    Transfers,
    Work,
    WorkCache,
    work_seconds,
)
from harness.simulator.operator_stream import Launch
from harness.simulator.stage_times import with_stage_waits
from harness.simulator.stream_schedule import PHASES, Player, TimedStep, write_trace
from tests.support.commands import compose_config
from tests.support.recorded_pipelines import rates

COMPUTES, SENDS, COPIES = Movement(0), Collective("all_gather", 0, (0, 1)), HostLinkCopy(0)

FREE = rates()  # of the host, and of what runs beside communication


def kernel(stream: str = "main", *after: int, work: Work | None = COMPUTES, phase: str = "forward") -> Launch:
    return Launch("kernel", work, stream, phase, "tp" if work is SENDS else "", after)


def gather(*after: int) -> Launch:
    return kernel("communicator", *after, work=SENDS)


def play(launches: list[Launch], seconds: list[float], hardware: FittedHardware = FREE, rank: int = 0) -> TimedStep:
    return Player(launches, [float(value) for value in seconds], hardware).play(rank)


def times(step: TimedStep) -> list[tuple[float, float]]:
    return [(round(start, 9), round(end, 9)) for start, end in zip(step.starts, step.ends, strict=True)]


def parts(time: SimulatedTime) -> tuple[float, ...]:
    """Return seconds of computing, of exposed and of overlapped communication, of copies, and of nothing."""
    sums = (sum(time.phase_seconds.values()), sum(time.exposed_seconds.values()))
    rest = (time.overlapped_seconds, time.copy_seconds, time.idle_seconds)
    return tuple(round(seconds, 9) for seconds in (*sums, *rest))


HOST = Launch("synchronize", None, "host", "forward", "", (0,))

# Launches, their seconds, rates, when each runs, and the parts of the step.
SCHEDULES: dict[str, tuple[list[Launch], list[float], FittedHardware, list[tuple[float, float]], tuple[float, ...]]] = {
    "one stream runs in order": ([kernel(), kernel()], [2, 3], FREE, [(0, 2), (2, 5)], (5, 0, 0, 0, 0)),
    "streams run beside each other": (
        [kernel(), gather()],
        [2, 3],
        FREE,
        [(0, 2), (0, 3)],
        (2, 1, 2, 0, 0),
    ),
    "a kernel waits for another stream": (
        [kernel(), gather(0), kernel("main", 1)],
        [2, 3, 1],
        FREE,
        [(0, 2), (2, 5), (5, 6)],
        (3, 3, 0, 0, 0),
    ),
    "a wait hides nothing that was launched before it": (
        [gather(), kernel(), kernel("main", 0)],
        [3, 2, 1],
        FREE,
        [(0, 3), (0, 2), (3, 4)],
        (3, 1, 2, 0, 0),
    ),
    # In two seconds of communication one of computing is done, so that the kernel ends a second later.
    "communication slows down what computes": (
        [kernel(), gather()],
        [3, 2],
        rates(0.0, 0.5),
        [(0, 4), (0, 2)],
        (4, 0, 2, 0, 0),
    ),
    "a host that is slower than its device": (
        [kernel(), kernel(), kernel()],
        [1, 1, 1],
        rates(2.0, 0.0),
        [(2, 3), (4, 5), (6, 7)],
        (3, 0, 0, 0, 4),
    ),
    "a host that runs ahead": (
        [kernel(), kernel(), kernel()],
        [5, 1, 1],
        rates(2.0, 0.0),
        [(2, 7), (7, 8), (8, 9)],
        (7, 0, 0, 0, 2),
    ),
    "a host that waits for its device": (
        [kernel(), HOST, kernel()],
        [5, 0, 1],
        rates(2.0, 0.0),
        [(2, 7), (7, 7), (9, 10)],
        (6, 0, 0, 0, 4),
    ),
    "a host that updates offloaded state": (
        [kernel(), HOST, kernel("host", work=HostWork(0)), kernel(), kernel("host", work=HostWork(0))],
        [5, 0, 3, 1, 2],
        FREE,
        [(0, 5), (5, 5), (5, 8), (8, 9), (8, 10)],
        (6, 0, 0, 0, 4),
    ),
    "a copy beside computing, and alone": (
        [kernel(), kernel("copies", work=COPIES)],
        [2, 3],
        FREE,
        [(0, 2), (0, 3)],
        (2, 0, 0, 1, 0),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_by_hand(name: str) -> None:
    launches, seconds, hardware, expected, expected_parts = SCHEDULES[name]
    step = play(launches, seconds, hardware)
    assert times(step) == expected
    assert parts(step.summary) == expected_parts
    computing, exposed, _, copying, idle = parts(step.summary)
    assert computing + exposed + copying + idle == step.summary.step_seconds  # the parts add up to the step


def test_launches_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(RuntimeError, match="wait for each other for ever"):
        play([kernel("main", 1), gather(0)], [1.0, 1.0])


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_aten = torch.ops.aten

CHANGED = tensor(10)  # by an operator in place, which reads it once and writes it once, or writes it alone

# An operator, its arguments, its result, and the kernel that it launches: bytes are two for each element.
KERNELS: list[tuple[Any, tuple[Any, ...], Any, Work | None]] = [
    (_aten.mm.default, (tensor(4, 8), tensor(8, 16)), tensor(4, 16), Product(1, 4, 16, 8, "bfloat16", 2)),
    (_aten.bmm.default, (tensor(3, 4, 8), tensor(3, 8, 16)), tensor(3, 4, 16), Product(3, 4, 16, 8, "bfloat16", 2)),
    (_aten.add.Tensor, (tensor(10), tensor(10)), tensor(10), Movement(60)),
    (_aten.add.Tensor, (tensor(10, 10), tensor(1, 10).expand(10, 10)), tensor(10, 10), Movement(420)),
    (_aten.add_.Tensor, (CHANGED, tensor(10)), CHANGED, Movement(60)),
    (_aten.copy_.default, (CHANGED, tensor(10)), CHANGED, Movement(40)),
    (_aten.view.default, (tensor(10), [5, 2]), tensor(5, 2), None),
    (_aten.empty.memory_format, ([10],), tensor(10), None),
    (_aten.embedding.default, (tensor(1000, 4), tensor(5, dtype=torch.int64)), tensor(5, 4), Movement(40 + 40 + 40)),
    (
        _aten._scaled_dot_product_flash_attention.default,
        (tensor(2, 4, 64, 32), tensor(2, 4, 64, 32), tensor(2, 4, 64, 32), 0.0, True),
        tensor(2, 4, 64, 32),
        AttentionKernel(128, 64, 4, 32, 0.5, "bfloat16", False),
    ),
]


@pytest.mark.parametrize(("func", "args", "result", "expected"), KERNELS, ids=lambda value: str(value)[:40])
def test_the_kernel_of_an_operator(func: Any, args: tuple[Any, ...], result: Any, expected: Work | None) -> None:
    work = WorkCache("meta").work_of(func, args, {}, result)
    assert (type(work), work) == (type(expected), expected)


def test_equally_many_bytes_take_another_time_on_the_device_to_the_host_and_on_it() -> None:
    hardware = compose_config("cluster=8xh100").cluster.hardware
    assert hardware is not None and hardware.host_bandwidth is not None
    moved, copied, updated = (work_seconds(kind(10**9), hardware, 8) for kind in (Movement, HostLinkCopy, HostWork))
    assert 10 * moved < copied == pytest.approx(10**9 / hardware.host_bandwidth, rel=0.1)
    assert 10 * moved < updated == pytest.approx(10**9 / hardware.host_bandwidth, rel=0.2)


def test_a_trace_has_every_kernel_on_the_row_of_its_stream(tmp_path: Path) -> None:
    launches, seconds, hardware, expected, _ = SCHEDULES["a kernel waits for another stream"]
    path = tmp_path / "trace.json"
    write_trace(path, [play(launches, seconds, hardware, rank=3)])
    events = json.loads(path.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    shown = [event for event in events if event["ph"] == "X" and rows[event["tid"]] != PHASES]
    assert [(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in shown] == expected
    assert [rows[event["tid"]] for event in shown] == ["main", "communicator", "main"]
    assert [event["args"].get("axis") for event in shown] == [None, "tp", None]
    (phase,) = (event for event in events if event["ph"] == "X" and rows[event["tid"]] == PHASES)
    assert (phase["name"], phase["dur"] / 1e6, phase["pid"]) == ("forward", 6, 3)


def test_the_columns_of_a_simulated_step_add_up_to_it() -> None:
    config = compose_config("cluster=8xh100", "strategy=pp_1f1b", "model=1b", "precision=bf16_mixed")
    phases = {"forward": 1.0, "backward": 2.0, "norm": 0.25, "optimizer": 0.5, "rest": 0.125}
    time = SimulatedTime(8.0, phases, {"pp": 0.5, "dp_shard": 1.0}, 0.75, copy_seconds=0.5, idle_seconds=2.125)
    shorter = dataclasses.replace(time, idle_seconds=3.0)
    ranks = [RankReport(rank, simulated_time=own) for rank, own in enumerate((shorter, time))]
    cells = simulated_time_columns(config, PIPELINE, ranks)
    assert sum(float(str(cells[name])) for name in STEP_PARTS) == cells["step_seconds"] == 8.0
    assert (cells["optimizer_seconds"], cells["idle_seconds"]) == (0.75, 2.125)  # of the stage that waits least
    assert cells["tokens_per_second_per_device"] == config.train.global_batch * config.train.seq_len / 8 / 2
    assert simulated_time_columns(config, PIPELINE, [*ranks, RankReport(2)]) == {}  # a rank that is not timed


def transfer(rank: int, direction: Any, peer: int, *after: int) -> Launch:
    return Launch("transfer", Transfers(rank, ((direction, peer, 0),)), "pair 0:1", "rest", "pp", after)


# One micro-batch through two stages: the second can begin when the first has sent, and the first goes on with backward
# when the second has sent back.
FIRST = play(
    [kernel("stream 0"), transfer(0, "send", 1, 0), transfer(0, "receive", 1), kernel("stream 0", 2, phase="backward")],
    [2.0, 1.0, 1.0, 4.0],
)
SECOND = play(
    [transfer(1, "receive", 0), kernel("stream 0", 0), kernel("stream 0"), transfer(1, "send", 0, 2)],
    [1.0, 3.0, 6.0, 1.0],
    rank=1,
)

PIPELINE = resolve_layout(compose_config("strategy=pp_1f1b").strategy, 2)


def test_stages_wait_for_each_other() -> None:
    first, second = with_stage_waits(PIPELINE, 1, [FIRST, SECOND])
    # 2 forward, 1 to send, 3 and 6 on the second stage, 1 to send back, 4 backward.
    assert first.summary.step_seconds == second.summary.step_seconds == pytest.approx(17)
    assert not first.summary.bubble_is_planned
    assert first.starts[3] == pytest.approx(13)
    assert second.starts[1] == pytest.approx(3)
    for step, own in ((first, FIRST), (second, SECOND)):
        assert step.summary.idle_seconds - own.summary.idle_seconds == pytest.approx(17 - own.summary.step_seconds)


def test_stages_meet_in_collectives_along_the_pipeline() -> None:
    launches = [kernel("stream 0"), kernel("stream 0", work=SENDS), kernel("stream 0", phase="optimizer")]
    meeting = [play(launches, [seconds, 1.0, 0.5], rank=rank) for rank, seconds in ((0, 2.0), (1, 5.0))]
    first, second = with_stage_waits(PIPELINE, 1, meeting)
    assert (first.summary.bubble_seconds, second.summary.bubble_seconds) == (3, 0)
    assert first.starts[2] == second.starts[2] == 6


def test_a_single_stage_has_the_planned_bubble() -> None:
    (alone,) = with_stage_waits(PIPELINE, 4, [FIRST])
    assert alone.summary.bubble_is_planned
    assert alone.summary.bubble_seconds == pytest.approx(FIRST.summary.step_seconds / 4)  # (2 - 1) / 4
    assert dataclasses.replace(
        alone.summary, step_seconds=0, idle_seconds=0, bubble_seconds=0, bubble_is_planned=False
    ) == (dataclasses.replace(FIRST.summary, step_seconds=0, idle_seconds=0))
