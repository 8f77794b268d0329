"""The division of a step's time, on hand-made traces of both kinds of device and with a rank that really waits."""

from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._autograd import DeviceType

from harness.measure.operator_log import OperatorLog, build_operator_log, load_operator_log
from harness.measure.step_trace import StepTrace, activity_of
from harness.measure.time_breakdown import (
    TraceEvent,
    cpu_time_breakdown,
    difference,
    gpu_time_breakdown,
    intersection,
    merged_intervals,
    total_seconds,
)
from harness.records.rank_report import RankReport, TimeBreakdown
from harness.records.run_folder import RunFolder
from tests.support import faults
from tests.support.commands import Entry, assert_ok, compose, compose_config, execute_run

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
    activity = "user_annotation" if name.startswith("harness.") else "cpu_op"
    return TraceEvent(name, begin * MS, end * MS, activity, thread)


def gpu(name: str, begin: int, end: int, launched_by: int, activity: str = "kernel") -> TraceEvent:
    return TraceEvent(name, begin * MS, end * MS, activity, 0, launched_by)


def launch(number: int, moment: int, thread: int = 1) -> TraceEvent:
    return TraceEvent("cudaLaunchKernel", moment * MS, (moment + 1) * MS, "cuda_runtime", thread, number)


REDUCE, MESSAGE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", "ncclDevKernel_SendRecv(ncclDevComm*)"


class Division(NamedTuple):
    """The times of a step in milliseconds, and of its phases: as a whole, exposed, idle and copying."""

    whole: float
    overlapped: float
    phases: dict[str, tuple[float, float, float, float]]


PHASES = (("step", 0, 400), ("forward", 0, 200), ("backward", 200, 400))

RECORDED = "torch's profiler recorded"

ON_A_CPU = {
    "operators hide collectives in flight": (
        [
            cpu("harness.step", 0, 100),
            cpu("harness.forward", 0, 30),
            cpu("aten::linear", 0, 30),
            cpu("aten::addmm", 2, 20),  # inside another
            cpu("gloo:all_reduce", 0, 20),  # in the thread that requested it, until it ended in another one
            cpu("harness.backward", 30, 90),
            cpu("autograd::engine::evaluate_function", 30, 90),
            cpu("aten::mm", 32, 50),
            cpu("aten::mm", 50, 60),
            cpu("c10d::allreduce_", 50, 51),  # inside another, as a DTensor's
            cpu("gloo:all_reduce", 50, 80),
            cpu("aten::mm", 60, 75, thread=3),  # of another thread: hides nothing
        ],
        # Exposed from 50 to 51, and from 60 to 80.
        Division(100, 29, {"forward": (30, 0, 0, 0), "backward": (60, 21, 0, 0), "rest": (10, 0, 0, 0)}),
    ),
    "waiting for messages is no exposed communication": (
        [
            cpu("harness.step", 0, 100),
            cpu("harness.forward", 40, 60),
            cpu("aten::mm", 40, 60),
            cpu("gloo:recv", 0, 40, thread=2),
            cpu("gloo:send", 60, 90, thread=2),
        ],
        Division(100, 0, {"forward": (20, 0, 0, 0), "rest": (80, 0, 70, 0)}),
    ),
}

