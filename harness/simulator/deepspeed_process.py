"""DeepSpeed's state of a process, set for one simulated rank and cleared before the next.

DeepSpeed, which is slow to import, chooses its accelerator once and keeps process groups for the life of a process.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from harness.config.schema import Device
from harness.cost_model.memory import PROCESS_BYTES
from harness.engines.deepspeed.initialize import import_deepspeed
from harness.simulator.stand_ins import around


@contextmanager
def deepspeed_process(device: Device, device_bytes: int | None, devices: int) -> Iterator[None]:
    """Return a context in which DeepSpeed has its own accelerator for the device, and no groups of other ranks.

    Stages 1 and 2 ask how many bytes of the device are free (stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__), and
    flatten parameters on the host if they are too few; None is no limit. A node has so many devices, by which DeepSpeed
    groups the ranks that exchange quantized gradients. At the end, what DeepSpeed keeps of a world and its engine is
    cleared: its backend, its groups, and its lists of modules.
    """
    with mock.patch.dict("os.environ", {"DS_ACCELERATOR": device}):
        with redirect_stdout(sys.stderr):  # which DeepSpeed's logger would keep, and a simulator's answer is on it
            accelerators = importlib.import_module("deepspeed.accelerator")
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # which compiles a function
        from deepspeed.comm import comm
        from deepspeed.ops import op_builder
        from deepspeed.utils import groups

        from harness.engines.deepspeed.engine import forget_modules

        module = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
        accelerator = getattr(module, f"{device.upper()}_Accelerator")()
        accelerator.device_count = lambda: devices
        accelerators.set_accelerator(accelerator)
        total = SimpleNamespace(total_memory=2**62 if device_bytes is None else device_bytes - PROCESS_BYTES[device])
        try:
            with (
                mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: total),
                mock.patch.object(op_builder, "QuantizerBuilder", lambda: SimpleNamespace(load=lambda: Quantizer)),
                agreeing_ranks(),
                mock.patch.object(functional, "linear", functional.linear),  # which stage 3 replaces
                mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
                mock.patch.object(module, "pynvml", None, create=True),  # it would read a real device's free memory
            ):
                yield
        finally:
            comm.cdb = None
            groups._release_process_group_references()
            forget_modules()


class Quantizer:
    """The operators of CUDA by which DeepSpeed quantizes, with its shapes and dtypes (csrc/quantization)."""

    Symmetric = 0

    @staticmethod
    def quantize(tensor: Tensor, blocks: int, bits: int, kind: int) -> tuple[Tensor, Tensor]:
        """Return as many integers of 8 bits, and the scale of each block in fp32."""
        return tensor.to(torch.int8), tensor.new_empty(blocks, 1, dtype=torch.float32)

    @staticmethod
    def dequantize(integers: Tensor, scales: Tensor, blocks: int, bits: int, kind: int) -> Tensor:
        """Return the numbers in fp16, two of each byte if they have 4 bits."""
        return (integers if bits == 8 else torch.cat((integers, integers), -1)).to(torch.float16)

    @staticmethod
    def swizzle_quant(
        tensor: Tensor, blocks: int, bits: int, kind: int, parts: int, nodes: int, devices: int
    ) -> tuple[Tensor, Tensor]:
        """Return the flat numbers in 4 bits, two in each byte."""
        halved = tensor.flatten()[: tensor.numel() * bits // 8]
        return Quantizer.quantize(halved, blocks, bits, kind)

    @staticmethod
    def quantized_reduction(
        integers: Tensor, scales: Tensor, blocks_in: int, blocks: int, bits: int, kind: int, devices: int
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of what a node's devices have, in 4 bits."""
        return Quantizer.quantize(integers[: len(integers) // devices].clone(), blocks, bits, kind)


@contextmanager
def agreeing_ranks() -> Iterator[None]:
    """Return a context in which DeepSpeed takes other ranks to have the same lists and batches as this one."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import utils

    with (
        mock.patch.multiple(utils, assert_lst_len_same_as_other_ranks=len, get_lst_from_rank0=list),
        around(DeepSpeedEngine, "_configure_tensor_parallel_states", configure_without_batch_check),
    ):
        yield


def configure_without_batch_check(configure: Any, engine: Any, model: Any) -> None:
    """Configure tensor parallelism without the comparison of the first batch with other ranks'."""
    configure(engine, model)
    engine.first_dataloader_check.remove()


@contextmanager
def filled_parts(device: torch.device) -> Iterator[None]:
    """Return a context in which DeepSpeed's ranks agree, and the padding of this one's parts has values."""
    import_deepspeed(device)
    from deepspeed.runtime.zero.partition_parameters import Init

    with agreeing_ranks(), around(Init, "_partition_param", partition_and_fill):
        yield


def partition_and_fill(partition: Any, init: Any, parameter: Any, *arguments: Any, **keywords: Any) -> None:
    """Partition a parameter, and fill this rank's part of it if it had none before."""
    whole = parameter.data.view(-1) if parameter.ds_tensor is None else None
    partition(init, parameter, *arguments, **keywords)
    if whole is not None:
        fill_padding(parameter.ds_tensor, whole, init._partition_rank(parameter))


def fill_padding(part: Tensor, whole: Tensor, place: int) -> None:
    """Fill what a part has beyond the end of the whole parameter with the parameter's first values."""
    valid = min(max(whole.numel() - place * part.numel(), 0), part.numel())
    part[valid:] = whole[: part.numel() - valid]
