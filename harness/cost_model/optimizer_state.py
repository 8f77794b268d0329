"""The tensors that an optimizer updates on a rank, and the bytes of states and temporaries. Imports no torch."""

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from harness.config.model import ModelConfig
from harness.config.optimizer import ADAMW, DTYPE_BYTES, OPTIMIZERS, UpdateRule
from harness.config.schema import Device, RunConfig
from harness.cost_model.shard_groups import without_data_parallelism
from harness.layout.layout import Layout
from harness.layout.partition import Stage, fsdp_rows, local_sizes, parameters_of_stage
from harness.layout.state_widths import StateKind, StateWidths

BF16_BYTES = DTYPE_BYTES["bfloat16"]


class OptimizerTensor(NamedTuple):
    """A tensor that an optimizer updates on a rank."""

    elements: float  # an even share: a fraction where a dimension cannot be cut evenly
    is_matrix: bool = False  # whether it is a part of a matrix of a layer
    shape: tuple[int, ...] = ()  # of the whole parameter; empty for a part of a flat tensor
    is_divided: bool = False  # whether it is of experts that expert parallelism divides


def optimizer_parameter_count(model: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> int:
    """Return the number of parameters whose optimizer state is on the rank that has most of them."""
    return math.ceil(sum(tensor.elements for tensor in optimizer_tensors(model, layout, stages)))


def optimizer_tensors(model: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> Sequence[OptimizerTensor]:
    """Return the tensors that the optimizer updates on the rank that has most elements of them.

    ZeRO's stages divide all parameters as one flat tensor, unless a library assigns whole parameters to ranks.
    """
    shards, by_parameter = layout.shard_count("optimizer"), layout.partitions_by_parameter
    own = dataclasses.replace(without_data_parallelism(layout), ep=layout.undivided_ep("optimizer"))
    return _largest_partition(model, own, tuple(stages), shards, by_parameter)


@lru_cache(maxsize=1024)
def _largest_partition(
    model: ModelConfig, layout: Layout, stages: tuple[Stage, ...], shards: int, by_parameter: bool
) -> Sequence[OptimizerTensor]:
    """Return the tensors of the fullest rank, as ZeroRedundancyOptimizer assigns them: the largest one first.

    Each goes to the rank that has fewest, and to the first of several such ranks; others divide all parameters evenly.
    """
    sizes = local_sizes(model, layout, stages, trained=True)
    if shards > 1 and not by_parameter:
        return (OptimizerTensor(sum(sizes) / shards),)
    parameters = [parameter for stage in stages for parameter in parameters_of_stage(model, stage, trained=True)]
    pairs = zip(sizes, parameters, strict=True)
    tensors = [
        OptimizerTensor(size, parameter.is_layer_matrix, parameter.shape, parameter.is_expert and layout.ep > 1)
        for size, parameter in pairs
    ]
    ranks: list[tuple[float, int, tuple[OptimizerTensor, ...]]] = [(0.0, rank, ()) for rank in range(shards)]
    for tensor in sorted(tensors, key=lambda tensor: -tensor.elements):
        total, rank, own = ranks[0]
        heapq.heapreplace(ranks, (total + tensor.elements, rank, (*own, tensor)))
    return max(ranks)[2]


def row_shards(model: ModelConfig, layout: Layout, stages: Sequence[Stage], shards: int) -> Sequence[OptimizerTensor]:
    """Return the tensors that the optimizer updates under fully_shard, which divides and pads rows."""
    return _row_shards(model, without_data_parallelism(layout), tuple(stages), shards, layout.ep)


@lru_cache(maxsize=1024)
def _row_shards(
    model: ModelConfig, layout: Layout, stages: tuple[Stage, ...], shards: int, ep: int
) -> Sequence[OptimizerTensor]:
    tensors = []
    for parameter in (each for stage in stages for each in parameters_of_stage(model, stage, trained=True)):
        is_divided = parameter.is_expert and ep > 1
        own = max(1, shards // (ep if is_divided else 1))
        rows, row = fsdp_rows(parameter.local_shape(layout.tp, layout.vocabulary_tp, ep), own)
        size = math.ceil(rows / own) * row
        tensors.append(OptimizerTensor(size, parameter.is_layer_matrix, parameter.shape, is_divided))
    return tuple(tensors)


def state_width(config: RunConfig, widths: StateWidths, kind: StateKind) -> int:
    """Return the bytes per element of a kind of model state; 0 where they differ between tensors."""
    adapter = config.model.adapter
    if kind == "parameters":
        is_uniform = widths.frozen == widths.parameters and not adapter.is_quantized
        return widths.parameters * (is_uniform or not adapter.is_enabled)
    if kind == "gradients":
        return widths.gradients
    spec, states = config.optimizer.spec, config.optimizer.spec.states.values()
    is_uniform = spec.of_matrices is None and all(state.dtype is None for state in states)
    return (widths.masters + config.precision.master_bytes * len(states)) * is_uniform


@lru_cache(maxsize=1024)
def state_bytes(optimizer: str, tensors: Sequence[OptimizerTensor], master: str) -> int:
    """Return the bytes of the states of an optimizer for these tensors, whose masters have this dtype."""
    total = 0
    for rule, own in _by_rule(optimizer, tensors):
        sizes = [tensor.elements for tensor in own]
        for state in rule.states.values():
            counted = [sum(sizes)] if state.dtype is None else sizes
            total += sum(state.bytes(math.ceil(size), master) for size in counted)
    return total


@lru_cache(maxsize=1024)
def update_temporaries(
    optimizer: str, tensors: Sequence[OptimizerTensor], master: str, is_fused: bool, device: Device
) -> int:
    """Return the most bytes of temporaries of an update of these tensors, whose rules run one after another.

    A rule updates experts that are divided, which lie on another device mesh, apart from all other parameters. What
    updates one tensor after another is compiled on a GPU.
    """
    most = 0
    for rule, own in _by_rule(optimizer, tensors):
        copies = rule.foreach_copies * (not (is_fused and rule.kernels)) * DTYPE_BYTES[master]
        largest = max(
            (rule.temporaries(math.ceil(tensor.elements), master, device == "cuda") for tensor in own), default=0
        )
        whole = [orthogonalization_bytes(tensor) for tensor in own if rule.iterations]
        together = [sum(tensor.elements for tensor in own if tensor.is_divided is divided) for divided in (True, False)]
        most = max(most, math.ceil(copies * max(together)), largest, *whole)
    return most


def gathered_updates(config: RunConfig, layout: Layout, stage: Stage, is_padded: bool) -> list[float]:
    """Return the elements of each update that fully_shard's ranks gather once a step, as it needs the whole matrix."""
    spec, shards = config.optimizer.spec, layout.axes_size(layout.sharding_axes) if is_padded else 1
    if layout.data_parallel != "fsdp" or not spec.needs_whole:
        return []
    tensors = row_shards(config.model, layout, (stage,), shards)
    return [shards * tensor.elements for tensor in tensors if spec.rule_of(tensor.is_matrix).iterations]


@lru_cache(maxsize=1024)
def update_cost(optimizer: str, model: ModelConfig, stages: tuple[Stage, ...]) -> tuple[float, float]:
    """Return what an update moves and computes beside AdamW's: bytes for each parameter, and operations of all.

    An iteration has three products of a matrix (m, n), with m <= n: two of 2 m m n operations, and one of 2 m m m.
    """
    parameters = [parameter for stage in stages for parameter in parameters_of_stage(model, stage, trained=True)]
    moved, flops = 0.0, 0
    for parameter in parameters:
        rule = OPTIMIZERS[optimizer].rule_of(parameter.is_layer_matrix)
        moved += math.prod(parameter.shape) * (rule.update_bytes - ADAMW.update_bytes)
        if rule.iterations:
            flops += (
                rule.iterations
                * min(parameter.shape)
                * (4 * math.prod(parameter.shape) + 2 * min(parameter.shape) ** 2)
            )
    return moved / sum(math.prod(parameter.shape) for parameter in parameters), flops


def orthogonalization_bytes(tensor: OptimizerTensor) -> int:
    """Return the bytes of Newton-Schulz iterations of a whole matrix (m, n): three of it, and two of m x m, in bf16."""
    elements, side = math.prod(tensor.shape), min(tensor.shape)
    return BF16_BYTES * (3 * elements + 2 * side**2)


def _by_rule(
    optimizer: str, tensors: Sequence[OptimizerTensor]
) -> Iterator[tuple[UpdateRule, Sequence[OptimizerTensor]]]:
    spec = OPTIMIZERS[optimizer]
    for rule in spec.rules:
        yield rule, [tensor for tensor in tensors if spec.rule_of(tensor.is_matrix) is rule]
