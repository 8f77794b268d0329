"""Projections that multiply in float8 by torchao (arXiv 2209.05433), and the observation of their products."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from harness.config.schema import PrecisionConfig
from harness.models.decoder import Decoder

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

SIGNIFICANDS = 16  # that a float8 value of four significant bits is a multiple of 1 / 16 between powers of two

SIGNIFICAND_ERROR = 1e-4  # of a scale in fp32, which leaves a value within some millionths of float8


def convert_projections(decoder: Decoder, precision: PrecisionConfig, device: torch.device) -> None:
    """Let the linear projections of all layers multiply in float8, in place; a CPU emulates the products in fp32.

    Embedding, head and routers multiply as before. Parameters keep names and dtypes: their copies are cast where they
    are multiplied.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(precision.recipe),
        emulate=device.type != "cuda",
        enable_fsdp_float8_all_gather=precision.float8_all_gather,
    )
    for block in decoder.layers_by_index().values():
        convert_to_float8_training(block, config=recipe, module_filter_fn=lambda part, _: type(part) is nn.Linear)


def is_scaled(tensor: Any) -> bool:
    """Return whether a tensor is one of torchao's with float8 values and their scale."""
    return hasattr(tensor, "_axiswise_dim")


def emulates_products(model: nn.Module) -> bool:
    """Return whether projections of a model multiply in float8 by torchao's emulation."""
    return any(getattr(getattr(part, "config", None), "emulate", False) for part in model.modules())


def recipe_of_values(operands: Sequence[Tensor]) -> str:
    """Return the recipe whose scales bring all values of both operands to float8; empty where none does.

    A compiled emulation widens its float8 matrices to fp32, so that only values tell. Float8 has at most four
    significant bits: rows are scaled by powers of two, which leave them as they are, and a whole matrix by any number,
    by which its largest magnitude comes to one of eight significands. Some numbers are powers of two, too.
    """
    wide = [operand.double() for operand in operands]
    if all(map(_has_few_bits, wide)):
        return "rowwise"
    shares = [values / values.abs().max().clamp(min=torch.finfo(torch.float32).tiny) for values in wide]
    is_scaled = (any(_has_few_bits(part * largest) for largest in range(8, SIGNIFICANDS)) for part in shares)
    return "tensorwise" if all(is_scaled) else ""


def _has_few_bits(values: Tensor) -> bool:
    significands = SIGNIFICANDS * torch.frexp(values).mantissa
    return bool((significands - significands.round()).abs().max() < SIGNIFICAND_ERROR)


class ScaledProducts:
    """An observer of one step's products of float8 matrices. Operators one by one wait for no device before the end."""

    def __init__(self, model: nn.Module) -> None:
        self.emulates = emulates_products(model)
        self.counts: Counter[str] = Counter()  # of operations by recipe
        self.by_values: Counter[str] = Counter()  # the same of compiled emulations
        self.ranges: list[Tensor] = []  # of each operand, its largest magnitude as a share of its dtype's

    def observe(self, operands: Sequence[Any], flops: int) -> None:
        """Note a product of so many operations, if its operands are float8 matrices.

        They are torchao's tensors, in compiled code on a device float8 matrices and their scales, and in compiled
        emulations fp32 matrices of float8 values, whose scales are not known.
        """
        tensors = [each for each in operands[:2] if isinstance(each, Tensor)]
        scaled = [each for each in operands if is_scaled(each)]
        if scaled:
            recipes = {"tensorwise" if each._axiswise_dim is None else "rowwise" for each in scaled}
            self._count("+".join(sorted(recipes)), [each._data for each in scaled], flops)
        elif any(each.dtype in FLOAT8 for each in tensors):  # torchao may scale the product of rows itself
            own = float(operands[2]) if operands[2].numel() == 1 else 1.0
            self._count("rowwise" if own == 1.0 else "tensorwise", tensors, flops)
        elif self.emulates and all(each.dtype == torch.float32 for each in tensors):
            recipe = recipe_of_values(tensors)
            self.by_values.update({recipe: flops} if recipe else {})

    def _count(self, recipe: str, matrices: Sequence[Tensor], flops: int) -> None:
        self.counts[recipe] += flops
        for data in (each for each in matrices if not isinstance(each, FakeTensor)):
            self.ranges.append(data.float().abs().max() / torch.finfo(data.dtype).max)

    def flops(self) -> dict[str, int]:
        """Return the operations by recipe. Powers of two, among other numbers, are the scales of whole matrices."""
        values = self.by_values
        if values["tensorwise"]:
            values = Counter({"tensorwise": values.total()})
        return dict(self.counts + values)

    def least_range(self) -> float | None:
        """Return the smallest share of its dtype's range that an operand fills; None where none has values."""
        return float(torch.stack(self.ranges).min()) if self.ranges else None
