"""How a step's time divides: traces made by hand on both kinds of device, and a rank that really waits."""

from pathlib import Path

import numpy as np
import pytest
import sabotage
from conftest import composed
from hypothesis import given
from hypothesis import strategies as st

from harness import machine, run
from harness.measure.spans import common, seconds, spans, without
from harness.measure.trace import Happened, split
from harness.row import read_ranks

Pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


def covered(pairs: list[tuple[int, int]]) -> set[int]:
    return {moment for begin, end in pairs for moment in range(begin, end)}


@given(Pairs, Pairs)
def test_spans_are_sets_of_moments(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    one, two = spans(some), spans(others)
    assert covered([tuple(span) for span in one.tolist()]) == covered(some)
    assert (np.diff(one.flatten()) >= 0).all()
    assert covered([tuple(span) for span in common(one, two).tolist()]) == covered(some) & covered(others)
    assert covered([tuple(span) for span in without(one, two).tolist()]) == covered(some) - covered(others)
    assert seconds(one) == pytest.approx(len(covered(some)) / 1e9)


MS = 1_000_000  # of nanoseconds


def cpu(name: str, begin: int, end: int, thread: int = 1) -> Happened:
    return Happened(name, begin * MS, end * MS, False, thread)


def test_on_a_cpu_operators_hide_what_gloos_threads_do() -> None:
    found = split(
        [
            cpu("harness.step", 0, 100),
            cpu("harness.forward", 0, 30),
            cpu("aten::linear", 0, 30),  # holds another: not itself computing
            cpu("aten::addmm", 2, 20),
            cpu("harness.backward", 30, 90),
            cpu("autograd::engine::evaluate_function", 30, 90),
            cpu("aten::mm", 32, 50),
            cpu("c10d::allreduce_", 50, 51),
            cpu("aten::mm", 51, 60),
            cpu("gloo:all_reduce", 50, 80, thread=2),
            cpu("aten::mm", 60, 75, thread=3),  # of another thread: hides nothing
        ]
    )
    assert found.seconds == pytest.approx(0.1)
    assert found.phases["forward"] == pytest.approx((0.030, 0.0, 0.0))
    assert found.phases["backward"] == pytest.approx((0.060, 0.021, 0.0))  # 50 to 51, and 60 to 80
    assert found.phases["rest"] == pytest.approx((0.010, 0.0, 0.0))
    assert found.overlapped_seconds == pytest.approx(0.009)


def test_messages_are_waited_for_and_no_collective() -> None:
    found = split(
        [
            cpu("harness.step", 0, 100),
            cpu("harness.forward", 40, 60),
            cpu("aten::mm", 40, 60),
            cpu("gloo:recv", 0, 40, thread=2),
            cpu("gloo:send", 60, 90, thread=2),
        ]
    )
    assert found.phases["rest"] == pytest.approx((0.080, 0.0, 0.070))
    assert found.overlapped_seconds == 0 and found.phases["forward"].exposed_seconds == 0


def test_on_a_gpu_kernels_count_and_not_who_launches_them() -> None:
    def gpu(name: str, begin: int, end: int) -> Happened:
        return Happened(name, begin * MS, end * MS, True, 0)

    found = split(
        [
            cpu("harness.step", 0, 10),
            cpu("aten::mm", 0, 10),
            gpu("harness.step", 20, 120),
            gpu("harness.backward", 20, 100),
            gpu("ampere_sgemm", 20, 60),
            gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 50, 90),
            gpu("ncclDevKernel_SendRecv(ncclDevComm*)", 100, 110),
        ]
    )
    assert found.seconds == pytest.approx(0.1)
    assert found.phases["backward"] == pytest.approx((0.080, 0.030, 0.0))
    assert found.phases["rest"] == pytest.approx((0.020, 0.0, 0.010))
    assert found.overlapped_seconds == pytest.approx(0.010)


def test_a_rank_that_waits_for_another_communicates_exposed(tmp_path: Path) -> None:
    """Rank 1 sleeps in its forwards; rank 0 waits for it in the synchronisation at the end of backward."""
    small = ("train.global_batch=4", "train.micro_batch=1", "train.seq_len=16", "train.steps=1", "train.warmup_steps=1")
    config = composed(f"results_dir={tmp_path}", "proof.reference=false", "strategy=ddp", "world_size=2", *small)
    planned = run.plan(config, machine.look(config.cluster))
    record = run.execute(planned, [], lambda _: None, lambda _: None, sabotage.slow_rank)
    assert record["row"]["status"] == "ok", record["row"]["reason"]
    slept = 2 * 2 * sabotage.SLOW_SECONDS  # two traced steps of two micro-batches
    waiting, sleeping = (rank["traced"]["phases"] for rank in read_ranks(planned.directory, 2))
    assert waiting["backward"]["exposed_seconds"] > 0.8 * slept > 2 * sleeping["backward"]["exposed_seconds"]
    assert sleeping["forward"]["seconds"] > slept > 2 * waiting["forward"]["seconds"]
    assert sleeping["forward"]["exposed_seconds"] == 0
