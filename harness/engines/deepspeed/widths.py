"""The bytes per element that DeepSpeed allocates for model state, and the sizes of its buffers."""

import math
from typing import TYPE_CHECKING

from harness.cost_model.micro_batch_shape import replaces_linear_function
from harness.layout.model_profile import model_profile
from harness.layout.state_widths import StateWidths

if TYPE_CHECKING:
    from harness.config.schema import RunConfig
    from harness.layout.layout import Layout

DEFAULT_BUCKET = 5e8  # elements, by deepspeed/runtime/zero/config.py


def state_widths(config: "RunConfig", layout: "Layout") -> StateWidths:
    """Return the bytes per element that DeepSpeed allocates.

    It clones a master of every parameter, even of fp32 parameters.
    """
    compute, precision = config.precision.compute_bytes, config.precision
    offloads = layout.offload != "none"
    gradients = device_gradient_width(config, layout) if offloads else gradient_width(config, layout)
    buckets = bucket_bytes(config, layout)
    replaces_linear = replaces_linear_function(config, layout)  # that function saves its input only after it has run
    return StateWidths(
        compute,
        compute,
        gradients,
        precision.master_bytes,
        gathered=compute,
        gathers_for_each_use=True,
        keeps_secondary_shards=True,  # stage3.py, _post_step
        padding="elements" if layout.zero_stage == 3 else "partition",
        parameter_alignment=parameter_alignment(config),
        reduce_bucket_elements=int(config.strategy.options.get("reduce_bucket_size", DEFAULT_BUCKET)),
        buffer_bytes=(buckets if layout.zero_stage == 3 else 0) + (staging_bytes(config, layout) if offloads else 0),
        backward_buffer_bytes=buckets if layout.zero_stage < 3 else 0,  # stage_1_and_2.py, setup_buckets
        renews_buffers=True,
        recomputes_last_projection=replaces_linear,
        overlaps_reduction=overlaps_reduction(config, layout),
        prefetches_parameters=prefetches_parameters(config),
        all_reduces_gradients=layout.zero_stage < 3 and not reduces_to_owner_rank(config),
        tp_allreduces_per_layer=7,  # 2 in forward, and 1 in backward for each of 5 column-parallel layers
        quantizes_gathers=config.strategy.options.get("zero_quantized_weights", False),
        exchange_devices=exchange_devices(config, layout),
        host_gradients=host_gradient_width(config, layout) if offloads else 0,
        host_buffer_bytes=host_buffer_bytes(config, layout) if offloads else 0,
    )


def bucket_bytes(config: "RunConfig", layout: "Layout") -> int:
    """Return the bytes of the reduction buckets.

    There is one bucket, and in stages 1 and 2 with overlap_comm a second to fill while the first is sent. They have the
    width of the reduction, but in stage 2 that of the gradients that backward computes (stage_1_and_2.py,
    _gradient_reduction_buffer_dtype). BF16_Optimizer has none.
    """
    if uses_bf16_optimizer(config, layout):
        return 0
    options, stage, precision = config.strategy.options, layout.zero_stage, config.precision
    buckets = 2 if stage < 3 and options.get("overlap_comm", False) else 1
    width = precision.compute_bytes if stage == 2 else precision.reduce_bytes
    return buckets * int(options.get("reduce_bucket_size", DEFAULT_BUCKET)) * width


def uses_bf16_optimizer(config: "RunConfig", layout: "Layout") -> bool:
    """Return whether DeepSpeed trains by BF16_Optimizer: in stage 1 where bf16 gradients are summed in fp32.

    Offload and the reduction of each gradient to the rank that owns it are the other stage-1 optimizer's.
    """
    is_plain = layout.offload == "none" and not reduces_to_owner_rank(config)
    precision = config.precision
    sums_wide = precision.is_mixed and (precision.compute, precision.accumulate) == ("bfloat16", "float32")
    return layout.zero_stage == 1 and sums_wide and is_plain


