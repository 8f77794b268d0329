"""The profile of the project's own decoder (harness.models.decoder), computed from its sizes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.config.validation import divisors_text
from harness.layout.layout import Layout
from harness.layout.shapes import Shapes
from harness.layout.tensor_plan import TENSOR_PLAN

LAST_PROJECTION = "mlp.down_proj"  # a layer's last matrix, before which torch stops a second forward


@dataclass(frozen=True)
class DecoderProfile:
    """A ModelProfile of the project's decoder; parameters have the names of Hugging Face's Llama."""

    model: ModelConfig
    communicates_per_matrix = False
    supports_pipeline = True
    supports_compile = True
    is_project_decoder = True
    activations_are_known = True

    @property
    def parameter_shapes(self) -> Shapes:
        """The shape of every parameter; a tied head is the embedding."""
        layer = layer_shapes(self.model)
        indices = range(self.model.num_hidden_layers)
        layers = {f"layers.{i}.{name}": shape for i in indices for name, shape in layer.items()}
        return self.embedding_shapes | layers | self.head_shapes

    @property
    def embedding_shapes(self) -> Shapes:
        """The shapes of the tables of tokens and, where positions are learned, of positions."""
        model = self.model
        tokens: Shapes = {"embed_tokens.weight": (model.vocab_size, model.hidden_size)}
        positions: Shapes = {"embed_positions.weight": (model.context_length, model.hidden_size)}
        return tokens | (positions if model.architecture.learned_positions else {})

    @property
    def head_shapes(self) -> Shapes:
        """The shapes of the final norm's parameters, and of the head unless it is tied."""
        model = self.model
        head: Shapes = {} if model.tie_word_embeddings else {"lm_head.weight": (model.vocab_size, model.hidden_size)}
        return norm_shapes("norm", model) | head

    @property
    def has_biases(self) -> bool:
        """Whether matrices of the decoder layers have biases."""
        return self.model.architecture.biases

    def layer_index(self, name: str) -> int | None:
        """Return the index of the decoder layer that a parameter or module is part of; None if it is part of none."""
        owner, _, rest = name.partition(".")
        return int(rest.partition(".")[0]) if owner == "layers" and rest else None

    def recomputes_to_end(self, module: str) -> bool:
        """Return whether a second forward runs a module of a layer to its end: all but the last matrix."""
        return not module.endswith(LAST_PROJECTION)

    def tp_style(self, module: str) -> str | None:
        """Return the style of a module in TENSOR_PLAN, by its path; None if it stays whole."""
        styles = (style for name, style in TENSOR_PLAN.items() if module == name or module.endswith(f".{name}"))
        return next(styles, None)

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
        not_run = 0 if is_last_run else projection_flops(self.model, sequences * seq_len)["down_proj"]
        return layers * (self.layer_flops(sequences, seq_len) - not_run)

    def recomputed_score_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations of queries with keys that backward runs again: a fused kernel keeps no scores."""
        return self.model.num_hidden_layers * attention_product_flops(self.model, sequences, seq_len)

    def incompatibilities(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        """Yield why sequences are too long for the positions, and what tensor-parallel ranks cannot divide."""
        model, train = self.model, config.train
        if model.architecture.learned_positions and train.seq_len > model.context_length:
            yield (
                f"train.seq_len={train.seq_len} is more than the model.context_length={model.context_length}"
                " learned positions: choose that many or fewer, or a larger model.context_length"
            )
        if layout.tp_enabled or layout.sequence_parallel:
            yield from tensor_parallel_incompatibilities(config, layout)


def layer_shapes(model: ModelConfig) -> Shapes:
    """Return the shapes of one decoder layer's parameters by their names in the layer."""
    architecture, hidden, inner = model.architecture, model.hidden_size, model.intermediate_size
    key_value_size = model.num_key_value_heads * model.head_dim
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_value_size, hidden),
        "self_attn.v_proj": (key_value_size, hidden),
        "self_attn.o_proj": (hidden, hidden),
        **{f"mlp.{name}": (inner, hidden) for name in architecture.widening},
        LAST_PROJECTION: (hidden, inner),
    }
    shapes = norm_shapes("input_layernorm", model) | norm_shapes("post_attention_layernorm", model)
    for name, shape in matrices.items():
        shapes[f"{name}.weight"] = shape
        if architecture.biases:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def norm_shapes(name: str, model: ModelConfig) -> Shapes:
    """Return the shapes of the parameters of a norm with this name."""
    weight: Shapes = {f"{name}.weight": (model.hidden_size,)}
    return weight | ({f"{name}.bias": (model.hidden_size,)} if model.architecture.has_norm_biases else {})


def attention_product_flops(model: ModelConfig, sequences: int, seq_len: int) -> int:
    """Return the operations of one of a layer's two attention products: queries with keys, and scores with values."""
    return 2 * sequences * seq_len * seq_len * model.hidden_size


def projection_flops(model: ModelConfig, tokens: int) -> dict[str, int]:
    """Return the operations of each of a layer's projections, in the order of forward."""
    grouped = model.num_key_value_heads * model.head_dim
    outputs = {"k_proj": grouped, "v_proj": grouped, "q_proj": model.hidden_size, "o_proj": model.hidden_size}
    each = 2 * tokens * model.hidden_size
    return {name: each * outputs.get(name, model.intermediate_size) for name in model.architecture.projections}


def tensor_parallel_incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield the sizes of the model that tensor-parallel ranks cannot divide."""
    tp, model, seq_len = layout.tp, config.model, config.train.seq_len
    # The number of attention heads is a multiple of the key-value heads, so that a divisor of these divides both.
    common_divisor = math.gcd(model.num_key_value_heads, model.intermediate_size)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(model, key)
        if size % tp:
            yield f"strategy.tp={tp} does not divide model.{key}={size}: choose {divisors_text(common_divisor)}"
    # The vocabulary is cut into equal parts, and the last rank has what is left.
    if layout.vocabulary_parallel and (tp - 1) * math.ceil(model.vocab_size / tp) >= model.vocab_size:
        yield (
            f"strategy.tp={tp} leaves a rank without a part of model.vocab_size={model.vocab_size}: choose a smaller"
            " degree"
        )
    if layout.sequence_parallel and tp == 1:
        yield "strategy.sequence_parallel=true needs strategy.tp of 2 or more: choose false"
    if layout.sequence_parallel and seq_len % (tp * layout.cp):
        times = f" x strategy.cp={layout.cp}" if layout.cp_enabled else ""
        yield (
            f"strategy.tp={tp}{times} with strategy.sequence_parallel does not divide train.seq_len={seq_len}: choose a"
            f" multiple of {tp * layout.cp}"
        )