ON_A_GPU = {
    # Backward runs in another thread; annotations around kernels are neither kernels nor phases.
    "kernels count for the phase that launched them": (
        [
            cpu("harness.step", 0, 20),
            cpu("harness.forward", 0, 4),
            cpu("harness.backward", 5, 14),
            launch(1, 1),
            launch(2, 6, thread=9),
            launch(3, 7, thread=9),
            launch(4, 15),
            gpu("sgemm", 20, 40, launched_by=1),
            gpu("harness.backward", 90, 91, launched_by=3, activity="gpu_user_annotation"),
            gpu("FSDP::all_gather", 50, 110, launched_by=2, activity="gpu_user_annotation"),
            gpu("sgemm", 50, 60, launched_by=2),
            gpu(REDUCE, 55, 80, launched_by=2),
            gpu("sgemm", 90, 100, launched_by=3),
            gpu(MESSAGE, 100, 110, launched_by=3),
            gpu("adam", 110, 120, launched_by=4),
        ],
        # In backward exposed to 80 and idle to 90; in the rest idle before backward and in the message, then adam.
        Division(100, 5, {"forward": (20, 0, 0, 0), "backward": (50, 20, 10, 0), "rest": (30, 0, 20, 0)}),
    ),
    # Offload's copies run beside kernels of NCCL, which nothing hides then; alone they are neither work nor idle.
    "copies hide no communication": (
        [
            cpu("harness.step", 0, 9),
            cpu("harness.backward", 0, 9),
            *(launch(number, number) for number in range(1, 5)),
            gpu("sgemm", 10, 20, launched_by=1),
            gpu(REDUCE, 15, 40, launched_by=2),
            gpu("Memcpy DtoH (Device -> Pinned)", 18, 60, launched_by=3, activity="gpu_memcpy"),
            gpu("sgemm", 70, 80, launched_by=4),
        ],
        Division(70, 5, {"backward": (70, 20, 10, 20)}),
    ),
    # The kernel of the first step's backward would belong to the second step by the operator's moment.
    "an operator with the number of a launch moves no kernel": (
        [
            *(cpu("harness.step", 0, 10), cpu("harness.step", 10, 20)),
            *(launch(7, 5), launch(8, 17)),
            *(gpu("sgemm", 20, 30, launched_by=7), gpu("sgemm", 60, 70, launched_by=8)),
            TraceEvent("aten::mm", 15 * MS, 16 * MS, "cpu_op", 1, 7),
        ],
        Division(20, 0, {}),
    ),
    # Streams overlap, but the parts of a step must not.
    "a phase ends where the next begins": (
        [
            *(cpu("harness.step", 0, 9), cpu("harness.forward", 0, 4), cpu("harness.backward", 4, 9)),
            *(launch(1, 1), launch(2, 5), gpu("copy", 10, 40, launched_by=1), gpu("mm", 30, 50, launched_by=2)),
        ],
        Division(40, 0, {"forward": (20, 0, 0, 0), "backward": (20, 0, 0, 0), "rest": (0, 0, 0, 0)}),
    ),
}


@pytest.mark.parametrize(
    ("divide", "events", "expected"),
    [
        pytest.param(divide, *case, id=name)
        for divide, cases in ((cpu_time_breakdown, ON_A_CPU), (gpu_time_breakdown, ON_A_GPU))
        for name, case in cases.items()
    ],
)
def test_a_step_is_divided(
    divide: Callable[[list[TraceEvent]], TimeBreakdown], events: list[TraceEvent], expected: Division
) -> None:
    breakdown = divide(events)
    assert 1000 * breakdown.seconds == pytest.approx(expected.whole)
    assert 1000 * breakdown.overlapped_seconds == pytest.approx(expected.overlapped)
    for name, parts in expected.phases.items():
        assert [1000 * seconds for seconds in astuple(breakdown.phases[name])] == pytest.approx(parts), name


def gpu_report(events: list[TraceEvent]) -> tuple[TimeBreakdown | None, str]:
    """Return the breakdown and the problem of a GPU's trace."""
    trace = StepTrace(torch.device("cpu"))
    trace.on_gpu, trace.tracer = True, Mock(events=lambda: events)
    report = trace.report()
    return report["time_breakdown"], report["trace_problem"]


def test_a_trace_without_kernels_has_no_breakdown() -> None:
    for events in ([cpu("harness.step", 0, 10), launch(1, 1), launch(2, 2)], [cpu("harness.step", 0, 10)], []):
        breakdown, problem = gpu_report(events)
        assert breakdown is None and "recorded 0 of the" in problem


