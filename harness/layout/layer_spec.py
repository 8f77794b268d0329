"""The matrices and parameters of a decoder layer by their shapes, and how tensor parallelism cuts them. No torch.

The styles are Megatron-LM's (arXiv 1909.08053): a column-parallel matrix computes its own outputs from the whole input,
and the row-parallel one behind it sums over the ranks; embedding and head are cut along the vocabulary. A gathered
matrix is column-parallel, and its output is made whole. Two styles have the names that transformers gives them: a
row-parallel matrix whose input is whole, of which each rank takes its part, and modules that every rank has whole.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from harness.config.model import Branch, ModelConfig

Shapes = dict[str, tuple[int, ...]]

# The dimension of a weight of shape (out, in) that each style cuts; a bias is cut as its outputs are. Of experts'
# weights, of shape (experts, out, in), it is the same of each expert.
MATRIX_DIMS = 2
SHARD_DIM = {"vocabulary": 0, "column": 0, "gathered": 0, "row": 1, "rowwise_split_input": 1}

# Styles of modules that every rank has whole, and which compute for this rank's heads: of all parameters each rank has
# a summand of the gradient, or of the last features of the output, which are latent attention's rotated keys.
WHOLE_PARAMETERS, WHOLE_KEYS = "replicated_with_grad_allreduce", "mla_kv_a_proj"
STYLES = (*SHARD_DIM, WHOLE_PARAMETERS, WHOLE_KEYS)


class Matrix(NamedTuple):
    """A matrix of a layer, in which tensor-parallel ranks have all of it if it has no style."""

    name: str
    path: str  # of its module in the layer
    outputs: int
    inputs: int
    style: str | None
    is_router: bool = False  # whether it scores experts
    experts: int = 0  # the number of experts that have a matrix each, stacked as one parameter; 0 for a single matrix
    uses: int = 1  # how often each token is multiplied: by so many experts
    rank: int = 0  # of its adapter; 0 where it has none

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its weight: (out, in), or (experts, out, in)."""
        return (self.experts, self.outputs, self.inputs) if self.experts else (self.outputs, self.inputs)

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def base_path(self) -> str:
        """The path of the module with its own weight, which peft wraps where it has an adapter."""
        return f"{self.path}.base_layer" if self.rank else self.path

    @property
    def adapter_shapes(self) -> Shapes:
        """The shapes of its adapter's two matrices by the names that peft gives them; none without an adapter."""
        shapes = {"lora_A": (self.rank, self.inputs), "lora_B": (self.outputs, self.rank)}
        return {f"{name}.default.weight": shape for name, shape in shapes.items() if self.rank}

    @property
    def cut_modules(self) -> list[str]:
        """The paths of the modules that tensor parallelism cuts by its style: with an adapter also one part of that."""
        parts = {"column": "lora_B.default", "row": "lora_A.default"}
        of_adapter = [self.base_path, f"{self.path}.{parts.get(self.style or '')}"] if self.rank else []
        return [self.path, *of_adapter]

    def products(self, tp: int = 1) -> dict[str, tuple[float, float]]:
        """Return the outputs and inputs of its own product and its adapter's, by name, on a tensor-parallel rank.

        The name of an adapter's first product is that of its result, which the second one keeps for backward.
        """
        outputs, inputs = self.cut(tp)
        of_adapter = {f"adapter.{self.name}": (self.rank, inputs), f"{self.name}.adapted": (outputs, self.rank)}
        return {self.name: (outputs, inputs)} | (of_adapter if self.rank else {})

    def cut(self, tp: int) -> tuple[float, float]:
        """Return the outputs and inputs that one of so many tensor-parallel ranks has, an even share."""
        sizes: list[float] = [self.outputs, self.inputs]
        if self.style is not None:
            sizes[SHARD_DIM[self.style]] /= tp
        return sizes[0], sizes[1]


def layer_branches(model: ModelConfig) -> tuple[Branch, ...]:
    """Return the branches of a layer."""
    return model.architecture.branches


@lru_cache(maxsize=64)
def layer_matrices(model: ModelConfig) -> tuple[Matrix, ...]:
    """Return the matrices of a layer in the order of forward."""
    sizes = dict.fromkeys(("input", "", "routed", "outputs"), model.hidden_size) | {"routing": model.num_experts}
    sizes |= dict.fromkeys(("shared_gate", "shared_up", "shared_product"), model.shared_expert_intermediate_size)
    sizes |= dict.fromkeys(("query", "output"), model.attention_width)
    sizes |= dict.fromkeys(("key", "value"), model.num_key_value_heads * model.head_size)
    return tuple(
        Matrix(
            operator.matrix,
            f"{branch.module}.{operator.matrix}",
            sizes.get(operator.output, model.intermediate_size),
            sizes.get(operator.inputs[0], model.intermediate_size),
            operator.kind if operator.kind in SHARD_DIM else None,
            operator.kind == "router",
            *((model.num_experts, model.num_experts_per_tok) if operator.is_grouped else (0, 1)),
            model.adapter.rank_of(operator.matrix),
        )
        for branch in layer_branches(model)
        for operator in branch.operators
        if operator.matrix
    )


def last_product(model: ModelConfig) -> str:
    """Return the name of the last product of a layer."""
    return next(reversed(layer_matrices(model)[-1].products()))


def norm_shapes(name: str, model: ModelConfig) -> Shapes:
    """Return the shapes of the parameters of a norm with this name."""
    weight: Shapes = {f"{name}.weight": (model.hidden_size,)}
    return weight | ({f"{name}.bias": (model.hidden_size,)} if model.architecture.norm == "layer" else {})


def projection_flops(model: ModelConfig, tokens: int, tp: int = 1) -> dict[str, int]:
    """Return the operations of each product of a layer's projections and their adapters, in the order of forward.

    They are those of `tp` ranks, all of which compute what is not cut: a router, and one of an adapter's products.
    """
    return {
        name: round(2 * tokens * matrix.uses * math.prod(shape) * tp)
        for matrix in layer_matrices(model)
        for name, shape in matrix.products(tp).items()
    }


def numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of elements of all these parameters together."""
    return sum(map(math.prod, shapes.values()))
