"""Models: causal decoders that start the same under every layout, profiles that answer alike, and stated sizes."""

import dataclasses

import pytest
import torch
from torch import Tensor

from harness.config.locations import files_in
from harness.config.model import HFModelInfo
from harness.config.schema import RunConfig
from harness.cost_model.expert_communication import balanced_rows
from harness.cost_model.flops import operations, takes_fused_kernel
from harness.layout.model_profile import ModelProfile, model_profile, parameter_count
from harness.models.build import build_model
from harness.models.decoder import Decoder, flash_attention
from harness.models.init_weights import initial_value, materialize
from harness.models.mixture import MixtureOfExperts
from tests.support.commands import compose_config
from tests.support.models import model_named

OWN = compose_config("model=tiny", "train.global_batch=3")

CPU = torch.device("cpu")


def initialized_decoder(attention: str = "flash", tied: bool = False) -> Decoder:
    config = dataclasses.replace(OWN.model, attention=attention, tie_word_embeddings=tied)
    model = build_model(config)
    materialize(model, config, 0, CPU, torch.float32)
    return model


def tokens(seed: int) -> Tensor:
    return torch.randint(0, OWN.model.vocab_size, (2, 33), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_attention_is_causal(attention: str) -> None:
    model, first, second = initialized_decoder(attention), tokens(1), tokens(2)
    mixed = torch.cat((first[:, :20], second[:, 20:]), dim=1)
    torch.testing.assert_close(model(mixed)[:, :20], model(first)[:, :20])
    assert not torch.allclose(model(mixed)[:, 20:], model(first)[:, 20:])


def test_logits_depend_on_the_order_of_tokens() -> None:
    """Without positions the last token's logits would not change with the order of those before it."""
    model, first = initialized_decoder(), tokens(1)
    swapped = first.clone()
    swapped[:, [3, 7]] = first[:, [7, 3]]
    assert (model(swapped)[:, -1] - model(first)[:, -1]).abs().max() > 1e-4


def test_attention_kernels_compute_the_same_logits() -> None:
    torch.testing.assert_close(
        initialized_decoder("flash")(tokens(1)), initialized_decoder("eager")(tokens(1)), rtol=1e-4, atol=1e-5
    )


def test_tied_weights_are_the_same_parameter() -> None:
    model = initialized_decoder(tied=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_initial_values_depend_only_on_seed_and_name() -> None:
    shape = torch.Size((8, 4))
    value = initial_value("layers.0.mlp.up_proj.weight", shape, OWN.model, 0, CPU)
    assert torch.equal(value, initial_value("layers.0.mlp.up_proj.weight", shape, OWN.model, 0, CPU))
    assert not torch.equal(value, initial_value("layers.1.mlp.up_proj.weight", shape, OWN.model, 0, CPU))
    assert not torch.equal(value, initial_value("layers.0.mlp.up_proj.weight", shape, OWN.model, 1, CPU))


def test_attention_over_more_keys_is_compiled_as_one_graph() -> None:
    """A break at the mask would cut a compiled layer into pieces, which compile again in later steps."""
    query, keys = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 32, 16)
    expected = flash_attention(query, keys, keys)  # makes the mask, as context parallelism does beforehand
    compiled = torch.compile(flash_attention, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(query, keys, keys), expected)


def traced(config: RunConfig) -> RunConfig:
    """Return a configuration with a library's model that has the parameters and operations of the project's decoder."""
    one = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=1))
    own, profile = operations(one), model_profile(config.model)
    info = HFModelInfo(
        config={"model_type": "llama"},
        shapes=profile.parameter_shapes,
        layers=profile.layers,
        head="lm_head",
        tensor_plan=dict(profile.tensor_plan),
        not_recomputed_modules=tuple(f"{layer}.mlp.down_proj" for layer in profile.layers),
        not_recomputed_are_linear=True,
        forward_flops=own.layers + own.head,
        layers_flops=own.layers,
        step_flops=3 * (own.layers + own.head) + own.scores,
        attention_recompute_flops=own.scores,
        checkpoint_recompute_flops=own.recomputed,
    )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, hf_info=info))


