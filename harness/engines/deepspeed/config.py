"""TODO harness.engines.deepspeed.config."""

from typing import Any

import torch

from harness.config.schema import RunConfig
from harness.layout.layout import Layout

DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16"}  # DeepSpeed's, by torch's


def deepspeed_config(config: RunConfig, layout: Layout, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's own configuration of this run."""
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    moved = {"none": (), "optimizer": ("offload_optimizer",), "parameters": ("offload_optimizer", "offload_param")}
    offload = dict.fromkeys(moved[layout.offload], host)
    precision = config.precision
    throughout = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    narrow = dict.fromkeys(throughout, True) if precision.master == "bfloat16" else {}
    tensor = {"tensor_parallel": {"autotp_size": layout.tp}} if layout.tp > 1 else {}
    return tensor | {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": layout.grad_accumulation_steps(config.train),
        "zero_optimization": {"stage": layout.zero_stage, **offload, **config.strategy.options},
        # torch's AdamW on the host too, the same as in every engine; its kernel is as fast as DeepSpeedCPUAdam's.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision.compute == "bfloat16"} | narrow,
        "communication_data_type": DTYPE_NAMES[precision.reduce],  # its default is the compute width
        "data_types": {"grad_accum_dtype": DTYPE_NAMES[precision.accumulate]},  # its default is the compute width
        "gradient_clipping": config.train.gradient_clipping,
        "steps_per_print": None,
    }
