"""Decoder layers as data: the operators of every family's layer, from which all that plans it is derived. No torch.

Shapes and parameters (harness.layout.layer_spec), operations, the tensors that forward keeps, the order in which
backward makes and frees them, and what tensor-parallel ranks send are readings of one table, architecture.toml.
"""

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.config.from_dict import from_dict

# What an operator is: a matrix whose outputs tensor-parallel ranks divide, or one whose inputs they divide and whose
# products they sum, an elementwise function, a rotation of heads by their positions, or the core of attention.
OperatorKind = Literal["column", "row", "function", "rotary", "attention"]


@dataclass(frozen=True)
class Operator:
    """An operator of a branch: it makes one tensor of others, which it keeps for backward, and may have a matrix.

    The tensor `input` is the output of the branch's norm, and the one without a name is added to the residual stream.
    """

    kind: OperatorKind
    output: str
    inputs: tuple[str, ...]
    matrix: str = ""


class Branch(NamedTuple):
    """A branch of a layer beside the residual stream: a norm, and operators in the order of forward, a row last."""

    name: str  # of its tensors
    module: str
    norm: str
    operators: tuple[Operator, ...]


_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


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


ATTENTION = [from_dict(Operator, row) for row in _TABLES["attention"]]
ARCHITECTURES = {name: from_dict(Architecture, facts, name) for name, facts in _TABLES["families"].items()}
