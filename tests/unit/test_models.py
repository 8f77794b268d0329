"""Models: both profiles answer alike for the same decoder, and each prepared model has the parameters it states."""

import dataclasses

import pytest

from harness.config.locations import files_in
from harness.config.model import HFModelInfo, ModelConfig
from harness.layout.decoder_profile import DecoderProfile
from harness.layout.hf_profile import HFProfile
from harness.layout.model_profile import ModelProfile, model_profile, parameter_count
from harness.models.build import build_model
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


# --- prepared models

NAMES = sorted(files_in("model").keys() - {"hf"})  # of which the size is its own

# The published counts of these models, so that a wrong size in a YAML cannot hide behind a count computed from it.
KNOWN = {
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "7b": 6_738_415_616,
    "8b": 8_030_261_248,
    "13b": 13_015_864_320,
    "30b": 32_528_943_616,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
}

# Models named by their counts in published tables: GPT-3's and Megatron's agree to the digits given, MPT's to a tenth.
ROUND = {
    "gpt_125m": 125e6,
    "gpt_350m": 356e6,
    "gpt_760m": 760e6,
    "gpt_1.3b": 1.3e9,
    "gpt_2.7b": 2.7e9,
    "gpt_6.7b": 6.7e9,
    "gpt_13b": 13e9,
    "gpt_175b": 175e9,
    "gpt_10b": 10e9,
    "gpt_22b": 22e9,
    "gpt_530b": 530e9,
    "gpt_1t": 1e12,
    "mpt_1b": 1.3e9,
    "mpt_3b": 2.7e9,
    "mpt_7b": 6.7e9,
    "mpt_13b": 13e9,
    "mpt_30b": 30e9,
    "mpt_70b": 65e9,
}


def test_the_prepared_models_exist() -> None:
    assert {"tiny", "125m", "350m", "10b", *KNOWN} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_stated_parameter_count_is_that_of_the_built_module(name: str) -> None:
    model = model_named(name)
    assert model.name == name and model.source
    module = build_model(model)
    built = sum(parameter.numel() for parameter in module.parameters())  # parameters() yields a tied weight once
    assert model.parameters == built == parameter_count(model)


@pytest.mark.parametrize(("name", "count"), KNOWN.items())
def test_stated_parameter_count_is_the_published_one(name: str, count: int) -> None:
    assert model_named(name).parameters == count


@pytest.mark.parametrize(("name", "count"), ROUND.items())
def test_stated_parameter_count_rounds_to_the_published_one(name: str, count: float) -> None:
    model = model_named(name)
    assert model.family == "gpt" and model.intermediate_size == 4 * model.hidden_size
    assert model.parameters == pytest.approx(count, rel=0.02)


def test_tiny_is_small_yet_divisible() -> None:
    tiny = model_named("tiny")
    assert tiny.num_hidden_layers >= 4 and tiny.num_attention_heads >= 4 and tiny.num_key_value_heads == 2
    assert 300_000 < tiny.parameters < 700_000 and tiny.vocab_size == 256
