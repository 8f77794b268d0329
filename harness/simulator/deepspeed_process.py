"""DeepSpeed's state of a process, set for one simulated rank and cleared before the next.

DeepSpeed chooses its accelerator once and keeps process groups for the life of a process.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace
from unittest import mock

import torch
from torch.nn import functional

from harness.config.schema import Device
from harness.cost_model.memory import PROCESS_BYTES
from harness.layout.layout import Layout
from harness.simulator.deepspeed_values import deepspeed_values

ACCELERATORS = {"cpu": "CPU_Accelerator", "cuda": "CUDA_Accelerator"}


def runs_deepspeed(layout: Layout) -> bool:
    """Return whether a rank of this layout trains by DeepSpeed, by itself or through Accelerate."""
    return layout.engine == "deepspeed" or (layout.engine == "accelerate" and layout.data_parallel == "none")


@contextmanager
def deepspeed_process(layout: Layout, device: Device, device_bytes: int | None) -> Iterator[None]:
    """Return a context in which DeepSpeed has its own accelerator for the device, and no groups of other ranks.

    Stages 1 and 2 ask how many bytes of the device are free (stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__), and
    flatten parameters on the host if they are too few; None is no limit. This does nothing for a layout without
    DeepSpeed, which is slow to import.
    """
    if not runs_deepspeed(layout):
        yield
        return
    with mock.patch.dict("os.environ", {"DS_ACCELERATOR": device, "LOCAL_RANK": "0"}):
        with redirect_stdout(sys.stderr):  # which DeepSpeed's logger would keep, and a simulator's answer is on it
            accelerators = importlib.import_module("deepspeed.accelerator")
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # which compiles a function
        module = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
        accelerators.set_accelerator(getattr(module, ACCELERATORS[device])())
        total = SimpleNamespace(total_memory=2**62 if device_bytes is None else device_bytes - PROCESS_BYTES[device])
        try:
            with (
                mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: total),
                deepspeed_values(),
                mock.patch.object(functional, "linear", functional.linear),  # which stage 3 replaces
                mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
                mock.patch.object(module, "pynvml", None, create=True),  # it would read a real device's free memory
            ):
                yield
        finally:
            forget_world()


def forget_world() -> None:
    """Clear what DeepSpeed keeps of a world and its engine: its backend, its groups, and its lists of modules."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    from harness.engines.deepspeed.engine import forget_modules

    comm.cdb = None
    groups._release_process_group_references()
    forget_modules()
