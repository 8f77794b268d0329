"""The facts about a model that its layout, its cost and its engines depend on, whichever code builds the model."""

from functools import lru_cache

from harness.config.model import ModelConfig
from harness.layout.decoder_profile import DecoderProfile
from harness.layout.hf_profile import HFProfile
from harness.layout.layer_spec import numel

# The parameters, operations and limits of a model. Parameters and modules go by their plain names in the whole model.
# Operations are floating-point operations of forward for a number of sequences of `seq_len` tokens.
ModelProfile = DecoderProfile | HFProfile


@lru_cache(maxsize=64)
def model_profile(model: ModelConfig) -> ModelProfile:
    """Return the profile of a model: the project's decoder, or a traced model of the transformers library."""
    return DecoderProfile(model) if model.hf_info is None else HFProfile(model, model.hf_info)


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model; a tied embedding counts once."""
    return numel(model_profile(model).parameter_shapes)


@lru_cache(maxsize=128)
def layer_parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of one decoder layer; the first represents all of them."""
    return numel(model_profile(model).layer_shapes)
