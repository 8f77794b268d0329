"""The seconds of a decoder layer for a micro-batch on one rank, and what a step's times follow from."""

from dataclasses import dataclass
from functools import cached_property

from harness.config.hardware import HardwareConfig
from harness.config.schema import RunConfig
from harness.config.stack import StackTiming
from harness.cost_model.flops import recomputed_product_flops
from harness.cost_model.micro_batch_shape import MicroBatchShape, micro_batch_shape
from harness.cost_model.node_groups import RankGroup, group_of
from harness.cost_model.pipeline import split_passes
from harness.cost_model.timing.collectives import all_to_all_seconds, gather_seconds
from harness.cost_model.timing.kernels import LayerSeconds, layer_seconds
from harness.layout.layer_spec import layer_branches, projection_flops
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.state_widths import StateWidths

# What the host of a GPU does to gather or divide a layer, in units of what was counted on a CPU with gloo: on the hosts
# of one H200 and one H100 it was 0.21 and 0.19 for FSDP2, and 0.32 and 0.26 for DeepSpeed's stage 3
# (results/first_gpu/speed.csv: 125m and 350m, less the single process).
GPU_SHARE = 0.25


@dataclass(frozen=True)
class StepSetting:
    """What the time of a step follows from: a configuration as a layout of so many devices of each node."""

    config: RunConfig
    layout: Layout
    hardware: HardwareConfig
    timing: StackTiming
    widths: StateWidths
    gpus_per_node: int

    @cached_property
    def shape(self) -> MicroBatchShape:
        """The sizes of a micro-batch on one rank."""
        return micro_batch_shape(self.config, self.layout, "cpu" if self.hardware.is_cpu else "cuda")

    def group(self, *axes: str) -> RankGroup:
        """Return the ranks along these axes."""
        return group_of(self.layout, axes, self.gpus_per_node)


@dataclass(frozen=True)
class MicroBatchTime:
    """The seconds of a layer or a stage for a micro-batch on one rank."""

    forward: float  # compute alone
    backward: float  # with the second forward of checkpointing
    tp: float  # exposed communication of both passes
    cp: float
    ep: float


def layer_time(step: StepSetting) -> MicroBatchTime:
    """Return the seconds of a decoder layer.

    Where the host launches kernels more slowly than the device runs them, the host's time counts, and a stack may let
    the device wait for a while in every layer. On a CPU the host runs kernels itself, so that both times count, and
    what it does beside them counts as launches that take as long.
    """
    hardware, timing, shape = step.hardware, step.timing, step.shape
    passes = layer_seconds(shape, hardware, timing)
    recomputed = recomputed_share(step, passes)
    forward, backward = passes.forward, passes.backward + recomputed * passes.forward
    tp, collectives = _tp_seconds(step, passes, recomputed)
    cp = (2 + recomputed) * attention_exchange_seconds(step)
    # Rows go to their experts and come back in each pass; a second forward runs in as many layers as it is of them.
    exchanges = 2 * (2 + (recomputed > 0) / step.config.checkpointing.every) * (shape.ep > 1)
    ep = exchanges * all_to_all_seconds(shape.routed_bytes, step.group("ep"), hardware)
    in_pipeline = step.layout.pp_enabled * timing.pipelined_collective_seconds_per_rank
    of_group = shape.tp * max(in_pipeline, timing.collective_seconds_per_rank)
    of_collectives = 0.0 if hardware.is_cpu else collectives * (timing.collective_launch_seconds + of_group)
    host = _launches(step, recomputed) * hardware.fitted.launch_seconds + of_collectives
    device = forward + backward + tp + cp + ep
    waiting = host if hardware.is_cpu else max(timing.layer_seconds, host - device)
    forward, backward = forward + waiting / 3, backward + waiting * 2 / 3
    return MicroBatchTime(forward, backward, tp, cp, ep)


