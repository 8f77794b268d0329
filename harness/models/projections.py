"""The matrices of a branch of a decoder layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.model import ModelConfig
from harness.layout.layer_spec import layer_matrices
from harness.models.grouped import GroupedLinear, Router
from harness.models.quantized import quantized_linear


class Projections(nn.Module):
    """A branch of a layer with the matrices that the layer's table (harness.config.model) has for it."""

    def __init__(self, model: ModelConfig, branch: str) -> None:
        super().__init__()
        for matrix in layer_matrices(model):
            path, _, name = matrix.path.rpartition(".")
            if path == branch and matrix.is_router:
                self.add_module(name, Router(matrix.inputs, matrix.outputs, bias=False))
            elif path == branch and matrix.experts:
                self.add_module(name, GroupedLinear(matrix.experts, matrix.inputs, matrix.outputs))
            elif path == branch and model.adapter.is_quantized:
                self.add_module(name, quantized_linear(model, matrix))
            elif path == branch:
                self.add_module(name, nn.Linear(matrix.inputs, matrix.outputs, bias=model.architecture.biases))


class SwiGLU(Projections):
    """An MLP with two widening matrices, one gated by SiLU of the other (arXiv 2002.05202), and a narrowing one."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[operator, no-any-return]
