"""Frozen matrices in NF4 by the library bitsandbytes, which packs and multiplies them on CPUs and GPUs."""

from typing import Any

from torch import Tensor, nn

from harness.config.model import ModelConfig
from harness.cost_model.quantized import BLOCK
from harness.layout.layer_spec import Matrix
from harness.tensors.storage import plain_values


def quantized_linear(model: ModelConfig, matrix: Matrix) -> nn.Linear:
    """Return a matrix's module, whose weight has the shape (out, in) until it is filled and packed."""
    from bitsandbytes.nn import Linear4bit

    linear: nn.Linear = Linear4bit(
        matrix.inputs,
        matrix.outputs,
        bias=model.architecture.biases,
        compress_statistics=model.adapter.double_quant,
        quant_type="nf4",
    )
    return linear


def packed(values: Tensor, double_quant: bool, module: nn.Module | None = None) -> Any:
    """Return a frozen parameter with values (out, in) packed to half a byte each, and its scales in `quant_state`.

    A pass makes it whole in the dtype of the values. The module that has the parameter keeps its scales, too.
    """
    from bitsandbytes.nn import Params4bit

    settings = {"blocksize": BLOCK, "compress_statistics": double_quant, "quant_type": "nf4", "module": module}
    return Params4bit(values, requires_grad=False, **settings).to(values.device)


def filled_like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a parameter with these values, packed if it is the weight of a quantized matrix."""
    if not hasattr(parameter, "bnb_quantized"):
        return nn.Parameter(values, parameter.requires_grad)
    weight: Any = parameter
    return packed(values, weight.compress_statistics, weight.module)  # type: ignore[no-any-return]


def as_stored(values: Tensor, parameter: Any, double_quant: bool) -> Tensor:
    """Return values as a parameter stores them: in its dtype, or as they are behind 4 bits and scales."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return values.to(parameter.dtype)
    return plain_values(packed(values.to(state.dtype), double_quant))
