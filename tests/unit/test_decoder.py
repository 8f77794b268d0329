"""The model is a causal decoder with every attention kernel, and starts the same under every layout."""

import dataclasses

import pytest
import torch
import yaml
from torch import Tensor

from harness.config.from_dict import from_dict
from harness.config.model import ModelConfig
from harness.models.build import build_model
from harness.models.decoder import Decoder, flash_attention
from harness.models.init_weights import initial_value, materialize
from tests.support.commands import ROOT

TINY: ModelConfig = from_dict(ModelConfig, yaml.safe_load((ROOT / "conf" / "model" / "tiny.yaml").read_text()))

CPU = torch.device("cpu")


def initialized_decoder(attention: str = "flash", tied: bool = False) -> Decoder:
    config = dataclasses.replace(TINY, attention=attention, tie_word_embeddings=tied)
    model = build_model(config)
    materialize(model, config, 0, CPU, torch.float32)
    return model


def tokens(seed: int) -> Tensor:
    return torch.randint(0, TINY.vocab_size, (2, 33), generator=torch.Generator().manual_seed(seed))


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
    value = initial_value("layers.0.mlp.up_proj.weight", shape, TINY, 0, CPU)
    assert torch.equal(value, initial_value("layers.0.mlp.up_proj.weight", shape, TINY, 0, CPU))
    assert not torch.equal(value, initial_value("layers.1.mlp.up_proj.weight", shape, TINY, 0, CPU))
    assert not torch.equal(value, initial_value("layers.0.mlp.up_proj.weight", shape, TINY, 1, CPU))


def test_attention_over_more_keys_is_compiled_as_one_graph() -> None:
    """A break at the mask would cut a compiled layer into pieces, which compile again in later steps."""
    query, keys = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 32, 16)
    expected = flash_attention(query, keys, keys)  # makes the mask, as context parallelism does beforehand
    compiled = torch.compile(flash_attention, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(query, keys, keys), expected)