def gradient_width(config: "RunConfig", layout: "Layout") -> int:
    """Return the most bytes per element that the layout's shards of gradients take at a time, without buckets."""
    stage, mixed, options = layout.zero_stage, config.precision.is_mixed, config.strategy.options
    width = config.precision.accumulate_bytes
    if uses_bf16_optimizer(config, layout):
        return 6  # fp32 sums, and the bf16 gradients of the last micro-batch
    if stage == 2 and not mixed and layout.grad_accumulation_steps(config.train) > 1:
        return 2 * width  # the sum so far, and the next micro-batch's gradient
    shapes, trains = model_profile(config.model).layer_shapes, config.model.adapter.trains
    largest = max(math.prod(shape) for name, shape in shapes.items() if trains(name))
    if stage == 2 and mixed and options.get("reduce_bucket_size", DEFAULT_BUCKET) < largest:
        return 6  # a matrix larger than a bucket keeps its bf16 gradient until the end of backward
    return width


def device_gradient_width(config: "RunConfig", layout: "Layout") -> int:
    """Return the bytes per element of the layout's shards of gradients that stay on the device under offload.

    Stage 1 holds whole gradients until it reduces them; 16-bit gradients are summed in fp32 before they move.
    """
    return 4 if layout.zero_stage == 1 or (layout.zero_stage == 2 and config.precision.is_mixed) else 0


def host_gradient_width(config: "RunConfig", layout: "Layout") -> int:
    """Return the bytes per element of this rank's gradients on the host: AdamW's, and those that accumulate."""
    if layout.zero_stage == 3:
        return 8
    sums_on_host = layout.zero_stage == 2 and not config.precision.is_mixed
    return 8 if sums_on_host and layout.grad_accumulation_steps(config.train) > 1 else 4


def staging_bytes(config: "RunConfig", layout: "Layout") -> int:
    """Return the bytes of the device buffer through which stages 1 and 2 copy a gradient back from the host.

    It is as large as this rank's largest parameter.
    """
    from harness.layout.partition import local_numel, whole_model

    largest = max(local_numel(config.model, layout, whole_model(config.model)).values())
    return 0 if layout.zero_stage == 3 else math.ceil(largest) * (2 if config.precision.is_mixed else 4)


def host_buffer_bytes(config: "RunConfig", layout: "Layout") -> int:
    """Return the bytes of the host's staging buffer, and of this rank's part of the parameters before its copy back."""
    from harness.layout.partition import local_numel, whole_model

    if layout.zero_stage == 3:
        return 0
    part = math.ceil(sum(local_numel(config.model, layout, whole_model(config.model)).values()) / layout.dp_shard)
    return staging_bytes(config, layout) + part * (2 if config.precision.is_mixed else 4)


def parameter_alignment(config: "RunConfig") -> int:
    """Return to how many elements stages 1 and 2 align each parameter: 16 bytes of them, if an option says so."""
    return 16 // config.precision.compute_bytes if config.strategy.options.get("parameter_alignment") else 1


def reduces_to_owner_rank(config: "RunConfig") -> bool:
    """Return whether each gradient is reduced only to the rank that owns its partition, and not to all ranks."""
    return config.strategy.options.get("use_multi_rank_bucket_allreduce", True) is False


def overlaps_reduction(config: "RunConfig", layout: "Layout") -> bool:
    """Return whether gradients are reduced on a stream of their own, beside backward (zero/config.py: overlap_comm).

    BF16_Optimizer reduces after the last backward of a step.
    """
    overlaps = config.strategy.options.get("overlap_comm")
    by_default = layout.zero_stage == 3  # overlap_comm_valid
    return (by_default if overlaps is None else bool(overlaps)) and not uses_bf16_optimizer(config, layout)


def prefetches_parameters(config: "RunConfig") -> bool:
    """Return whether stage 3 gathers parameters ahead of use (partitioned_param_coordinator.py: fetch_sub_module)."""
    options = config.strategy.options
    limits = {"stage3_max_live_parameters": 1e9, "stage3_prefetch_bucket_size": 5e7}  # elements, by default
    return all(float(options.get(name, limit)) > 0 for name, limit in limits.items())


def exchange_devices(config: "RunConfig", layout: "Layout") -> int:
    """Return among how many devices of a node gradients are exchanged first if an option quantizes them.

    It is 0 on a single node, where DeepSpeed reduces them as they are (stage3.py, __avg_scatter_grads).
    """
    devices = config.cluster.gpus_per_node or layout.world_size
    is_exchanged = config.strategy.options.get("zero_quantized_gradients", False) and layout.world_size > devices
    return devices if is_exchanged else 0