def attention_exchange_seconds(step: StepSetting) -> float:
    """Return the seconds in which context-parallel ranks exchange what a layer's attention needs, in one pass.

    Keys and values are gathered in each forward, and their gradients scattered. Ranks that exchange heads send queries,
    keys, values and outputs, each by itself.
    """
    shape, group, hardware = step.shape, step.group("cp"), step.hardware
    if not shape.exchanges_heads:
        return gather_seconds(2 * shape.core_key_bytes, group, hardware)
    sent = (shape.query_bytes, shape.core_key_bytes, shape.core_key_bytes, shape.query_bytes)
    return sum(all_to_all_seconds(size, group, hardware) for size in sent)


def _launches(step: StepSetting, recomputed: float) -> float:
    """Return as how many launches counts what the host does in a layer of which backward runs a share again.

    In stage 3 it gathers a layer in forward and in backward, and reduces its gradient. In stages 1 and 2 DeepSpeed
    reduces the gradient of each parameter, once a step and in every micro-batch.
    """
    timing, stage, tensors = step.timing, step.layout.zero_stage, len(model_profile(step.config.model).layer_shapes)
    is_deepspeed, kernels = step.widths.gathers_for_each_use, timing.kernels_per_layer * (1 + recomputed / 3)
    each = tensors * timing.parameter_gather_launches if is_deepspeed else timing.layer_gather_launches
    times = (0.0, 1 / step.layout.grad_accumulation_steps(step.config.train), 1.0, 0.0)[stage] * is_deepspeed
    share, divided = 1.0 if step.hardware.is_cpu else GPU_SHARE, timing.divided_layer_launches * step.layout.tp_enabled
    return kernels + share * (3 * each * (stage == 3) + divided) + times * tensors * timing.parameter_reduce_launches


def recomputed_share(step: StepSetting, passes: LayerSeconds) -> float:
    """Return the share of a layer's forward that backward runs again, on average over the layers.

    torch stops a second forward before the last product, unless dropout follows it or the layer is compiled. A backward
    in two halves runs one for each of them, in all stages but the first: counted are those of the second rank.
    """
    model, checkpointing, is_compiled = step.config.model, step.config.checkpointing, step.config.train.compile
    forward, attention = passes.forward, passes.attention / passes.forward
    if checkpointing.name == "none":
        return 0.0
    if checkpointing.name == "attention":
        return attention
    if checkpointing.name == "selective":  # keeps the results of attention and of all or some matrix products
        products = projection_flops(model, 1)
        again = recomputed_product_flops(model, checkpointing, products, is_compiled)
        saved_share = 1.0 - again / sum(products.values())
        product_share = min(1.0, passes.weight_gradient / forward) * 0.95  # of forward, as many as half of backward's
        return 1.0 - attention - saved_share * product_share
    stops_early, layout = not is_compiled and model.dropout == 0, step.layout
    micro_batches = layout.grad_accumulation_steps(step.config.train)
    halved = sum(split_passes(layout, micro_batches, 1)) / (layout.virtual_stages * micro_batches)
    return (1.0 + halved) * (1.0 - (passes.last_projection / forward if stops_early else 0.0)) / checkpointing.every


def _tp_seconds(step: StepSetting, passes: LayerSeconds, recomputed: float) -> tuple[float, float]:
    """Return the exposed seconds of a layer's tensor-parallel collectives, and how many of them there are.

    Forward has two all-reduces, or with sequence parallelism an all-gather and a reduce-scatter for each, and backward
    as many (arXiv 2205.05198, section 4.2.2). A second forward repeats its own. Backward may gather inputs again, and
    may sum an input's gradient while it computes that of the weight.
    """
    shape, timing = step.shape, step.timing
    if shape.tp == 1:
        return 0.0, 0
    branches = len(layer_branches(shape.model))  # of a layer, before or after each of which there is a collective
    one_way = gather_seconds(shape.whole_hidden_bytes, step.group("tp"), step.hardware)
    collective_seconds, forward_count = (one_way, 2 * branches) if shape.sequence_parallel else (2 * one_way, branches)
    gathered_again = branches * (shape.sequence_parallel and timing.gathers_inputs_again)
    backward_count = forward_count + gathered_again + recomputed * forward_count
    exposed_backward = backward_count * collective_seconds
    if timing.overlaps_input_gradient:
        exposed_backward -= min(branches * collective_seconds, passes.weight_gradient)
    return forward_count * collective_seconds + exposed_backward, forward_count + backward_count