@pytest.mark.parametrize(("lost", "is_divided"), [(0, True), (4, True), (5, False), (180, False)])
def test_a_trace_that_lost_kernels_is_not_divided(lost: int, is_divided: bool) -> None:
    """Two steps of 200 launches each: forward in the first half, backward in the second, from another thread.

    The profiler drops records when its buffers are full, after which a breakdown shows less time and other phases.
    """
    marks = [cpu(f"harness.{name}", at + begin, at + end) for at in (0, 1000) for name, begin, end in PHASES]
    moments = [*range(0, 400, 2), *range(1000, 1400, 2)]
    launches = [launch(number, moment, thread=1 + number % 2) for number, moment in enumerate(moments)]
    kernels = [gpu("sgemm", moment + 1, moment + 3, number) for number, moment in enumerate(moments)]
    outside = [launch(999, 700), TraceEvent("cudaLaunchKernelExC", 2000 * MS, 2001 * MS, "cuda_runtime", 1, 1000)]
    others = [TraceEvent("cudaEventRecord", MS, 2 * MS, "cuda_runtime", 1, number) for number in range(2000, 2100)]
    breakdown, problem = gpu_report([*marks, *launches, *outside, *others, *kernels[:200], *kernels[200 + lost :]])
    assert (breakdown is not None) is is_divided
    assert problem == ("" if is_divided else f"{RECORDED} {400 - lost} of the 400 kernels that were launched")
    if lost == 0:
        assert breakdown is not None and breakdown.seconds == pytest.approx(0.8)


def test_a_matrix_product_hides_a_collective() -> None:
    """In a real trace torch lists small operators inside the product, and its own work outside every operator."""
    trace, matrix = StepTrace(torch.device("cpu")), torch.randn(1500, 1500)
    trace.warm_up()
    matrix @ matrix  # not recorded
    with trace, trace.phase("step"), trace.phase("forward"):
        matrix @ matrix
    breakdown = trace.report()["time_breakdown"]
    assert breakdown is not None and trace.tracer.profiler.profiler is not None
    results = trace.tracer.profiler.profiler.kineto_results
    (product,) = (event for event in results.events() if event.name() == "aten::mm")
    annotations = [event for event in results.events() if event.name().startswith("harness.")]
    activities = [event.activity_type() for event in (product, *annotations)]
    assert activities == ["cpu_op", "user_annotation", "user_annotation"]  # the names that a GPU's trace is read by
    begin, end = product.start_ns(), product.start_ns() + product.duration_ns()
    marks = [TraceEvent(f"harness.{name}", begin, end, thread=1) for name in ("step", "forward")]
    listed = [TraceEvent(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), thread=1) for e in results.events()]
    listed = [event for event in listed if event.name.startswith("aten::")]
    hidden = cpu_time_breakdown([*marks, *listed, TraceEvent("gloo:all_reduce", begin, end, thread=2)])
    assert hidden.overlapped_seconds == pytest.approx(breakdown.seconds, rel=0.2)
    assert hidden.phases["forward"].exposed_seconds == 0


@pytest.fixture(scope="module")
def operator_log() -> OperatorLog:
    """Load the library that ranks on a CPU use, which a run of this session may have built already."""
    return load_operator_log(build_operator_log(Path(compose_config().data.cache)))


@pytest.fixture
def alone() -> Iterator[None]:
    """Join a process group of one rank, whose collectives end in threads of gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torch_2_11_does_not_name_the_types_of_its_profilers_entries() -> None:
    """Its entries on one H200, on which every run ended in an AttributeError."""
    listed = (
        ("harness.step", "CPU", True, "user_annotation"),
        ("harness.step", "CUDA", True, "gpu_user_annotation"),
        ("aten::mm", "CPU", False, "cpu_op"),
        ("cudaLaunchKernel", "CPU", False, "cuda_runtime"),
        ("cuLaunchKernelEx", "CPU", False, "cuda_runtime"),
        ("nvjet_hsh_128x256", "CUDA", False, "kernel"),
        ("Memcpy DtoH (Device -> Pinned)", "CUDA", False, "gpu_memcpy"),
        ("Memset (Device)", "CUDA", False, "gpu_memset"),
    )
    for name, device, is_mark, activity in listed:
        entry = Mock(spec=["name", "device_type", "is_user_annotation"])
        entry.name.return_value, entry.is_user_annotation.return_value = name, is_mark
        entry.device_type.return_value = getattr(DeviceType, device)
        assert activity_of(entry) == activity


def test_the_operator_log_lists_what_torchs_profiler_lists(operator_log: OperatorLog, alone: None) -> None:
    """Both trace the same operators: a backward, whose nodes contain operators, collectives, and operators in C++."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    profiler, log = StepTrace(torch.device("cpu")), StepTrace(torch.device("cpu"), operator_log)
    profiler.warm_up()
    torch.ones(3) + 1  # before both
    with profiler, log, log.phase("step"):
        for _ in range(3):
            with log.phase("forward"):
                loss = model(torch.randn(16, 32)).square().mean()
            with log.phase("backward"):
                loss.backward()
            for parameter in model.parameters():  # each awaited: gloo's threads begin several in any order
                dist.all_reduce(parameter.grad, async_op=True).wait()
    torch.ones(3) + 1  # after both
    listed, logged = profiler.tracer.events(), log.tracer.events()
    assert [event.name for event in logged] == [event.name for event in listed]
    assert {"harness.step", "aten::linear", "c10d::allreduce_", "gloo:all_reduce"} <= {event.name for event in logged}
    assert len({event.thread for event in logged}) == 1  # a collective belongs to the thread that requested it
    offset = listed[0].start - logged[0].start  # of their clocks
    late = [abs(one.start - other.start - offset) for one, other in zip(listed, logged, strict=True)]
    longer = [abs(one.end - one.start - other.end + other.start) for one, other in zip(listed, logged, strict=True)]
    assert np.median(late) < 0.2 * MS and np.median(longer) < 0.2 * MS
    with log:
        torch.ones(3) + 1
    assert {event.name for event in log.tracer.events()} == {"aten::ones", "aten::add"}


