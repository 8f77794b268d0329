"""The profile of a model: both implementations answer alike for the same decoder."""

import dataclasses

import pytest

from harness.config.model import HFModelInfo, ModelConfig
from harness.layout.decoder_profile import DecoderProfile
from harness.layout.hf_profile import HFProfile
from harness.layout.model_profile import ModelProfile, model_profile
from tests.support.models import model_named

SEQUENCES, SEQ_LEN = 3, 64


def traced(model: ModelConfig) -> HFProfile:
    """Return the profile of a library's model that has the parameters and operations of the project's decoder."""
    decoder = DecoderProfile(model)
    layer, head = decoder.layer_flops(1, SEQ_LEN), decoder.head_flops(1, SEQ_LEN)
    forward, layers = (
        model.num_hidden_layers * layer + head,
        tuple(f"layers.{i}" for i in range(model.num_hidden_layers)),
    )
    scores = decoder.recomputed_score_flops(1, SEQ_LEN)
    modules = {name.rpartition(".")[0] for name in decoder.parameter_shapes}
    info = HFModelInfo(
        config={"model_type": "llama"},
        shapes=decoder.parameter_shapes,
        layers=layers,
        head="lm_head",
        tensor_plan={module: style for module in sorted(modules) if (style := decoder.tp_style(module))},
        not_recomputed_modules=tuple(f"{layer}.mlp.down_proj" for layer in layers),
        not_recomputed_are_linear=True,
        forward_flops=forward,
        layers_flops=forward - head,
        step_flops=3 * forward + scores,
        attention_recompute_flops=scores,
        checkpoint_recompute_flops=decoder.recompute_flops(len(layers), 1, SEQ_LEN, runs_to_end=False),
    )
    profile = model_profile(dataclasses.replace(model, hf_info=info))
    assert isinstance(profile, HFProfile)
    return profile


PROFILES: dict[str, ModelProfile] = {
    "tiny": model_profile(model_named("tiny")),
    "gpt_tiny": model_profile(model_named("gpt_tiny")),
    "tied": model_profile(dataclasses.replace(model_named("tiny"), tie_word_embeddings=True)),
    "traced": traced(model_named("tiny")),
}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_each_parameter_is_in_a_layer_the_embedding_or_the_head(profile: ModelProfile) -> None:
    shapes, ends = profile.parameter_shapes, profile.embedding_shapes | profile.head_shapes
    assert ends.items() <= shapes.items() and not profile.embedding_shapes.keys() & profile.head_shapes.keys()
    assert {name for name in shapes if profile.layer_index(name) is None} == ends.keys()


def test_a_traced_decoder_has_the_operations_and_styles_of_the_decoder() -> None:
    decoder, trace = DecoderProfile(model_named("tiny")), traced(model_named("tiny"))
    layers = range(model_named("tiny").num_hidden_layers + 1)
    for name, arguments in {
        "layer_flops": [(SEQUENCES, SEQ_LEN)],
        "head_flops": [(SEQUENCES, SEQ_LEN)],
        "recomputed_score_flops": [(SEQUENCES, SEQ_LEN)],
        "recompute_flops": [(count, SEQUENCES, SEQ_LEN, to_end) for count in layers for to_end in (False, True)],
        "tp_style": [(name.rpartition(".")[0],) for name in decoder.parameter_shapes],
        "recomputes_to_end": [(name.rpartition(".")[0],) for name in decoder.parameter_shapes],
        "layer_index": [(name,) for name in decoder.parameter_shapes],
    }.items():
        for each in arguments:
            assert getattr(trace, name)(*each) == getattr(decoder, name)(*each), (name, each)
    for profile in (trace, decoder):
        assert (profile.has_fused_attention_on_cpu, profile.has_biases) == (True, False)
