"""ZeRO stages 1, 2 and 3 by the DeepSpeed library (arXiv 1910.02054), in the way `strategy.options` asks for.

What goes over the wire, read in DeepSpeed 0.19.8 and measured in the tests: gradients are reduced and summed in fp32 in
every stage and precision (communication_data_type, data_types.grad_accum_dtype), parameters gathered in the compute
width. Where bf16_mixed differs:
    stage 1 left to DeepSpeed runs its BF16_Optimizer, which all-reduces whole gradients whatever the options say. So
        where they ask for a reduction to the part's owner (use_multi_rank_bucket_allreduce: false), the optimizer of
        stages 1 and 2 is used, which does it;
    stage 2 divides a bf16 gradient by the number of ranks before it widens it: exact for powers of two only.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines import Engine, Widths
from harness.plan.activations import WIDTH_BYTES

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config import RunConfig
    from harness.layout import Layout
    from harness.machine import Machine
    from harness.measure.probe import Probe

# Keys of DeepSpeed's `zero_optimization` section that change how a stage is run, and not what it is: offload,
# quantisation, hierarchical partitions and the stage itself are other strategies or other numerics.
OPTIONS = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "ignore_unused_parameters",
    "memory_efficient_linear",
    "overlap_comm",
    "parameter_alignment",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_allgather_sequential",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
)


def refusals(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Why DeepSpeed cannot honour this run, one line each."""
    from harness.measure.native import compiler_problem

    if machine.device == "cpu" and compiler_problem():
        yield f"strategy.engine=deepspeed compiles its CPU collective: {compiler_problem()}"
    unsupported = "is not supported by strategy.engine=deepspeed"
    if config.precision.name == "fp16_mixed":
        yield (
            f"precision=fp16_mixed {unsupported}, which scales the loss by a rule of its own (and on a CPU not at all):"
            " choose bf16_mixed"
        )
    if config.precision.name == "bf16" and layout.offload != "none":
        yield f"precision=bf16 with strategy.offload={layout.offload} needs DeepSpeed's own AdamW: choose bf16_mixed"
    if layout.zero_stage == 0:
        yield f"strategy.zero_stage=0 {unsupported}: choose 1, 2 or 3"
    if layout.dp_replicate > 1:
        yield f"strategy.dp_replicate={layout.dp_replicate} {unsupported}: choose 1, and -1 for strategy.dp_shard"
    for axis in ("cp", "pp"):
        if getattr(layout, axis) > 1:
            yield f"strategy.{axis}={getattr(layout, axis)} {unsupported}: choose 1"
    if layout.tp > 1:
        yield from tensor_refusals(config, layout)
    biases = config.model.asked is None and config.model.kind.biases
    if config.checkpointing.name == "selective" and biases and has_own_linear(config, layout):
        yield (
            f"checkpointing=selective keeps products to which DeepSpeed's linear function of stage 3 adds the biases of"
            f" model={config.model.name} in place, again in the second forward: choose none or full, or"
            " +strategy.options.memory_efficient_linear=false"
        )
    if layout.offload == "parameters" and layout.zero_stage < 3:
        yield (
            f"strategy.offload=parameters needs strategy.zero_stage=3, not {layout.zero_stage}: DeepSpeed moves what it"
            " shards; choose optimizer, or zero_stage 3"
        )
    for key, value in config.strategy.options.items():
        if isinstance(value, (int, float)) and value < 0:
            yield f"strategy.options.{key}={value} is negative: choose 0 or more"
    for key in sorted(config.strategy.options.keys() - set(OPTIONS)):
        value = config.strategy.options[key]
        yield f"strategy.options.{key}={value} {unsupported}: choose among {', '.join(OPTIONS)}"


def tensor_refusals(config: "RunConfig", layout: "Layout") -> Iterator[str]:
    """Why AutoTP's layers cannot train this layout as it is asked for."""
    tp = f"strategy.tp={layout.tp}"
    if config.model.asked is not None or config.model.kind.biases:
        yield f"{tp} of DeepSpeed is proven for matrices without biases, not model={config.model.name}: choose 1"
    if config.checkpointing.name == "selective":
        yield f"checkpointing=selective keeps products that {tp} of DeepSpeed then sums in place: choose none or full"
    if layout.vocabulary_parallel:
        yield f"strategy.vocabulary_parallel=true: {tp} of DeepSpeed leaves embedding and head whole: choose false"
    if layout.sequence_parallel:
        yield f"strategy.sequence_parallel=true is not part of {tp} of DeepSpeed: choose false"
    if layout.zero_stage == 3:
        yield (
            f"{tp} with strategy.zero_stage=3: DeepSpeed's tensor-parallel layers multiply by a view of the gathered"
            " weight, which autograd keeps whole until backward: choose zero_stage 1 or 2, or strategy.tp=1"
        )


def has_own_linear(config: "RunConfig", layout: "Layout") -> bool:
    """Whether torch's linear function is replaced, for the whole process."""
    return layout.zero_stage == 3 and bool(config.strategy.options.get("memory_efficient_linear", True))


