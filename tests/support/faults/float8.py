"""Trainings in which the scales of one rank's matrices are wrong, or its projections multiply otherwise."""

import dataclasses
from typing import Any

from tests.support.plant import replaces


@replaces("torchao.float8.float8_scaling_utils.tensor_to_scale", of_rank=1)
def doubled_amax(ordinary: Any, *arguments: Any, **keywords: Any) -> Any:
    """Scale matrices by half, as if their largest magnitude were twice as large."""
    return ordinary(*arguments, **keywords) / 2


@replaces("torchao.float8.float8_scaling_utils.tensor_to_scale", of_rank=1)
def clamped_values(ordinary: Any, *arguments: Any, **keywords: Any) -> Any:
    """Scale matrices by 16, so that their largest values are clamped."""
    return ordinary(*arguments, **keywords) * 16


@replaces("torchao.float8.float8_utils.tensor_to_amax")
def amax_of_own_shard(ordinary: Any, tensor: Any, _: bool = False, *arguments: Any, **keywords: Any) -> Any:
    """Scale the part of a gathered weight by its own largest magnitude, which the other ranks do not know."""
    return ordinary(tensor, False, *arguments, **keywords)


@replaces("harness.models.build.convert_projections", of_rank=1)
def unscaled_projections(ordinary: Any, decoder: Any, *arguments: Any) -> None:
    """Leave all projections in 16 bits."""


@replaces("harness.models.build.convert_projections", of_rank=1)
def one_unscaled_projection(ordinary: Any, decoder: Any, *arguments: Any) -> None:
    """Leave one projection of one layer in 16 bits."""
    own = decoder.layers["1"].mlp.down_proj
    ordinary(decoder, *arguments)
    decoder.layers["1"].mlp.down_proj = own


@replaces("harness.models.build.convert_projections")
def another_recipe(ordinary: Any, decoder: Any, precision: Any, *arguments: Any) -> None:
    """Scale by tensors where the run has rows, on all ranks."""
    ordinary(decoder, dataclasses.replace(precision, recipe="tensorwise"), *arguments)
