"""Sums of squares at the sizes of real gradients."""

import math

import pytest
import torch

from harness.tensors.fp32_sums import PIECE, sum_of_squares

TOLERANCE = 5e-6


@pytest.mark.parametrize("numel", [1, PIECE - 1, PIECE, PIECE + 1, 10**6 + 3, 10**7, 10**8])
@pytest.mark.parametrize("values", ["normal", "constant"])
def test_a_norm_is_accurate_at_any_size(numel: int, values: str) -> None:
    tensor = torch.full((numel,), 0.1)
    if values == "normal":
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    exact = math.fsum(float(part.double().square().sum()) for part in tensor.split(10**7))
    assert abs(float(sum_of_squares([tensor])) / exact - 1) < TOLERANCE


def test_the_norm_of_a_gradient_of_any_shape_and_type_counts_every_element_once() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((), (3, 5), (70, 61), (1, 2, 3, 4))]
    tensors += [torch.randn(40, 200, generator=generator).T, torch.randn(5000, generator=generator).bfloat16()]
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert abs(float(sum_of_squares(tensors)) / exact - 1) < TOLERANCE
