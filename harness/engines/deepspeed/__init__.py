"""ZeRO stages 1, 2 and 3 by the DeepSpeed library (arXiv 1910.02054), in the way `strategy.options` asks for.

What goes over the wire, read in DeepSpeed 0.19.8 and measured in the tests: gradients are reduced and summed in fp32 in
every stage and precision (communication_data_type, data_types.grad_accum_dtype), parameters gathered in the compute
width. Where bf16_mixed differs:
    stage 1 left to DeepSpeed runs its BF16_Optimizer, which all-reduces whole gradients whatever the options say. So
        where they ask for a reduction to the part's owner (use_multi_rank_bucket_allreduce: false), the optimizer of
        stages 1 and 2 is used, which does it;
    stage 2 divides a bf16 gradient by the number of ranks before it widens it: exact for powers of two only.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.base import Engine
from harness.engines.deepspeed.compatibility import unsupported as unsupported
from harness.engines.deepspeed.widths import state_widths as state_widths

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config.schema import RunConfig
    from harness.hardware.machine import Machine
    from harness.layout.layout import Layout
    from harness.probe import Probe


def rank_environment(layout: "Layout", machine: "Machine", cache: Path) -> dict[str, str]:
    """On a CPU DeepSpeed compiles its shared-memory collective, once for all ranks: here, before they start."""
    if machine.device != "cpu":
        return {}
    from harness.engines.deepspeed.shm_collective import build_deepspeed_comm

    return build_deepspeed_comm(cache)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """The model under DeepSpeed on this rank; every rank of the process group is one of the data-parallel axis."""
    from harness.engines.deepspeed.build import build_engine
    from harness.engines.deepspeed.engine import DeepSpeedTrainEngine

    engine, names = build_engine(config, layout, device, probe)
    return DeepSpeedTrainEngine(engine, names, layout, probe, config.train.loss_chunks)
