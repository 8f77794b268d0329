"""The division of a step's time, on hand-made traces of both kinds of device and with a rank that really waits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.intervals import difference, intersection, merged_intervals, total_seconds
from harness.measure.time_breakdown import StepTrace, TraceEvent, cpu_time_breakdown, gpu_time_breakdown
from harness.records.run_folder import RunFolder
from tests.support import faults
from tests.support.commands import compose, execute_run

Pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


def covered(pairs: list[tuple[int, int]]) -> set[int]:
    return {moment for begin, end in pairs for moment in range(begin, end)}


@given(Pairs, Pairs)
def test_intervals_are_sets_of_moments(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    first, second = merged_intervals(some), merged_intervals(others)
    assert covered([tuple(span) for span in first.tolist()]) == covered(some)
    assert (np.diff(first.flatten()) >= 0).all()
    assert covered([tuple(span) for span in intersection(first, second).tolist()]) == covered(some) & covered(others)
    assert covered([tuple(span) for span in difference(first, second).tolist()]) == covered(some) - covered(others)
    assert total_seconds(first) == pytest.approx(len(covered(some)) / 1e9)


MS = 1_000_000  # of nanoseconds


def cpu(name: str, begin: int, end: int, thread: int = 1) -> TraceEvent:
    return TraceEvent(name, begin * MS, end * MS, False, thread)


def test_operators_on_a_cpu_hide_gloos_threads() -> None:
    breakdown = cpu_time_breakdown(
        [
            cpu("harness.step", 0, 100),
            cpu("harness.forward", 0, 30),
            cpu("aten::linear", 0, 30),
            cpu("aten::addmm", 2, 20),  # inside another
            cpu("gloo:all_reduce", 0, 20, thread=2),
            cpu("harness.backward", 30, 90),
            cpu("autograd::engine::evaluate_function", 30, 90),
            cpu("aten::mm", 32, 50),
            cpu("aten::mm", 50, 60),
            cpu("c10d::allreduce_", 50, 51),  # inside another, as a DTensor's
            cpu("gloo:all_reduce", 50, 80, thread=2),
            cpu("aten::mm", 60, 75, thread=3),  # of another thread: hides nothing
        ]
    )
    assert breakdown.seconds == pytest.approx(0.1)
    assert breakdown.phases["forward"] == pytest.approx((0.030, 0.0, 0.0))
    assert breakdown.phases["backward"] == pytest.approx((0.060, 0.021, 0.0))  # 50 to 51, and 60 to 80
    assert breakdown.phases["rest"] == pytest.approx((0.010, 0.0, 0.0))
    assert breakdown.overlapped_seconds == pytest.approx(0.029)


def test_waiting_for_messages_is_no_exposed_communication() -> None:
    breakdown = cpu_time_breakdown(
        [
            cpu("harness.step", 0, 100),
            cpu("harness.forward", 40, 60),
            cpu("aten::mm", 40, 60),
            cpu("gloo:recv", 0, 40, thread=2),
            cpu("gloo:send", 60, 90, thread=2),
        ]
    )
    assert breakdown.phases["rest"] == pytest.approx((0.080, 0.0, 0.070))
    assert breakdown.overlapped_seconds == 0 and breakdown.phases["forward"].exposed_seconds == 0


def test_a_matrix_product_hides_a_collective() -> None:
    """In a real trace torch lists small operators inside the product, and its own work outside every operator."""
    trace, matrix = StepTrace(torch.device("cpu")), torch.randn(1500, 1500)
    with trace, trace.phase("step"), trace.phase("forward"):
        matrix @ matrix
    breakdown = trace.breakdown()
    assert breakdown is not None and trace.profiler.profiler is not None
    results = trace.profiler.profiler.kineto_results
    product = next(event for event in results.events() if event.name() == "aten::mm")
    begin, end = product.start_ns(), product.start_ns() + product.duration_ns()
    marks = [TraceEvent(f"harness.{name}", begin, end, thread=1) for name in ("step", "forward")]
    listed = [TraceEvent(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), thread=1) for e in results.events()]
    listed = [event for event in listed if event.name.startswith("aten::")]
    hidden = cpu_time_breakdown([*marks, *listed, TraceEvent("gloo:all_reduce", begin, end, thread=2)])
    assert hidden.overlapped_seconds == pytest.approx(breakdown.seconds, rel=0.2)
    assert hidden.phases["forward"].exposed_seconds == 0


def gpu(name: str, begin: int, end: int, launched_by: int, annotation: bool = False) -> TraceEvent:
    return TraceEvent(name, begin * MS, end * MS, True, 0, launched_by=launched_by, is_annotation=annotation)


def launch(number: int, moment: int, thread: int = 1) -> TraceEvent:
    return TraceEvent("aten::mm", moment * MS, (moment + 1) * MS, False, thread, number)


REDUCE, MESSAGE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", "ncclDevKernel_SendRecv(ncclDevComm*)"


def test_gpu_kernels_count_for_the_phase_that_launched_them() -> None:
    """Backward runs in another thread; annotations around kernels are neither kernels nor phases."""
    breakdown = gpu_time_breakdown(
        [
            cpu("harness.step", 0, 20),
            cpu("harness.forward", 0, 4),
            cpu("harness.backward", 5, 14),
            launch(1, 1),
            launch(2, 6, thread=9),
            launch(3, 7, thread=9),
            launch(4, 15),
            gpu("sgemm", 20, 40, launched_by=1),
            gpu("harness.backward", 90, 91, launched_by=3, annotation=True),
            gpu("FSDP::all_gather", 50, 110, launched_by=2, annotation=True),
            gpu("sgemm", 50, 60, launched_by=2),
            gpu(REDUCE, 55, 80, launched_by=2),
            gpu("sgemm", 90, 100, launched_by=3),
            gpu(MESSAGE, 100, 110, launched_by=3),
            gpu("adam", 110, 120, launched_by=4),
        ]
    )
    assert breakdown is not None and breakdown.seconds == pytest.approx(0.1)
    assert breakdown.phases["forward"] == pytest.approx((0.020, 0.0, 0.0))
    assert breakdown.phases["backward"] == pytest.approx((0.050, 0.020, 0.010))  # 60 to 80 exposed, 80 to 90 nothing
    assert breakdown.phases["rest"] == pytest.approx((0.030, 0.0, 0.020))  # before backward, the message, then adam
    assert breakdown.overlapped_seconds == pytest.approx(0.005)


def test_a_phase_ends_where_the_next_begins() -> None:
    """Streams overlap, but the parts of a step must not."""
    listed = [cpu("harness.step", 0, 9), cpu("harness.forward", 0, 4), cpu("harness.backward", 4, 9)]
    listed += [launch(1, 1), launch(2, 5), gpu("copy", 10, 40, launched_by=1), gpu("mm", 30, 50, launched_by=2)]
    breakdown = gpu_time_breakdown(listed)
    assert breakdown is not None and breakdown.seconds == pytest.approx(0.04)
    assert [breakdown.phases[name].seconds for name in ("forward", "backward", "rest")] == pytest.approx(
        [0.02, 0.02, 0]
    )


def test_a_trace_without_kernels_has_no_breakdown() -> None:
    assert gpu_time_breakdown([cpu("harness.step", 0, 10), launch(1, 1), launch(2, 2)]) is None


def test_waiting_for_a_slow_rank_is_exposed_communication(tmp_path: Path) -> None:
    """Rank 1 sleeps in its forwards, and rank 0 waits for it in the synchronization at the end of backward."""
    small = ("train.global_batch=4", "train.micro_batch=1", "train.seq_len=16", "train.steps=1", "train.warmup_steps=1")
    to = (f"results_dir={tmp_path}", "proof.reference=false")
    config, command = compose(*to, "strategy=ddp", "world_size=2", *small)
    record = execute_run(config, command, faults.slow_rank)
    assert record.row["status"] == "ok", record.row["reason"]
    folder = tmp_path / command.name / record.row["run_id"]
    slept = 2 * 2 * faults.SLOW_RANK_SECONDS  # two traced steps of two micro-batches
    waiting, sleeping = (rank.time_breakdown.phases for rank in RunFolder(folder).read_rank_reports(2))
    assert waiting["backward"].exposed_seconds > 0.5 * slept > 2 * sleeping["backward"].exposed_seconds
    assert sleeping["forward"].seconds > slept > 2 * waiting["forward"].seconds
    assert sleeping["forward"].exposed_seconds < 0.05 * slept  # the end of the norm's all-reduce may reach into it
