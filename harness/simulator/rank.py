"""One rank of a world on a simulated device: two training steps whose operators are counted and never run."""

import dataclasses
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.config.strategy import AXES
from harness.cost_model.memory import PROCESS_BYTES
from harness.data.corpus import Corpus
from harness.engines.base import load_engine
from harness.hardware.machine import usable_cores
from harness.measure.gradient_fingerprint import Fingerprinter
from harness.measure.kernels import attention_backend_priority
from harness.measure.memory import DeviceMemory
from harness.measure.memory_ownership import state_fields
from harness.measure.step_profiler import StepListener
from harness.models import init_weights
from harness.models.decoder import causal_mask_lower_right
from harness.probe import Probe
from harness.records.rank_report import RankReport
from harness.records.training_report import TensorFingerprint
from harness.simulator.allocator_blocks import parse_allocator_settings
from harness.simulator.caching_allocator import CachingAllocator, OutOfDeviceMemoryError, replay
from harness.simulator.cuda_api import cuda_api
from harness.simulator.cuda_kernels import cuda_kernels
from harness.simulator.ddp_reducer import ddp_reducer
from harness.simulator.deepspeed_process import deepspeed_process
from harness.simulator.fake_memory import StorageCounter, count_storages
from harness.simulator.fake_tensors import fake_tensors
from harness.simulator.process import StepRequest
from harness.simulator.process_group import accelerate_process, fake_process_group, pipeline_stages
from harness.simulator.step_timing import TimedStep, profile_timed_step, time_step
from harness.tensors.shard import Shard
from harness.util.text import one_line
from harness.worker.batches import Batches

RANDOM_TOKENS = Corpus(None, "synthetic")

BUILDING, WARM_UP, PROFILED = "building", "warm-up", "profiled"  # the phases of a run that a rank goes through

Progress = Callable[[str, int], None]  # called with the phase and the step that begin


class ShapeFingerprinter(Fingerprinter):
    """A fingerprinter of tensors that have no values: it takes their names, shapes and boxes alone."""

    def fingerprint(self, shard: Shard, shape: tuple[int, ...], subtracted: Tensor | None = None) -> TensorFingerprint:
        """Return the fingerprint of a shard of a parameter of this shape, without sums."""
        return TensorFingerprint(shard.name, tuple(shape), shard.box, None, None)


def simulate_rank(
    request: StepRequest,
    report_progress: Progress = lambda phase, step: None,
    on_timed_step: Callable[[TimedStep], None] = lambda step: None,
) -> RankReport:
    """Return the report of a rank with its profiled step, or with the error that ended it.

    The status is `oom` where the rank's device has too little memory. `on_timed_step` is called with the launches of
    the step and their times where the cluster's hardware is described.
    """
    report = RankReport(request.rank, socket.gethostname(), os.getpid(), "error", usable_cores())
    report = dataclasses.replace(report, device_name=request.device_name)
    try:
        with simulated_device(request):
            return simulate_steps_of_rank(request, report, report_progress, on_timed_step)
    except Exception as error:  # anything can fail without a device, and other requests shall go on
        return dataclasses.replace(
            report,
            error=type(error).__name__,
            reason=one_line(error),
            traceback=traceback.format_exc(),
        )


@contextmanager
def simulated_device(request: StepRequest) -> Iterator[None]:
    """Return a context with stand-ins for the kernels and functions of the request's device, and for other ranks."""
    hardware, is_cuda = request.config.cluster.hardware, request.device == "cuda"
    with (
        accelerate_process(request.layout, request.rank),
        deepspeed_process(request.layout, request.device, request.device_bytes),
        cuda_api(hardware.compute_capability if hardware else 9) if is_cuda else nullcontext(),
        cuda_kernels() if is_cuda else nullcontext(),
        ddp_reducer(),
        pipeline_stages(),
        attention_backend_priority(),
        fake_process_group(request.rank, request.layout.world_size),
    ):
        yield


def simulate_steps_of_rank(
    request: StepRequest,
    report: RankReport,
    report_progress: Progress,
    on_timed_step: Callable[[TimedStep], None],
) -> RankReport:
    """Build a rank's engine, run two steps, and return the report with what the second one did.

    The first step creates the optimizer's state and whatever engines set up lazily.
    """
    config, layout, rank = request.config, request.layout, request.rank
    device = torch.device("cuda", 0) if request.device == "cuda" else torch.device("cpu")
    probe = Probe()
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
        engine.step(batches(0))
        memory = DeviceMemory(device, counter)  # type: ignore[arg-type]  # it has methods where a library has functions
        fingerprinter = ShapeFingerprinter(config.model, config.train.seed, device)
        begin(PROFILED, 1)
        with profile_timed_step(request, engine, probe, memory, fingerprinter, counter) as (listener, recorder):
            engine.step(batches(1))
        try:
            peaks = peaks_of_step(request, counter, listener, starts[PROFILED])
        except OutOfDeviceMemoryError as error:
            phase = [phase for phase, start in starts.items() if start <= error.moment][-1]
            name, reason = type(error).__name__, one_line(error)
            return dataclasses.replace(report, status="oom", phase=phase, error=name, reason=reason)
        timed_step = time_step(request, recorder.launches)
        if timed_step is not None:
            on_timed_step(timed_step)
        profiled = listener.result(None)
        is_cuda = request.device == "cuda"
        return dataclasses.replace(
            report,
            status="ok",
            profiled=dataclasses.replace(profiled, peak_without_backend_bytes=None) if is_cuda else profiled,
            first_gradients=listener.gradient_fingerprints.fingerprints,
            devices=engine.devices,
            simulated_time=timed_step.summary if timed_step is not None else None,
            start_peak_bytes=start_peak_bytes,
            **peaks,
            **state_fields(engine, profiled.gradient_bytes_by_device),
        )


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
    first = counter.log_begin - len(counter.initial_sizes)  # the number of the request in the log's first line
    pauses = (range(first + pause.start, first + pause.end) for pause in listener.recorder.annotations.pauses)
    replay(counter.requests, allocator, pauses, last_step_at)
    return {f"peak_{name}": size for name, size in allocator.peaks.items()}


def clear_sharding_caches(device: torch.device) -> None:
    """Clear the harness's cache of boxes, and DTensor's of shardings, which are those of the ranks simulated before.

    A cache belongs to a thread: this one, or that in which autograd runs backward for the simulated device.
    """
    init_weights.forget_boxes()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    product = torch.zeros((), device=device, requires_grad=True) * 1.0
    product.register_hook(lambda gradient: _clear_sharding_prop_cache())  # type: ignore[no-untyped-call]
    product.backward()  # type: ignore[no-untyped-call]