PROFILES: dict[str, ModelProfile] = {
    "tiny": model_profile(OWN.model),
    "gpt_tiny": model_profile(model_named("gpt_tiny")),
    "tied": model_profile(dataclasses.replace(OWN.model, tie_word_embeddings=True)),
    "traced": model_profile(traced(OWN).model),
}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_each_parameter_is_in_a_layer_the_embedding_or_the_head(profile: ModelProfile) -> None:
    shapes, ends = profile.parameter_shapes, profile.embedding_shapes | profile.head_shapes
    assert ends.items() <= shapes.items() and not profile.embedding_shapes.keys() & profile.head_shapes.keys()
    assert {name for name in shapes if profile.layer_index(name) is None} == ends.keys()


def test_a_traced_decoder_has_the_operations_and_matrices_of_the_decoder() -> None:
    library, own, trace = traced(OWN), PROFILES["tiny"], PROFILES["traced"]
    assert operations(library) == operations(OWN) and takes_fused_kernel(library, "cpu")
    for name in ("layer_shapes", "layer_matrices", "tensor_plan", "has_biases"):
        assert getattr(trace, name) == getattr(own, name)
    for name in own.parameter_shapes:
        module = name.rpartition(".")[0]
        assert trace.recomputes_to_end(module) == own.recomputes_to_end(module) == (not module.endswith("down_proj"))
        assert trace.layer_index(name) == own.layer_index(name)


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


@pytest.mark.parametrize(("tokens", "experts", "uses", "ranks"), [(7, 9, 2, 3), (128, 8, 2, 4), (5, 6, 4, 2)])
def test_balanced_routing_gives_each_expert_its_turn(tokens: int, experts: int, uses: int, ranks: int) -> None:
    """The rows that plans and simulations send are those of the model, also where experts have unequal numbers."""
    sizes = (f"model.num_experts={experts}", f"model.num_experts_per_tok={uses}", "model.routing=balanced")
    config = compose_config("model=moe_tiny", *sizes)
    mixture = MixtureOfExperts(config.model, "mlp")
    _, chosen = mixture.route(torch.randn(tokens, config.model.hidden_size), 1)
    owners = (chosen.flatten() // (experts // ranks)).bincount(minlength=ranks)
    assert owners.tolist() == balanced_rows(tokens * uses, experts, ranks)
    assert chosen.sort().values.diff().ne(0).all(), "an expert has a token once"


def test_the_balancing_loss_of_sequences_is_the_published_one() -> None:
    """Gradients with the injected loss are those of the model's output and the formula of DeepSeek-V2, eq. 12."""
    model = compose_config("model=moe_tiny", "model.router_aux_loss_coef=0.01").model
    decoder = build_model(model)
    materialize(decoder, model, 0, CPU, torch.float32)
    mixture = decoder.layers_by_index()[0].get_submodule("mlp")
    hidden = torch.randn(3, 40, model.hidden_size, requires_grad=True)
    probabilities = (hidden.flatten(0, 1) @ mixture.get_parameter("gate.weight").t()).softmax(-1).view(3, 40, -1)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(model.num_experts_per_tok).indices, 1)
    shares = chosen.mean(1) * model.num_experts / model.num_experts_per_tok
    loss = 0.05 * (shares * probabilities.mean(1)).sum()
    wanted = [hidden, mixture.get_parameter("gate.weight")]
    explicit = torch.autograd.grad(mixture(hidden).sum() + loss, wanted)
    without = torch.autograd.grad(mixture(hidden).sum(), wanted)
    decoder.balance_experts(0.05)
    injected = torch.autograd.grad(mixture(hidden).sum(), wanted)
    for of_loss, of_none, of_injected in zip(explicit, without, injected, strict=True):
        torch.testing.assert_close(of_injected, of_loss, rtol=1e-4, atol=1e-7)
        assert not torch.allclose(of_injected, of_none, rtol=1e-4, atol=1e-7)
