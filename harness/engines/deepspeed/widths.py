"""TODO harness.engines.deepspeed.widths."""

import math
from typing import TYPE_CHECKING

from harness.cost_model.activations import WIDTH_BYTES
from harness.engines.deepspeed.compatibility import replaces_linear_function
from harness.layout.state_widths import StateWidths

if TYPE_CHECKING:
    from harness.config.schema import RunConfig
    from harness.layout.layout import Layout


def state_widths(config: "RunConfig", layout: "Layout") -> StateWidths:
    """Bytes an element as DeepSpeed allocates them.

    It clones a master of every parameter, in fp32 even of fp32 parameters: with moments 4 + 4 + 4 of optimizer state,
    in bf16 throughout 2 + 2 + 2.
    """
    compute = WIDTH_BYTES[config.precision.compute]
    offloads = layout.offload != "none"
    gradients = device_gradient_width(config, layout) if offloads else gradient_width(config, layout)
    own_linear = replaces_linear_function(config, layout)  # it saves its input only after it has run
    return StateWidths(
        compute,
        gradients,
        3 * WIDTH_BYTES[config.precision.master],
        gathered=compute,
        gathers_per_micro_batch=gathers_per_micro_batch(config),
        buffer_bytes=bucket_bytes(config) + (staging_bytes(config, layout) if offloads else 0),
        recomputes_last_projection=own_linear,
        tp_allreduces_per_layer=7,  # two in forward; in backward each of five column-parallel layers sums by itself
        host_gradients=host_gradient_width(config, layout) if offloads else 0,
        host_buffer_bytes=host_buffer_bytes(config, layout) if offloads else 0,
    )


def bucket_bytes(config: "RunConfig") -> int:
    """The reduction buckets, as wide as what is reduced.

    One, and in stages 1 and 2 a second to fill while the first is sent.
    """
    options = config.strategy.options
    second = config.strategy.zero_stage < 3 and options.get("overlap_comm", False)
    elements = int(options.get("reduce_bucket_size", 5e8)) * (2 if second else 1)
    return elements * WIDTH_BYTES[config.precision.reduce]


def gradient_width(config: "RunConfig", layout: "Layout") -> int:
    """Bytes an element at most, over the shards that the layout says; buckets left out."""
    stage, mixed, options = layout.zero_stage, config.precision.is_mixed, config.strategy.options
    width = WIDTH_BYTES[config.precision.accumulate]
    if stage == 1 and mixed and not reduces_to_owner_rank(config):
        return 6  # BF16_Optimizer: fp32 sums, and the bf16 gradients of the last micro-batch
    if stage == 2 and not mixed and layout.grad_accumulation_steps(config.train) > 1:
        return 2 * width  # the sum so far, and what the next micro-batch adds to it
    if stage == 2 and mixed and options.get("reduce_bucket_size", 5e8) < config.model.hidden_size**2:
        return 6  # a matrix that no bucket can take keeps its bf16 gradient until the end of backward
    return width


def device_gradient_width(config: "RunConfig", layout: "Layout") -> int:
    """Bytes an element that stay on the device where the optimizer is offloaded, over the shards that the layout says.

    Stage 1 holds whole gradients until it reduces them; 16-bit gradients are summed in fp32 before they go.
    """
    return 4 if layout.zero_stage == 1 or (layout.zero_stage == 2 and config.precision.is_mixed) else 0


def host_gradient_width(config: "RunConfig", layout: "Layout") -> int:
    """Bytes an element of this rank's part on the host: what AdamW reads, and what micro-batches sum up in."""
    sums = layout.zero_stage == 2 and not config.precision.is_mixed and layout.grad_accumulation_steps(config.train) > 1
    return 8 if layout.zero_stage == 3 or sums else 4


def staging_bytes(config: "RunConfig", layout: "Layout") -> int:
    """Stages 1 and 2 bring a gradient back from the host through a buffer as large as this rank's largest."""
    from harness.layout.partition import local_numel, whole_model

    largest = max(local_numel(config.model, layout, whole_model(config.model)).values())
    return 0 if layout.zero_stage == 3 else math.ceil(largest) * (2 if config.precision.is_mixed else 4)


def host_buffer_bytes(config: "RunConfig", layout: "Layout") -> int:
    """The same buffer on the host, and this rank's part of the parameters on its way to the device."""
    from harness.layout.partition import local_numel, whole_model

    if layout.zero_stage == 3:
        return 0
    part = math.ceil(sum(local_numel(config.model, layout, whole_model(config.model)).values()) / layout.dp_shard)
    return staging_bytes(config, layout) + part * (2 if config.precision.is_mixed else 4)


def gathers_per_micro_batch(config: "RunConfig") -> float:
    """How often stage 3 makes an average parameter whole in a micro-batch, nothing being kept from use to use.

    Twice, and a layer a third time where it is called again, selectively too, but for the last projection: the second
    forward ends before it unless a mask is made behind it. A tied embedding has two uses.
    """
    from harness.layout.parameters import layer_parameter_count, numel, parameter_count, unrecomputed_shapes

    model = config.model
    again = 2 * model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    skipped = 0 if model.dropout > 0 else numel(unrecomputed_shapes(model))
    layer = layer_parameter_count(model) - skipped
    again += layer * sum(map(config.checkpointing.recomputes_layer, range(model.num_hidden_layers)))
    return 2 + again / parameter_count(model)


def reduces_to_owner_rank(config: "RunConfig") -> bool:
    """Whether each gradient goes to the rank that owns its part, and not to all."""
    return config.strategy.options.get("use_multi_rank_bucket_allreduce", True) is False