def reports_with(fault: Entry, results: Path, strategy: str, world_size: int, global_batch: int) -> list[RankReport]:
    """Return the reports of the ranks of a very small run."""
    sizes = (f"train.global_batch={global_batch}", "train.micro_batch=1", "train.seq_len=16", "train.steps=1")
    to = (f"results_dir={results}", "proof.reference=false", f"world_size={world_size}", "train.warmup_steps=1")
    config, command = compose(*to, f"strategy={strategy}", *sizes)
    record = execute_run(config, command, fault)
    assert_ok(record.row)
    return RunFolder(results / command.name / record.row["run_id"]).read_rank_reports(world_size)


def test_lost_kernels_are_noted_in_the_row(tmp_path: Path) -> None:
    sizes = ("train.global_batch=2", "train.micro_batch=1", "train.seq_len=16", "train.steps=1", "train.warmup_steps=1")
    to = (f"results_dir={tmp_path}", "proof.reference=false", "strategy=single")
    record = execute_run(*compose(*to, *sizes), faults.lost_kernels)
    assert_ok(record.row)
    assert record.notes[-1:] == [f"the time of rank 0's steps is not divided: {faults.LOST}"]
    assert record.row["exposed_communication_seconds"] is record.row["idle_seconds"] is None
    assert record.row["step_seconds"] > 0


def test_no_garbage_is_collected_in_timed_steps(tmp_path: Path) -> None:
    reports_with(faults.much_garbage, tmp_path, "single", world_size=1, global_batch=2)


def test_a_tracer_that_starts_late_is_no_communication(tmp_path: Path) -> None:
    """Torch's profiler takes longer to attach itself on some ranks, for which the others would wait in a collective."""
    ranks = reports_with(faults.slow_to_trace, tmp_path, "ddp", world_size=2, global_batch=2)
    exposed = [sum(p.exposed_seconds for p in rank.time_breakdown.phases.values()) for rank in ranks]
    assert max(exposed) < 0.5 * faults.SLOW_TRACER_SECONDS


def test_waiting_for_a_slow_rank_is_exposed_communication(tmp_path: Path) -> None:
    """Rank 1 sleeps in its forwards, and rank 0 waits for it in the synchronization at the end of backward."""
    slept = 2 * 2 * faults.SLOW_RANK_SECONDS  # two traced steps of two micro-batches
    ranks = reports_with(faults.slow_rank, tmp_path, "ddp", world_size=2, global_batch=4)
    waiting, sleeping = (rank.time_breakdown.phases for rank in ranks)
    assert waiting["backward"].exposed_seconds > 0.5 * slept > 2 * sleeping["backward"].exposed_seconds
    assert sleeping["forward"].seconds > slept > 2 * waiting["forward"].seconds
    assert sleeping["forward"].exposed_seconds < 0.05 * slept  # the end of the norm's all-reduce may reach into it