def environment(layout: "Layout", machine: "Machine", cache: Path) -> dict[str, str]:
    """On a CPU DeepSpeed compiles its shared-memory collective, once for all ranks: here, before they start."""
    if machine.device != "cpu":
        return {}
    from harness.measure.native import build_deepspeed_comm

    return build_deepspeed_comm(cache)


def widths(config: "RunConfig", layout: "Layout") -> Widths:
    """Bytes an element as DeepSpeed allocates them.

    It clones a master of every parameter, in fp32 even of fp32 parameters: with moments 4 + 4 + 4 of optimizer state,
    in bf16 throughout 2 + 2 + 2.
    """
    compute = WIDTH_BYTES[config.precision.compute]
    offloads = layout.offload != "none"
    gradients = device_gradient_width(config, layout) if offloads else gradient_width(config, layout)
    own_linear = has_own_linear(config, layout)  # it saves its input only after it has run
    return Widths(
        compute,
        gradients,
        3 * WIDTH_BYTES[config.precision.master],
        gathered=compute,
        gathers=gathers(config),
        buffer_bytes=bucket_bytes(config) + (staging_bytes(config, layout) if offloads else 0),
        whole_second_forward=own_linear,
        layer_sums=7,  # two in forward; in backward each of five column-parallel layers sums by itself
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
    stage, mixed, options = layout.zero_stage, config.precision.mixed, config.strategy.options
    width = WIDTH_BYTES[config.precision.accumulate]
    if stage == 1 and mixed and not reduces_to_owner(config):
        return 6  # BF16_Optimizer: fp32 sums, and the bf16 gradients of the last micro-batch
    if stage == 2 and not mixed and layout.accumulation(config.train) > 1:
        return 2 * width  # the sum so far, and what the next micro-batch adds to it
    if stage == 2 and mixed and options.get("reduce_bucket_size", 5e8) < config.model.hidden_size**2:
        return 6  # a matrix that no bucket can take keeps its bf16 gradient until the end of backward
    return width


def device_gradient_width(config: "RunConfig", layout: "Layout") -> int:
    """Bytes an element that stay on the device where the optimizer is offloaded, over the shards that the layout says.

    Stage 1 holds whole gradients until it reduces them; 16-bit gradients are summed in fp32 before they go.
    """
    return 4 if layout.zero_stage == 1 or (layout.zero_stage == 2 and config.precision.mixed) else 0


def host_gradient_width(config: "RunConfig", layout: "Layout") -> int:
    """Bytes an element of this rank's part on the host: what AdamW reads, and what micro-batches sum up in."""
    sums = layout.zero_stage == 2 and not config.precision.mixed and layout.accumulation(config.train) > 1
    return 8 if layout.zero_stage == 3 or sums else 4


def staging_bytes(config: "RunConfig", layout: "Layout") -> int:
    """Stages 1 and 2 bring a gradient back from the host through a buffer as large as this rank's largest."""
    from harness.placement import rank_elements, whole

    largest = max(rank_elements(config.model, layout, whole(config.model)).values())
    return 0 if layout.zero_stage == 3 else math.ceil(largest) * (2 if config.precision.mixed else 4)


def host_buffer_bytes(config: "RunConfig", layout: "Layout") -> int:
    """The same buffer on the host, and this rank's part of the parameters on its way to the device."""
    from harness.placement import rank_elements, whole

    if layout.zero_stage == 3:
        return 0
    part = math.ceil(sum(rank_elements(config.model, layout, whole(config.model)).values()) / layout.dp_shard)
    return staging_bytes(config, layout) + part * (2 if config.precision.mixed else 4)


def gathers(config: "RunConfig") -> float:
    """How often stage 3 makes an average parameter whole in a micro-batch, nothing being kept from use to use.

    Twice, and a layer a third time where it is called again, selectively too, but for the last projection: the second
    forward ends before it unless a mask is made behind it. A tied embedding has two uses.
    """
    from harness.sizes import elements, last_projection_shapes, layer_parameter_count, parameter_count

    model = config.model
    again = 2 * model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    skipped = 0 if model.dropout > 0 else elements(last_projection_shapes(model))
    layer = layer_parameter_count(model) - skipped
    again += layer * sum(map(config.checkpointing.calls_again, range(model.num_hidden_layers)))
    return 2 + again / parameter_count(model)


def reduces_to_owner(config: "RunConfig") -> bool:
    """Whether each gradient goes to the rank that owns its part, and not to all."""
    return config.strategy.options.get("use_multi_rank_bucket_allreduce", True) is False


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """The model under DeepSpeed on this rank; every rank of the process group is one of the data-parallel axis."""
    from harness.engines.deepspeed.start import start
    from harness.engines.deepspeed.training import Training

    engine, names = start(config, layout, device, probe)
    return Training(engine, names, layout, probe, config.train.loss_chunks)
