"""The engine of the DeepSpeed library: ZeRO stages 1, 2 and 3 (arXiv 1910.02054), tuned by `strategy.options`.

In the source of DeepSpeed 0.19.8, and in what the tests measure, gradients are reduced and summed in fp32 in every
stage and precision (communication_data_type, data_types.grad_accum_dtype), and parameters are gathered in the compute
width. bf16_mixed differs in two points:
    In stage 1 DeepSpeed chooses its BF16_Optimizer, which all-reduces whole gradients whatever the options say. If
        they require a reduction to the owner of each partition (use_multi_rank_bucket_allreduce: false), the
        optimizer of stages 1 and 2 is used instead, because it supports that.
    Stage 2 divides a bf16 gradient by the number of ranks before it widens it, which is exact for powers of two only.
fp16_mixed has the optimizer of stages 1 and 2 in stage 1. Its gradients are scaled until the optimizer steps, and the
engine yields them without the scale.
"""

from typing import TYPE_CHECKING

from harness.engines.base import Engine
from harness.engines.deepspeed.compatibility import layout_unsupported as layout_unsupported
from harness.engines.deepspeed.compatibility import unsupported as unsupported
from harness.engines.deepspeed.widths import state_widths as state_widths

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config.schema import RunConfig
    from harness.layout.layout import Layout
    from harness.probe import Probe

FULLY_SHARDED_PRESET = "zero3"


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """Build the model under DeepSpeed on this rank."""
    from harness.engines.deepspeed.engine import DeepSpeedTrainEngine
    from harness.engines.deepspeed.initialize import build_engine

    engine, param_slices = build_engine(config, layout, device, probe)
    return DeepSpeedTrainEngine(engine, param_slices, layout, probe, config.train.loss_chunks)
