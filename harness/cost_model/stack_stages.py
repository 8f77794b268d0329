"""The model that another implementation trains in place of a configuration's, and its pipeline's stages. No torch."""

import dataclasses
from functools import lru_cache
from itertools import accumulate

from harness.config.model import ModelConfig
from harness.layout.layout import Layout
from harness.layout.partition import Stage, split_into_stages


@lru_cache(maxsize=1024)
def padded_model(model: ModelConfig, layout: Layout, vocabulary_multiple: int) -> ModelConfig:
    """Return the model with its vocabulary padded, and with a matrix for each of two ranks that share a tied one.

    Megatron-LM pads the vocabulary to a multiple of make_vocab_size_divisible_by x tp
    (megatron/core/tokenizers/utils/build_tokenizer.py, vocab_size_with_padding).
    """
    multiple = vocabulary_multiple * layout.vocabulary_tp
    rows = -(-model.vocab_size // multiple) * multiple
    is_tied = model.tie_word_embeddings and not layout.pp_enabled
    return dataclasses.replace(model, vocab_size=rows, tie_word_embeddings=is_tied)


@lru_cache(maxsize=4096)
def stack_stages(model: ModelConfig, layout: Layout, balance: str) -> tuple[Stage, ...]:
    """Return the pipeline's stages in order; strategy.layers_per_stage comes before the stack's balance.

    Raises UserError if there are fewer layers than stages.
    """
    count, depth = layout.num_stages, model.num_hidden_layers
    stages = split_into_stages(model, layout)
    if layout.layers_per_stage is not None or balance == "parameters":
        return tuple(stages)
    layers = [depth // count + (index < depth % count) for index in range(count)]
    if balance == "products":
        layers = balanced_by_products(model, count)
    return tuple(Stage(index, count, sum(layers[:index]), number) for index, number in enumerate(layers))


def balanced_by_products(model: ModelConfig, count: int) -> list[int]:
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
    return layers
