"""The counts of a model's parameters, from its configuration alone."""

from functools import lru_cache

from harness.config.model import ModelConfig
from harness.layout.model_profile import model_profile
from harness.layout.shapes import Shapes, numel


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model; a tied embedding counts once."""
    return numel(model_profile(model).parameter_shapes)


@lru_cache(maxsize=128)
def layer_parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of one decoder layer; the first represents all of them."""
    return numel(_first_layer_shapes(model))


def _first_layer_shapes(model: ModelConfig) -> Shapes:
    profile = model_profile(model)
    return {name: shape for name, shape in profile.parameter_shapes.items() if profile.layer_index(name) == 0}
