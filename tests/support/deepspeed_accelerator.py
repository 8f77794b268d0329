"""DeepSpeed's code for CUDA run on a CPU, with its waits for the device counted.

DeepSpeed asks its accelerator where a GPU needs another path than a CPU: whether the host and the device are
synchronized, and whether data dependencies between streams resolve by themselves. The accelerator here is DeepSpeed's
own for a CPU, which answers these questions as the one for CUDA does (deepspeed/accelerator/cuda_accelerator.py).
"""

from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.distributed.device_mesh import DeviceMesh

from harness.config.schema import RunConfig
from harness.data.corpus import Corpus
from harness.engines.base import load_engine
from harness.layout.layout import Layout
from harness.probe import Probe
from harness.simulator.cuda_api import DEFAULT_STREAM, SimulatedEvent, SimulatedStream, use_stream
from harness.worker.batches import Batches


class CountingAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """An accelerator that answers as CUDA's, computes on the CPU, and counts how often the host waits for all work."""

    def __init__(self) -> None:
        super().__init__()
        self.synchronizations = 0

    def is_synchronized_device(self) -> bool:
        """Return False: kernels run after the host has launched them."""
        return False

    use_host_timers = is_synchronized_device  # timers are events in streams
    resolves_data_dependency = is_synchronized_device  # what runs on different streams must be ordered by hand
    handles_memory_backpressure = is_synchronized_device  # the host may run ahead until memory is full

    def synchronize(self, device_index: int | None = None) -> None:
        """Count a wait for all work of the device."""
        self.synchronizations += 1

    Stream = SimulatedStream
    Event = SimulatedEvent

    def stream(self, stream: SimulatedStream) -> AbstractContextManager[None]:
        """Return a context in which a stream is the current one."""
        return use_stream(stream)

    def current_stream(self, device_index: int | None = None) -> SimulatedStream:
        """Return the current stream, which is the default one."""
        return DEFAULT_STREAM

    default_stream = current_stream


def count_synchronizations(config: RunConfig, layout: Layout, mesh: DeviceMesh, steps: int) -> list[int]:
    """Return how often the host waits for all work of the device in each of the first steps of a DeepSpeed engine.

    The process group must be initialized, with `mesh` over its ranks on the CPU. DeepSpeed keeps groups for the life
    of a process, so that one process must use one process group for all its engines.
    """
    device, accelerator = torch.device("cpu"), CountingAccelerator()
    with ExitStack() as stack:
        stack.callback(set_accelerator, get_accelerator())
        set_accelerator(accelerator)
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        engine = load_engine(layout.engine).build(config, layout, mesh, device, Probe())
        batches = Batches(Corpus(None, "synthetic"), config, layout, dist.get_rank(), device)
        totals = [accelerator.synchronizations]
        for step in range(steps):
            engine.step(batches(step))
            totals.append(accelerator.synchronizations)
        engine.close()
    return [after - before for before, after in pairwise(totals)]
