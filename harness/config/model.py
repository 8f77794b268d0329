"""The configuration of a model: a transformer's sizes under the keys of a Hugging Face config.json, and its layers.

A family's decoder layer is data: shapes and parameters (harness.layout.layer_spec), operations, the tensors that
forward keeps, the order in which backward makes and frees them, and what tensor-parallel ranks send are readings of one
table, architecture.toml. No torch.
"""

import tomllib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from harness.config.adapter import AdapterConfig
from harness.config.from_dict import Natural, Positive, divisors_text, from_dict, one_of, require


@dataclass(frozen=True)
class Operator:
    """An operator of a branch: it makes one tensor of others, which it keeps for backward, and may have a matrix.

    The tensor `input` is the output of the branch's norm, and the one without a name is added to the residual stream.
    """

    # A matrix whose outputs tensor-parallel ranks divide, or one whose inputs they divide and whose products they sum,
    # an elementwise function, a rotation of heads by their positions, the core of attention, the choice of experts for
    # each token by a matrix, copies of the tokens sorted by expert, or each token's sum of its experts' outputs.
    kind: Literal["column", "row", "function", "rotary", "attention", "router", "dispatch", "combine"]
    output: str
    inputs: tuple[str, ...]
    matrix: str = ""
    is_grouped: bool = False  # whether each expert has a matrix of its own


class Branch(NamedTuple):
    """A branch of a layer beside the residual stream: a norm, and operators in the order of forward."""

    name: str  # of its tensors
    module: str
    norm: str
    operators: tuple[Operator, ...]


