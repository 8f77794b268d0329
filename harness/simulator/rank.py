"""Ranks of a world on a simulated device: two training steps each, whose operators are counted and never run."""

import dataclasses
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.config.strategy import AXES
from harness.cost_model.memory import PROCESS_BYTES, WORKSPACE_BYTES
from harness.data.corpus import Corpus
from harness.engines.base import load_engine
from harness.hardware.machine import usable_cores
from harness.measure.gradient_fingerprint import Fingerprinter
from harness.measure.kernels import CUDNN_FIRST, attention_backend_priority
from harness.measure.memory import DeviceMemory
from harness.measure.memory_ownership import state_fields
from harness.measure.step_profiler import StepListener, profile_step
from harness.models.decoder import causal_mask_lower_right
from harness.probe import Probe
from harness.records.heartbeat import HeartbeatWriter
from harness.records.rank_report import RankReport, TensorFingerprint
from harness.records.run_folder import RunFolder, RunSpec
from harness.simulator.allocator_blocks import parse_allocator_settings
from harness.simulator.caching_allocator import CachingAllocator, OutOfDeviceMemoryError, replay
from harness.simulator.cuda_api import cuda_api
from harness.simulator.cuda_kernels import cuda_kernels
from harness.simulator.deepspeed_process import deepspeed_process
from harness.simulator.fake_memory import CUBLAS_WORKSPACES, StorageCounter, count_storages
from harness.simulator.fake_tensors import fake_tensors
from harness.simulator.operator_stream import StreamRecorder
from harness.simulator.process import StepRequest
from harness.simulator.process_group import (
    ddp_reducer,
    even_exchange,
    fake_process_group,
    launched_process,
    pipeline_stages,
)
from harness.simulator.stage_times import with_stage_waits
from harness.simulator.stream_schedule import TimedStep, time_step, write_trace
from harness.tensors.shard import Shard
from harness.util.files import atomic_write_json
from harness.util.text import one_line
from harness.worker.batches import Batches

RANDOM_TOKENS = Corpus(None, "synthetic")

BUILDING, WARM_UP, PROFILED = "building", "warm-up", "profiled"  # the phases of a run that a rank goes through

Progress = Callable[[str, int], None]  # called with the phase and the step that begin

Simulated = tuple[RankReport, TimedStep | None]


class ShapeFingerprinter(Fingerprinter):
    """A fingerprinter of tensors that have no values: it takes their names, shapes and boxes alone."""

    def fingerprint(self, shard: Shard, shape: tuple[int, ...], subtracted: Tensor | None = None) -> TensorFingerprint:
        """Return the fingerprint of a shard of a parameter of this shape, without sums."""
        return TensorFingerprint(shard.name, tuple(shape), shard.box, None, None)


class RoutingUnknown(Probe):
    """The probe of a rank whose tokens are fake: no one can read how many go to each expert."""

    def routed(self, layer: int, counts: Tensor) -> None:
        """Pass nothing on."""


def simulate_ranks(spec: RunSpec, run_dir: Path) -> None:
    """Simulate the ranks that a run file names, one after another, and write the report of each and the trace of all.

    A report is written as soon as its rank was simulated, and again with the time for which it waits for other stages.
    """
    folder = RunFolder(run_dir)

    def write(report: RankReport) -> None:
        atomic_write_json(folder.rank_report(report.rank), report.to_json())

    requests = [
        StepRequest(spec.config, spec.layout, rank, spec.device, spec.device_name, spec.device_bytes)
        for rank in spec.simulated_ranks
    ]
    heartbeat = HeartbeatWriter(run_dir, 0)  # the launcher knows this process as rank 0
    for report in simulate_ranks_of_layout(requests, heartbeat, write, folder.trace):
        write(report)


def simulate_ranks_of_layout(
    requests: Sequence[StepRequest],
    report_progress: Progress = lambda phase, step: None,
    on_report: Callable[[RankReport], None] = lambda report: None,
    trace: Path | None = None,
) -> list[RankReport]:
    """Return the reports of ranks of one configuration and layout, and write a trace of their steps to a file.

    `on_report` is called with every report as soon as it exists, when the rank's step does not wait for other stages.
    """
    simulated: list[Simulated] = []
    for request in requests:
        simulated.append(simulate_rank(request, report_progress))
        on_report(simulated[-1][0])
    timed = [step for _, step in simulated if step is not None]
    config, layout = requests[0].config, requests[0].layout
    steps = with_stage_waits(layout, layout.grad_accumulation_steps(config.train), timed)
    if trace is not None and steps:
        write_trace(trace, steps)
    times = {step.rank: step.summary for step in steps}
    return [dataclasses.replace(report, simulated_time=times.get(report.rank)) for report, _ in simulated]


def simulate_rank(request: StepRequest, report_progress: Progress) -> Simulated:
    """Return the report of a rank with its profiled step, or with the error that ended it, and when its launches run.

    The status is `oom` where the rank's device has too little memory. Times are known where the cluster's hardware is
    described.
    """
    report = RankReport(
        request.rank, socket.gethostname(), os.getpid(), "error", usable_cores(), device_name=request.device_name
    )
    try:
        with simulated_device(request):
            return simulate_steps_of_rank(request, report, report_progress)
    except Exception as error:  # anything can fail without a device, and other requests shall go on
        name, stack = type(error).__name__, traceback.format_exc()
        return dataclasses.replace(report, error=name, reason=one_line(error), traceback=stack), None


