"""The profile of the project's own decoder (harness.models.decoder), computed from its sizes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from harness.config.from_dict import divisors_text
from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.layout.layer_spec import (
    Matrix,
    Shapes,
    attention_product_flops,
    layer_matrices,
    layer_shapes,
    norm_shapes,
    projection_flops,
)
from harness.layout.layout import Layout, refusals


@dataclass(frozen=True)
class DecoderProfile:
    """A ModelProfile of the project's decoder; parameters have the names of Hugging Face's Llama."""

    model: ModelConfig
    # Whether the layers are this project's. Exported scripts contain them, every engine is tested with them, they can
    # be compiled and cut into stages, and there are formulas for their activations and so for the peak of memory.
    # The matrices of attention, and those of the MLP, share the collectives of their input and output, where
    # tensor-parallel ranks sum or gather for every matrix of a library's plan by itself.
    is_project_decoder = True

    @cached_property
    def layer_shapes(self) -> Shapes:
        """The shapes of one layer's parameters by their names in the layer."""
        return layer_shapes(self.model)

    @cached_property
    def parameter_shapes(self) -> Shapes:
        """The shape of every parameter; a tied head is the embedding."""
        indices = range(self.model.num_hidden_layers)
        layers = {f"layers.{i}.{name}": shape for i in indices for name, shape in self.layer_shapes.items()}
        return self.embedding_shapes | layers | self.head_shapes

    @cached_property
    def embedding_shapes(self) -> Shapes:
        """The shapes of the tables of tokens and, where positions are learned, of positions."""
        model = self.model
        tokens: Shapes = {"embed_tokens.weight": (model.vocab_size, model.hidden_size)}
        positions: Shapes = {"embed_positions.weight": (model.context_length, model.hidden_size)}
        return tokens | (positions if model.architecture.learned_positions else {})

    @cached_property
    def head_shapes(self) -> Shapes:
        """The shapes of the final norm's parameters, and of the head unless it is tied."""
        model = self.model
        head: Shapes = {} if model.tie_word_embeddings else {"lm_head.weight": (model.vocab_size, model.hidden_size)}
        return norm_shapes("norm", model) | head

    @property
    def has_biases(self) -> bool:
        """Whether matrices of the decoder layers have biases."""
        return self.model.architecture.biases

    @property
    def layer_matrices(self) -> tuple[Matrix, ...]:
        """The matrices of one layer, in the order of forward."""
        return layer_matrices(self.model)

    @property
    def elementwise_tensors(self) -> tuple[int, int]:
        """The tensors of hidden_size and of intermediate_size that a layer's elementwise operators move in forward."""
        return self.model.architecture.elementwise_tensors

    def layer_index(self, name: str) -> int | None:
        """Return the index of the decoder layer that a parameter or module is part of; None if it is part of none."""
        owner, _, rest = name.partition(".")
        return int(rest.partition(".")[0]) if owner == "layers" and rest else None

    def recomputes_to_end(self, module: str) -> bool:
        """Return whether a second forward runs a module of a layer to its end: all but the last matrix."""
        return not module.endswith(self.layer_matrices[-1].path)

    def tp_style(self, module: str) -> str | None:
        """Return the style of a module, by its path or the end of it; None if it stays whole."""
        plan: dict[str, str | None] = {"embed_tokens": "vocabulary", "lm_head": "vocabulary"}
        plan |= {matrix.path: matrix.style for matrix in self.layer_matrices}
        return next((style for name, style in plan.items() if module == name or module.endswith(f".{name}")), None)

    @property
    def has_fused_attention_on_cpu(self) -> bool:
        """Whether torch is expected to run attention as one fused kernel on a CPU: wherever nothing is dropped."""
        return self.model.dropout == 0

    def layer_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations of one layer's forward: the projections and attention."""
        projections = sum(projection_flops(self.model, sequences * seq_len).values())
        return projections + 2 * attention_product_flops(self.model, sequences, seq_len)

    def head_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations of the head's forward; a tied head multiplies all the same."""
        return 2 * sequences * seq_len * self.model.hidden_size * self.model.vocab_size

    def recompute_flops(self, layers: int, sequences: int, seq_len: int, runs_to_end: bool) -> int:
        """Return the operations of so many second forwards of a layer.

        torch stops them before the last projection, unless dropout follows it: the mask is drawn behind it.
        """
        is_last_run = runs_to_end or self.model.dropout > 0
        not_run = 0 if is_last_run else 2 * sequences * seq_len * self.layer_matrices[-1].elements
        return layers * (self.layer_flops(sequences, seq_len) - not_run)

    def recomputed_score_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations of queries with keys that backward runs again: a fused kernel keeps no scores."""
        return self.model.num_hidden_layers * attention_product_flops(self.model, sequences, seq_len)

    def incompatibilities(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        """Yield why sequences are too long for the positions, and what tensor-parallel ranks cannot divide."""
        model, tp, seq_len = self.model, layout.tp, config.train.seq_len
        sequence_multiple, cuts_sequence = tp * layout.cp, layout.sequence_parallel
        largest_part = math.ceil(model.vocab_size / tp)  # of the vocabulary; the last rank has what is left
        rules = {
            "learned_positions": model.architecture.learned_positions and seq_len > model.context_length,
            "num_attention_heads": model.num_attention_heads % tp != 0,
            "num_key_value_heads": model.num_key_value_heads % tp != 0,
            "intermediate_size": model.intermediate_size % tp != 0,
            "vocabulary": layout.vocabulary_parallel and (tp - 1) * largest_part >= model.vocab_size,
            "sequence_parallel": cuts_sequence and tp == 1,
            "sequence_shards": cuts_sequence and seq_len % sequence_multiple != 0,
        }
        # The number of attention heads is a multiple of the key-value heads, so that a divisor of these divides both.
        values = {
            "divisors": divisors_text(math.gcd(model.num_key_value_heads, model.intermediate_size)),
            "times_cp": f" x strategy.cp={layout.cp}" if layout.cp_enabled else "",
            "sequence_multiple": sequence_multiple,
        }
        yield from refusals(rules, config, layout, **values)