_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("architecture.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Architecture:
    """The layer of a family."""

    # The kind of norm: rms has a scale alone (arXiv 1910.07467), layer also subtracts the mean and has a bias (arXiv
    # 1607.06450).
    norm: str
    biases: bool  # Whether the matrices of the layers have biases; the head never has one.
    learned_positions: bool  # Whether a learned table embeds positions; otherwise attention rotates queries and keys.
    mlp: tuple[Operator, ...]
    # The tensors that elementwise operators read and write in forward, each operator by itself: of hidden_size among
    # what tensor-parallel ranks divide (rotations of queries and keys, or biases), and of intermediate_size.
    elementwise_tensors: tuple[int, int]
    # Whether embeddings, attention weights and the residual stream's branches can have dropout (arXiv 1706.03762).
    dropout: bool

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of a layer, in the order of forward."""
        attention = tuple(each for each in ATTENTION if each.kind != "rotary" or not self.learned_positions)
        return (
            Branch("attention", "self_attn", "input_layernorm", attention),
            Branch("mlp", "mlp", "post_attention_layernorm", self.mlp),
        )

    @property
    def has_gate(self) -> bool:
        """Whether two matrices of the MLP take its input, one of which gates the other."""
        return sum(operator.kind == "column" for operator in self.mlp) > 1

    @property
    def has_experts(self) -> bool:
        """Whether the MLP is a mixture of experts."""
        return any(operator.kind == "router" for operator in self.mlp)


GATED_MATRICES = 3  # of an MLP with a gate: gate, up and down

ATTENTION, SHARED_EXPERTS = (
    tuple(from_dict(Operator, row) for row in _TABLES[name]) for name in ("attention", "shared_experts")
)
ARCHITECTURES = {name: from_dict(Architecture, facts, name) for name, facts in _TABLES["families"].items()}

Family = Annotated[str, one_of(*ARCHITECTURES, "hf")]
AttentionKernel = Annotated[str, one_of("flash", "eager")]
Routing = Annotated[str, one_of("learned", "balanced")]


@dataclass(frozen=True)
class TracedLayer:
    """The memory of a decoder layer of a library's model in a pass of TRACED_SEQUENCES of train.seq_len tokens.

    It is that of a CPU without other ranks. Parameters and their gradients are left out. Where layers differ, what is
    kept is the mean of all, and the moments are the fullest one's.
    """

    saved_bytes: int  # that forward keeps for backward, with its input if that is kept and without its output
    forward_bytes: int  # of all tensors at the worst moment of forward
    # The worst moments of backward, each with the bytes of saved or recomputed tensors, those of all others, the
    # elements of matrices whose gradients are complete, those of gradients that are not yet added to the parameters'
    # own, and whether one of them is added then.
    moments: tuple[tuple[int, ...], ...]


TRACED_SEQUENCES = 2  # as some operators copy tensors of several sequences


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
    # The tensor-parallel style of each module by its path: one of harness.layout.layer_spec.STYLES, or the library's
    # name of a style that is not supported.
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
    # What every tensor-parallel rank repeats by the plan: FLOPs of forward, of attention_recompute_flops, and of
    # checkpoint_recompute_flops.
    repeated_flops: tuple[int, ...] = (0, 0, 0)
    # The paths of all modules with parameters of their own, in the order in which forward runs them.
    modules_in_order: tuple[str, ...] = ()
    # The memory of a layer, by the bytes of an element and the checkpointing: `4 none`.
    traced_layers: dict[str, TracedLayer] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a transformer, and what its layers are made of."""

    name: str  # The name of the model, which is the value of the row's column `model`.
    family: Family  # The architecture: llama, gpt, moe, or hf for a model of the transformers library.
    hidden_size: Positive  # The size of the hidden states between layers.
    num_hidden_layers: Positive  # The number of decoder layers.
    num_attention_heads: Positive  # The number of query heads in each layer.
    num_key_value_heads: Positive  # The number of key and value heads, each shared by equally many query heads.
    intermediate_size: Positive  # The inner size of the MLP, or of each of its experts.
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
    head_dim: Positive | None = None  # The size of a head; null divides hidden_size by the number of query heads.
    num_experts: Natural = 0  # The number of experts in each layer, for families moe and hf.
    num_experts_per_tok: Natural = 0  # The number of experts that compute each token, for families moe and hf.
    norm_topk_prob: bool = True  # Whether the weights of a token's experts are divided by their sum.
    # The inner size of an MLP that computes every token beside its experts, for family moe; 0 for none.
    shared_expert_intermediate_size: Natural = 0
    # The coefficient of the loss that balances the loads of the experts of each sequence; 0 for none, for family moe.
    router_aux_loss_coef: float = 0.0
    # How tokens are given to experts: learned by the router, or balanced, in turn, to measure without uneven loads.
    routing: Routing = "learned"
    # The file or folder from which family hf takes its configuration.
    path: str | None = None
    # The trace of a model of family hf.
    hf_info: HFModelInfo | None = field(default=None, metadata={"old_key": "asked"})
    # The adapters that are trained in the place of all weights.
    adapter: AdapterConfig = field(default_factory=AdapterConfig)

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
        self._require_experts()
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        # Rotary position embedding rotates pairs of a head's elements.
        unit, even = (heads, "equal") if self.architecture.learned_positions else (2 * heads, "even")
        require(
            self.head_dim is not None or self.hidden_size % unit == 0,
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

    def _require_experts(self) -> None:
        """Raise UserError unless there are experts where the family has them, and a gradient for their router."""
        experts, of_token = self.num_experts, self.num_experts_per_tok
        if not self.architecture.has_experts:
            for key in (
                "num_experts",
                "num_experts_per_tok",
                "shared_expert_intermediate_size",
                "router_aux_loss_coef",
            ):
                value = getattr(self, key)
                require(value == 0, f"model.{key}", value, f"is not part of the {self.family} family: choose 0")
            return
        require(experts >= 1, "model.num_experts", experts, "is too few for family moe: choose 1 or more")
        rule = f"is not a number of experts of model.num_experts={experts}: choose 1 to {experts}"
        require(1 <= of_token <= experts, "model.num_experts_per_tok", of_token, rule)
        rule = "makes every weight 1 where a token has one expert, and the router has no gradient: choose false"
        require(of_token > 1 or not self.norm_topk_prob, "model.norm_topk_prob", self.norm_topk_prob, rule)
        coefficient, rule = self.router_aux_loss_coef, "must not be negative: choose 0 or more, such as 0.001"
        require(coefficient >= 0, "model.router_aux_loss_coef", coefficient, rule)

    @cached_property
    def architecture(self) -> Architecture:
        """The parts of a decoder layer; of a library's model those of the nearest family, by its MLPs."""
        info = self.hf_info
        if info is None:
            family = ARCHITECTURES[self.family]
            shared = SHARED_EXPERTS if self.shared_expert_intermediate_size else ()
            return replace(family, mlp=(*shared, *family.mlp))
        shapes = (shape for name, shape in info.shapes.items() if name.startswith(f"{info.layers[0]}."))
        inner = self.intermediate_size  # of each matrix, or of gate and up in one
        of_mlp = sum(max(inner in shape, 2 * (2 * inner in shape)) for shape in shapes if len(shape) > 1)
        has_gate = of_mlp >= GATED_MATRICES
        return ARCHITECTURES["moe" if self.num_experts else "llama" if has_gate else "gpt"]

    @property
    def head_size(self) -> int:
        """The size of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_width(self) -> int:
        """The size of all queries of a token."""
        return self.num_attention_heads * self.head_size
