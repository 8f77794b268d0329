"""The translation of a run's configuration into DeepSpeed's."""

import math
from typing import Any

import torch

from harness.config.schema import RunConfig
from harness.layout.layout import Layout

DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # DeepSpeed's names of torch's dtypes


def deepspeed_config(config: RunConfig, layout: Layout, device: torch.device) -> dict[str, Any]:
    """Return DeepSpeed's configuration of this run, in the form of its JSON file."""
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    sections = {"none": (), "optimizer": ("offload_optimizer",), "parameters": ("offload_optimizer", "offload_param")}
    offload = dict.fromkeys(sections[layout.offload], host)
    precision = config.precision
    bf16_state_keys = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    bf16_state = dict.fromkeys(bf16_state_keys, True) if precision.master == "bfloat16" else {}
    tensor_parallel = {"tensor_parallel": {"autotp_size": layout.tp}} if layout.tp_enabled else {}
    # With this hysteresis, and a scale that includes the average over ranks, DeepSpeed's rule is that of
    # harness.engines.torch.loss_scaler.
    fp16: dict[str, Any] = {}
    if precision.initial_loss_scale is not None:
        power, window = math.floor(math.log2(precision.initial_loss_scale / layout.dp)), precision.loss_scale_window
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": power, "loss_scale_window": window, "hysteresis": 1}}
    # DeepSpeed's throughput timer (deepspeed/utils/timer.py) waits for the device twice in a micro-batch by default.
    # A strategy without options runs with all of the library's defaults, including this one.
    timers = {"timers": {"throughput": {"enabled": False}}} if config.strategy.options else {}
    # DeepSpeed gathers blocks of some classes at once, as if their experts were modules of which ranks run other ones.
    gathers_blocks = layout.zero_stage == 3 and config.model.num_experts > 0
    own: dict[str, Any] = {"leaf_module": {"classes": []}} if gathers_blocks else {}
    if layout.secondary_shards > 1:
        own["zero_hpz_partition_size"] = layout.secondary_shards
    return {
        **tensor_parallel,
        **timers,
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": layout.grad_accumulation_steps(config.train),
        "zero_optimization": {"stage": layout.zero_stage, **own, **offload, **config.strategy.options},
        # The optimizer on the host is torch's AdamW as in every engine; its kernel is as fast as DeepSpeedCPUAdam's.
        "zero_force_ds_cpu_optimizer": False,
        # It refuses all but the Adams without this; what comes of it is proven as with these.
        **({} if config.optimizer.name == "adamw" else {"zero_allow_untested_optimizer": True}),
        **fp16,
        "bf16": {"enabled": precision.compute == "bfloat16"} | bf16_state,
        "communication_data_type": DTYPE_NAMES[precision.reduce],  # DeepSpeed's default is the compute width
        "data_types": {"grad_accum_dtype": DTYPE_NAMES[precision.accumulate]},  # its default is the same
        "gradient_clipping": config.train.gradient_clipping,
        "steps_per_print": None,
    }
