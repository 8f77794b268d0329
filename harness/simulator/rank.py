"""One rank of a world on a simulated CUDA device: a training step whose operators are counted and never run."""

import dataclasses
import traceback
from contextlib import ExitStack

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.data.corpus import Corpus
from harness.engines.base import load_engine
from harness.layout.layout import AXES
from harness.layout.state_widths import StateKind
from harness.measure.gradient_fingerprint import Fingerprinter
from harness.measure.kernels import attention_backend_priority
from harness.measure.step_profiler import profile_step
from harness.models.decoder import causal_mask_lower_right
from harness.probe import Probe, ShardSource
from harness.records.rank_report import ProfiledStep, RankReport
from harness.records.tensor_shards import TensorFingerprint
from harness.simulator.caching_allocator import AllocatorPeaks, CachingAllocator
from harness.simulator.cuda_api import SIMULATED_DEVICE_NAME, cuda_api
from harness.simulator.cuda_kernels import cuda_kernels
from harness.simulator.ddp_reducer import ddp_reducer
from harness.simulator.fake_memory import count_storages
from harness.simulator.fake_tensors import fake_tensors
from harness.simulator.pipeline_stages import pipeline_stages
from harness.simulator.process import StepRequest
from harness.simulator.process_group import fake_process_group
from harness.simulator.simulated_memory import SimulatedMemory, replay
from harness.util.text import one_line
from harness.worker.batches import Batches

DEVICE = torch.device("cuda", 0)

RANDOM_TOKENS = Corpus(None, "synthetic")


class NoFingerprints(Fingerprinter):
    """A fingerprinter that takes none, because fake tensors have no values."""

    def state(self, engine: ShardSource, kind: StateKind, state_name: str | None = None) -> list[TensorFingerprint]:
        """Return no fingerprints."""
        return []


def simulate_rank(request: StepRequest) -> RankReport:
    """Return the report of a rank with its profiled step, or with the error that ended it."""
    report = RankReport(rank=request.rank, status="ok", device_name=SIMULATED_DEVICE_NAME)
    try:
        with cuda_api():
            profiled, peaks = profile_second_step(request)
            return dataclasses.replace(
                report,
                profiled=profiled,
                peak_allocated_bytes=peaks.allocated_bytes,
                peak_requested_bytes=peaks.requested_bytes,
                peak_reserved_bytes=peaks.reserved_bytes,
            )
    except Exception as error:  # anything can fail without a device, and other requests shall go on
        return dataclasses.replace(
            report,
            status="error",
            error=type(error).__name__,
            reason=one_line(error),
            traceback=traceback.format_exc(),
        )


def profile_second_step(request: StepRequest) -> tuple[ProfiledStep, AllocatorPeaks]:
    """Return what the step profiler counts in a rank's second training step, and the peaks of the device's allocator.

    The first step creates the optimizer's state and whatever engines set up lazily.
    """
    config, layout, rank = request.config, request.layout, request.rank
    probe = Probe()
    for start, stop in layout.sequence_chunks(rank, config.train.seq_len):
        causal_mask_lower_right(stop - start, stop)  # cached before tensors are fake
    with ExitStack() as stack:
        for context in (cuda_kernels(), ddp_reducer(), pipeline_stages(), attention_backend_priority()):
            stack.enter_context(context)
        stack.enter_context(fake_process_group(rank, layout.world_size))
        mesh = init_device_mesh("cuda", layout.mesh_shape, mesh_dim_names=AXES)
        stack.enter_context(fake_tensors())
        clear_sharding_caches()
        counter = stack.enter_context(count_storages())
        engine = load_engine(layout.engine).build(config, layout, mesh, DEVICE, probe)
        batches = Batches(RANDOM_TOKENS, config, layout, rank, DEVICE)
        engine.step(batches(0))
        fingerprinter = NoFingerprints(config.model, config.train.seed, DEVICE)
        before = len(counter.requests)
        memory = SimulatedMemory(DEVICE, counter=counter)
        with profile_step(engine, probe, memory, fingerprinter, layout) as listener:
            engine.step(batches(1))
        allocator = CachingAllocator(request.device_bytes)
        peaks = replay(counter.requests, allocator, listener.recorder.annotations.pauses, before)
        return dataclasses.replace(listener.result(None), peak_without_backend_bytes=None), peaks


def clear_sharding_caches() -> None:
    """Clear DTensor's caches of shardings, which refer to process groups of the ranks that were simulated before.

    A cache belongs to a thread: this one, or that in which autograd runs backward for the simulated device.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    product = torch.zeros((), device=DEVICE, requires_grad=True) * 1.0
    product.register_hook(lambda gradient: _clear_sharding_prop_cache())  # type: ignore[no-untyped-call]
    product.backward()  # type: ignore[no-untyped-call]
