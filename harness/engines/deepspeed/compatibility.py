"""Runs that the DeepSpeed engine cannot train, and what to choose in their place."""

import importlib.util
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.config.strategy import MODEL_AXES
from harness.cost_model.micro_batch_shape import replaces_linear_function
from harness.cost_model.zero_plus_plus import UNIT, undivided
from harness.engines.base import option_problems
from harness.engines.deepspeed.widths import exchange_devices
from harness.layout.model_profile import model_profile

if TYPE_CHECKING:
    from harness.config.schema import RunConfig
    from harness.hardware.machine import Machine
    from harness.layout.layout import Layout


QUANTIZED = ("zero_quantized_gradients", "zero_quantized_weights")  # of ZeRO++ (arXiv 2306.10209)

# Keys of DeepSpeed's `zero_optimization` section that change how a stage is run, and, but for QUANTIZED, not what it
# computes. Offload, secondary shards and the stage itself are other strategies.
FLAGS = (
    "allgather_partitions",
    "contiguous_gradients",
    "ignore_unused_parameters",
    "memory_efficient_linear",
    "overlap_comm",
    "parameter_alignment",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_allgather_sequential",
    "stage3_use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
    *QUANTIZED,
)
SIZES = {  # the least value of each
    "allgather_bucket_size": 0,
    "reduce_bucket_size": 1,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_model_persistence_threshold": 0,
    "stage3_module_granularity_threshold": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "sub_group_size": 1,
}


def unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Yield every reason why DeepSpeed cannot train this run."""
    if importlib.util.find_spec("deepspeed") is None:
        yield (
            f"strategy={config.strategy.name} needs the package deepspeed: type DS_ACCELERATOR=cpu pip install"
            " 'training-harness[deepspeed]', or choose strategy=fsdp_full_shard"
        )
    if config.precision.compute == "float16" and machine.device == "cpu" and config.launch != "simulated":
        import torch

        if not torch.ops.mkldnn._is_mkldnn_fp16_supported():  # as DeepSpeed asks (cpu_accelerator.py)
            yield (f"precision={config.precision.name} is not possible for DeepSpeed on this CPU: choose bf16_mixed")
    if (chosen := quantized_option(config)) and config.launch != "simulated":
        elsewhere = "choose launch=simulated with a cluster of GPUs or harness plan, or false"
        if machine.device == "cpu":
            yield f"{chosen} needs an operator that DeepSpeed has for CUDA alone: {elsewhere}"
        elif exchange_devices(config, layout) and config.precision.reduce != "float16":
            yield (
                f"{QUANTIZED[0]} of several nodes reads gradients as float16, and precision={config.precision.name}"
                f" sends {config.precision.reduce}: {elsewhere}"
            )
    yield from layout_unsupported(config, layout)


def quantized_option(config: "RunConfig") -> str:
    """Return the first of strategy.options by which DeepSpeed quantizes what it sends, as it is typed, else nothing."""
    options = config.strategy.options
    return next((f"strategy.options.{name}=true" for name in QUANTIZED if options.get(name) is True), "")


def layout_unsupported(config: "RunConfig", layout: "Layout") -> Iterator[str]:
    """Yield every reason why DeepSpeed cannot train this run on any machine."""
    unsupported = "is not supported by strategy.engine=deepspeed"
    scale = config.precision.initial_loss_scale
    if scale is not None and not math.log2(scale).is_integer():
        yield (
            f"precision.initial_loss_scale={scale:g} is no power of two, and DeepSpeed begins with one: choose"
            f" {2 ** round(math.log2(scale))}"
        )
    if config.precision.name == "bf16" and layout.offload != "none":
        yield f"precision=bf16 with strategy.offload={layout.offload} needs DeepSpeed's own AdamW: choose bf16_mixed"
    if layout.zero_stage == 0:
        yield f"strategy.zero_stage=0 {unsupported}: choose 1, 2 or 3"
    if layout.dp_replicate > 1:
        yield f"strategy.dp_replicate={layout.dp_replicate} {unsupported}: choose 1, and -1 for strategy.dp_shard"
    for axis in (*MODEL_AXES, "ep"):
        if axis != "tp" and getattr(layout, axis) > 1:
            yield f"strategy.{axis}={getattr(layout, axis)} {unsupported}: choose 1"
    if layout.tp_enabled:
        yield from tensor_parallel_unsupported(config, layout)
    profile = model_profile(config.model)
    if config.checkpointing.name == "selective" and profile.has_biases and replaces_linear_function(config, layout):
        yield (
            f"checkpointing=selective would add the biases of model={config.model.name} twice in DeepSpeed's stage 3:"
            " choose checkpointing=full, or +strategy.options.memory_efficient_linear=false"
        )
    if layout.offload == "parameters" and layout.zero_stage < 3:
        yield (
            f"strategy.offload=parameters needs sharded parameters, not strategy.zero_stage={layout.zero_stage}: choose"
            " strategy.zero_stage=3, or strategy.offload=optimizer"
        )
    if chosen := quantized_option(config):
        others = {
            f"strategy.zero_stage={layout.zero_stage}": layout.zero_stage < 3,
            f"strategy.offload={layout.offload}": layout.offload != "none",
            f"model={config.model.name}, which has experts": config.model.num_experts > 0,
            f"adapter={config.model.adapter.name}": config.model.adapter.is_enabled,
        }
        yield from (f"{chosen} was not tried with {other}: choose false" for other, is_so in others.items() if is_so)
        shapes = model_profile(config.model).parameter_shapes
        if name := undivided(shapes, layout.dp_shard):
            yield (
                f"{chosen} needs {layout.dp_shard} shards of a multiple of {UNIT} elements each, as many as divide the"
                f" longer side of a matrix, unlike {name}: choose other sizes, or false"
            )
    yield from option_problems(config.strategy.options, FLAGS, SIZES, "strategy.engine=deepspeed")


def tensor_parallel_unsupported(config: "RunConfig", layout: "Layout") -> Iterator[str]:
    """Yield every reason why AutoTP's layers cannot train this layout."""
    tp = f"strategy.tp={layout.tp}"
    profile = model_profile(config.model)
    if not profile.is_project_decoder or profile.has_biases:
        yield f"{tp} of DeepSpeed is tested for matrices without biases, not model={config.model.name}: choose 1"
    if config.checkpointing.name == "selective":
        yield f"checkpointing=selective saves products that {tp} of DeepSpeed changes in place: choose none or full"
    if layout.vocabulary_parallel:
        yield f"strategy.vocabulary_parallel=true is not supported by {tp} of DeepSpeed: choose false"
    if layout.sequence_parallel:
        yield f"strategy.sequence_parallel=true is not supported by {tp} of DeepSpeed: choose false"
    if layout.zero_stage == 3:
        yield (
            f"{tp} of DeepSpeed keeps gathered weights until backward with strategy.zero_stage=3: choose"
            " strategy.zero_stage=2, or strategy.tp=1"
        )
