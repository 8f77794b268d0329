"""The parameters of a rank under another implementation's padding and stages, in closed form. Imports no torch."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from harness.config.model import ModelConfig
from harness.config.stack import StackMemory
from harness.layout.layer_spec import layer_matrices, norm_shapes, numel
from harness.layout.layout import Layout
from harness.layout.partition import split_into_stages
from harness.util.errors import UserError


@dataclass(frozen=True)
class PartCounts:
    """The numbers of parameters of a model's parts on one tensor-parallel rank."""

    layer: int
    embedding: int  # with learned positions
    head: int  # its matrix alone, which a tied head shares with the embedding where both are on one rank
    norm: int  # the final one


@lru_cache(maxsize=1024)
def part_counts(model: ModelConfig, tp: int, vocabulary_multiple: int) -> PartCounts:
    """Return the parameters of each part on the tensor-parallel rank that has most of them.

    Megatron-LM pads the vocabulary to a multiple of make_vocab_size_divisible_by x tp
    (megatron/core/tokenizers/utils/build_tokenizer.py, vocab_size_with_padding).
    """
    parts, hidden, matrices = model.architecture, model.hidden_size, layer_matrices(model)
    layer = math.ceil(sum(matrix.elements for matrix in matrices) / tp)
    layer += sum(numel(norm_shapes(branch.norm, model)) for branch in parts.branches)
    if parts.biases:
        layer += math.ceil(sum(matrix.outputs for matrix in matrices if matrix.style == "column") / tp)
        layer += sum(matrix.outputs for matrix in matrices if matrix.style == "row")
    rows = math.ceil(model.vocab_size / (vocabulary_multiple * tp)) * vocabulary_multiple
    positions = model.context_length * hidden if parts.learned_positions else 0
    return PartCounts(layer, rows * hidden + positions, rows * hidden, numel(norm_shapes("norm", model)))


@lru_cache(maxsize=4096)
def layers_of_stages(model: ModelConfig, layout: Layout, balance: str) -> tuple[int, ...]:
    """Return the layers of each pipeline stage, in order; a rank has every pp-th stage.

    strategy.layers_per_stage comes first. Raises UserError if there are fewer layers than stages.
    """
    count, depth = layout.num_stages, model.num_hidden_layers
    if layout.layers_per_stage is not None or balance == "parameters":
        return tuple(stage.layers for stage in split_into_stages(model, layout))
    if depth < count:
        raise UserError(
            f"strategy.pp={layout.pp} makes {count} stages of model.num_hidden_layers={depth}: choose at least one"
            " layer per stage"
        )
    if balance == "layers":
        return tuple(depth // count + (index < depth % count) for index in range(count))
    return _balanced_by_products(model, count)


def _balanced_by_products(model: ModelConfig, count: int) -> tuple[int, ...]:
    """Return the layers of each stage as nanotron's build_model assigns them (src/nanotron/models/base.py).

    Blocks go to a stage until the cumulative cost passes its share. A layer costs its matrices, the head its own, and
    embedding and norm cost nothing.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    layer_cost = 4 * hidden * hidden + (2 + model.architecture.has_gate) * hidden * inner
    costs = [0, *[layer_cost] * model.num_hidden_layers, 0, model.vocab_size * hidden]
    total, stage, layers = sum(costs), 0, [0] * count
    for index, cumulative in enumerate(accumulate(costs)):
        if 1 <= index <= model.num_hidden_layers:
            layers[stage] += 1
        if cumulative > total * (stage + 1) / count:
            stage = min(stage + 1, count - 1)
    return tuple(layers)


@dataclass(frozen=True)
class RankParts:
    """What one rank of the pipeline holds of the model."""

    chunks: tuple[int, ...]  # the layers of each of its stages
    holds_embedding: bool
    holds_head: bool
    parameters: int  # of one tensor-parallel rank, before any sharding by data-parallel ranks
    unit: int  # of one layer
    root: int  # outside the layers


@lru_cache(maxsize=4096)
def rank_parts(model: ModelConfig, layout: Layout, memory: StackMemory, pp_rank: int) -> RankParts:
    """Return what a rank of the pipeline holds; a tied head on another rank than the embedding is a second copy."""
    stages = layers_of_stages(model, layout, memory.balance)
    counts = part_counts(model, layout.tp if layout.vocabulary_parallel else 1, memory.vocabulary_multiple)
    layer = part_counts(model, layout.tp, memory.vocabulary_multiple).layer
    chunks = stages[pp_rank :: layout.pp]
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    own_head = last and not (first and model.tie_word_embeddings)
    root = first * counts.embedding + own_head * counts.head + last * counts.norm
    return RankParts(chunks, first, last, layer * sum(chunks) + root, layer, root)
