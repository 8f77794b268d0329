"""The configuration of a model: the sizes of a transformer under the keys of a Hugging Face config.json."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from harness.config.architecture import ARCHITECTURES, Architecture
from harness.config.from_dict import Positive, divisors_text, one_of, require

Family = Annotated[str, one_of(*ARCHITECTURES, "hf")]
AttentionKernel = Annotated[str, one_of("flash", "eager")]


@dataclass(frozen=True)
class HFModelInfo:
    """A causal language model of the transformers library, as its own configuration builds it.

    FLOPs are those of one sequence of train.seq_len tokens, as it runs on a CPU. Equality compares all fields; the hash
    leaves out those that are dicts.
    """

    config: dict[str, Any] = field(hash=False)  # The contents of its config.json, from which the ranks build it.
    # The shape of every parameter by its name; a tied one appears once.
    shapes: dict[str, tuple[int, ...]] = field(hash=False)
    layers: tuple[str, ...]  # The paths of the decoder layers, in order.
    head: str  # The path of the head.
    # The tensor-parallel style of each module by its path: a key of harness.layout.layer_spec.SHARD_DIM, or the
    # library's name of a style that is not supported.
    tensor_plan: dict[str, str] = field(hash=False)
    # The paths of modules in layers that the recomputation of a checkpointed layer does not run to their end.
    not_recomputed_modules: tuple[str, ...] = field(metadata={"old_key": "unfinished"})
    # Whether all of these are nn.Linear modules, and none calls torch's functions in another way.
    not_recomputed_are_linear: bool = field(metadata={"old_key": "unfinished_are_linear"})
    forward_flops: int  # The FLOPs of forward.
    layers_flops: int  # The part of forward_flops in the decoder layers.
    step_flops: int  # The FLOPs of forward and backward.
    # The FLOPs of the scores that backward recomputes wherever a fused kernel computes attention.
    attention_recompute_flops: int = field(metadata={"old_key": "remade_flops"})
    # The FLOPs that full checkpointing adds to step_flops.
    checkpoint_recompute_flops: int = field(metadata={"old_key": "again_flops"})


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a transformer, and what its layers are made of."""

    name: str  # The name of the model, which is the value of the row's column `model`.
    family: Family  # The architecture: llama, gpt, or hf for a model of the transformers library.
    hidden_size: Positive  # The size of the hidden states between layers.
    num_hidden_layers: Positive  # The number of decoder layers.
    num_attention_heads: Positive  # The number of query heads in each layer.
    num_key_value_heads: Positive  # The number of key and value heads, each shared by equally many query heads.
    intermediate_size: Positive  # The inner size of the MLP.
    vocab_size: Positive  # The number of tokens that the model knows.
    tie_word_embeddings: bool  # Whether the output head uses the weight of the token embedding.
    context_length: Positive  # The most tokens that a sequence may have.
    # The number of parameters that the model has in the sizes of its file; it only documents the file.
    parameters: int
    source: str  # The publication or configuration that the sizes are from.
    attention: AttentionKernel = "flash"  # The attention kernel: flash is torch's fused one, eager stores the scores.
    dropout: float = 0.0  # The dropout probability, at least 0 and below 1; family llama has none.
    rope_theta: float = 10000.0  # The base of the rotary position embedding, for family llama.
    rms_norm_eps: float = 1e-5  # The epsilon of RMSNorm, for family llama.
    layer_norm_epsilon: float = 1e-5  # The epsilon of LayerNorm, for family gpt.
    initializer_range: float = 0.02  # The standard deviation of the initial weights.
    # The file or folder from which family hf takes its configuration.
    path: str | None = None
    # The trace of a model of family hf.
    hf_info: HFModelInfo | None = field(default=None, metadata={"old_key": "asked"})

    def __post_init__(self) -> None:
        rule = f"is a configuration of the transformers library: type model=hf model.path={self.path}"
        require(self.path is None or self.family == "hf", "model.path", self.path, rule)
        if self.family not in ARCHITECTURES:
            return  # the transformers library has built its models, and so accepted their sizes
        if not self.architecture.dropout:
            require(
                self.dropout == 0, "model.dropout", self.dropout, f"is not part of the {self.family} family: choose 0"
            )
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "must be in [0, 1): choose 0 or more, below 1")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        # Rotary position embedding rotates pairs of a head's elements.
        unit, even = (heads, "equal") if self.architecture.learned_positions else (2 * heads, "even")
        require(
            self.hidden_size % unit == 0,
            "model.hidden_size",
            self.hidden_size,
            f"does not give model.num_attention_heads={heads} heads of {even} size: choose a multiple of {unit}",
        )
        require(
            heads % groups == 0,
            "model.num_key_value_heads",
            groups,
            f"does not divide model.num_attention_heads={heads}: choose {divisors_text(heads)}",
        )

    @property
    def architecture(self) -> Architecture:
        """The parts of a decoder layer; KeyError is raised for the family hf, whose layers only the library knows."""
        return ARCHITECTURES[self.family]

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return self.hidden_size // self.num_attention_heads