@contextmanager
def simulated_device(request: StepRequest) -> Iterator[None]:
    """Return a context with stand-ins for the kernels and functions of the request's device, and for other ranks."""
    hardware, is_cuda = request.config.cluster.hardware, request.device == "cuda"
    layout, rank = request.layout, request.rank
    capability = hardware.compute_capability if hardware else 9
    devices = request.config.cluster.gpus_per_node or 1
    with (
        launched_process(rank, layout.world_size),
        deepspeed_process(request.device, request.device_bytes, devices)
        if layout.uses_deepspeed_zero
        else nullcontext(),
        cuda_api(capability) if is_cuda else nullcontext(),
        cuda_kernels() if is_cuda else nullcontext(),
        ddp_reducer(),
        even_exchange(),
        pipeline_stages(),
        attention_backend_priority(is_cuda and capability in CUDNN_FIRST and not layout.gathers_keys),
        fake_process_group(rank, layout.world_size),
    ):
        yield


def simulate_steps_of_rank(request: StepRequest, report: RankReport, report_progress: Progress) -> Simulated:
    """Build a rank's engine, run two steps, and return the report with what the second one did, and when.

    The first step creates the optimizer's state and whatever engines set up lazily.
    """
    config, layout, rank = request.config, request.layout, request.rank
    device = torch.device("cuda", 0) if request.device == "cuda" else torch.device("cpu")
    probe, recorder = RoutingUnknown(), StreamRecorder(layout, rank, request.device)
    for start, stop in layout.sequence_chunks(rank, config.train.seq_len):
        causal_mask_lower_right(stop - start, stop)  # cached before tensors are fake
    with ExitStack() as stack:
        mesh = init_device_mesh(request.device, layout.mesh_shape, mesh_dim_names=AXES)
        stack.enter_context(fake_tensors())
        clear_sharding_caches(device)
        counter = stack.enter_context(count_storages(request.device))
        starts: dict[str, int] = {}  # by phase, the number of its first request for memory

        def begin(phase: str, step: int = 0) -> None:
            report_progress(phase, step)
            starts[phase] = len(counter.requests)

        begin(BUILDING)
        engine = load_engine(layout.engine).build(config, layout, mesh, device, probe)
        start_peak_bytes = counter.peak_bytes()
        batches = Batches(RANDOM_TOKENS, config, layout, rank, device)
        begin(WARM_UP)
        if request.device == "cuda":
            for identity in CUBLAS_WORKSPACES:
                counter.set_size(identity, WORKSPACE_BYTES // len(CUBLAS_WORKSPACES))
        engine.step(batches(0))
        counter.empty_cache()  # as the worker does after the first update
        memory = DeviceMemory(device, counter)  # type: ignore[arg-type]  # it has methods where a library has functions
        fingerprinter = ShapeFingerprinter(config.model, config.train.seed, device)
        begin(PROFILED, 1)
        with profile_step(engine, probe, memory, fingerprinter, layout) as listener, recorder.listen(listener, counter):
            engine.step(batches(1))
        try:
            peaks = peaks_of_step(request, counter, listener, starts[PROFILED])
        except OutOfDeviceMemoryError as error:
            phase = [phase for phase, start in starts.items() if start <= error.moment][-1]
            name, reason = type(error).__name__, one_line(error)
            return dataclasses.replace(report, status="oom", phase=phase, error=name, reason=reason), None
        timed_step = time_step(request, recorder.launches)
        profiled = listener.result(None)
        if request.device == "cuda":
            profiled = dataclasses.replace(profiled, peak_without_backend_bytes=None)
        report = dataclasses.replace(
            report,
            status="ok",
            profiled=profiled,
            first_gradients=listener.gradient_fingerprints.fingerprints,
            devices=engine.devices,
            simulated_time=timed_step.summary if timed_step is not None else None,
            start_peak_bytes=start_peak_bytes,
            **peaks,
            **state_fields(engine, profiled.gradient_bytes_by_device),
        )
        return report, timed_step


def peaks_of_step(
    request: StepRequest, counter: StorageCounter, listener: StepListener, last_step_at: int
) -> dict[str, Any]:
    """Return the peaks of the last step by the names of the report. Raise OutOfDeviceMemoryError if memory runs out.

    On CUDA they are those of the caching allocator, which has what a process leaves of the device, and of that no more
    than the budget; a CPU has the bytes that tensors request.
    """
    budget = request.config.cluster.memory_budget_bytes
    if request.device == "cpu":
        requested = listener.recorder.peak_allocated_bytes or 0
        if budget is not None and requested > budget:
            failure = f"tensors of {requested} bytes are more than the {budget} that the rank may use"
            raise OutOfDeviceMemoryError(failure)
        return {"peak_allocated_bytes": requested, "peak_requested_bytes": requested}
    settings = parse_allocator_settings(
        os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    )
    device_bytes = request.device_bytes
    capacity = 2**62 if device_bytes is None else device_bytes - PROCESS_BYTES["cuda"]
    allocator = CachingAllocator(capacity, settings, budget)
    replay(counter.requests, allocator, last_step_at)
    return {f"peak_{name}": size for name, size in allocator.peaks.items()}


def clear_sharding_caches(device: torch.device) -> None:
    """Clear DTensor's cache of shardings, which are those of the ranks simulated before.

    It belongs to a thread: this one, or that in which autograd runs backward for the simulated device.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    product = torch.zeros((), device=device, requires_grad=True) * 1.0
    product.register_hook(lambda gradient: _clear_sharding_prop_cache())  # type: ignore[no-untyped-call]
    product.backward()  # type: ignore[no-untyped-call]
