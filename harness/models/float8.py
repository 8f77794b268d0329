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


class ScaledProducts:
    """An observer of one step's products of float8 matrices. Nothing waits for a device before least_range()."""

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()  # by recipe
        self.ranges: list[Tensor] = []  # of each operand, its largest magnitude as a share of its dtype's

    def observe(self, operands: Sequence[Any], flops: int) -> None:
        """Note a product of so many operations, if its operands are torchao's float8 tensors."""
        scaled = [each for each in operands if is_scaled(each)]
        recipes = {"tensorwise" if each._axiswise_dim is None else "rowwise" for each in scaled}
        self.flops.update({"+".join(sorted(recipes)): flops} if scaled else {})
        for data in (each._data for each in scaled if not isinstance(each._data, FakeTensor)):
            self.ranges.append(data.float().abs().max() / torch.finfo(data.dtype).max)

    def least_range(self) -> float | None:
        """Return the smallest share of its dtype's range that an operand fills; None where none has values."""
        return float(torch.stack(self.ranges).min()) if self.ranges else None
