"""The model families match the published ones: logits equal transformers' on the same weights, and dropout works."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from harness.config.model import ModelConfig
from harness.cost_model.activations import block_tensors
from harness.cost_model.micro_batch_shape import MicroBatchShape
from harness.layout.layout import Layout, resolve_layout
from harness.models.activation_checkpoint import checkpoint_block
from harness.models.build import build_model
from harness.models.decoder import Decoder
from harness.models.dropout_rng import dropout_seed, rank_local_rng
from harness.models.init_weights import initial_value, materialize
from harness.probe import Probe
from harness.proof.deviations import differences
from harness.records.rank_report import RankReport
from tests.support.commands import assert_ok, compose_config, run_with
from tests.support.models import model_named

CPU = torch.device("cpu")

TOKENS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))


def model_with_random_biases(model: ModelConfig) -> Decoder:
    module = build_model(model)
    materialize(module, model, 0, CPU, torch.float32)
    with torch.no_grad():  # norms of 1 and biases of 0 would hide that they are where they belong
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)), alpha=0.1)
    return module


# --- the same model as the library's


@pytest.mark.parametrize("attention", ("flash", "eager"))
@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("groups", (1, 2, 4))
def test_our_llama_is_that_of_transformers(groups: int, tied: bool, attention: str) -> None:
    changes: dict[str, Any] = {"num_key_value_heads": groups, "tie_word_embeddings": tied, "attention": attention}
    model = dataclasses.replace(model_named("tiny"), rope_theta=5000.0, **changes)
    ours = model_with_random_biases(model)
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    config = transformers.LlamaConfig(
        **{key: getattr(model, key) for key in (*keys, "vocab_size", "tie_word_embeddings", "rms_norm_eps")},
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
    )
    theirs = transformers.LlamaForCausalLM(config).float()
    weights = {name if name.startswith("lm_head") else f"model.{name}": w for name, w in ours.state_dict().items()}
    theirs.load_state_dict(weights)
    logits = ours(TOKENS)
    assert logits.std() > 0.01
    torch.testing.assert_close(logits, theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("attention", ("flash", "eager"))
def test_our_gpt_is_gpt2_of_transformers(tied: bool, attention: str) -> None:
    model = dataclasses.replace(model_named("gpt_tiny"), tie_word_embeddings=tied, attention=attention)
    ours = model_with_random_biases(model)
    config = transformers.GPT2Config(
        n_embd=model.hidden_size,
        n_layer=model.num_hidden_layers,
        n_head=model.num_attention_heads,
        n_inner=model.intermediate_size,
        n_positions=model.context_length,
        vocab_size=model.vocab_size,
        tie_word_embeddings=tied,
        layer_norm_epsilon=model.layer_norm_epsilon,
    )
    theirs = transformers.GPT2LMHeadModel(config).float().eval()
    theirs.load_state_dict(as_gpt2(ours.state_dict(), model))
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


def as_gpt2(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Rename our parameters to GPT-2's, which has transposed matrices and one projection for query, key and value."""
    names = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj"}
    names |= {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    renamed = {f"transformer.ln_f.{leaf}": weights[f"norm.{leaf}"] for leaf in ("weight", "bias")}
    renamed |= {"transformer.wte.weight": weights["embed_tokens.weight"], "lm_head.weight": weights["lm_head.weight"]}
    renamed["transformer.wpe.weight"] = weights["embed_positions.weight"]
    for index in range(model.num_hidden_layers):
        for leaf in ("weight", "bias"):
            layer, theirs = f"layers.{index}.", f"transformer.h.{index}."
            for ours, name in names.items():
                renamed[f"{theirs}{name}.{leaf}"] = weights[f"{layer}{ours}.{leaf}"].t()
            parts = [weights[f"{layer}self_attn.{name}_proj.{leaf}"] for name in "qkv"]
            renamed[f"{theirs}attn.c_attn.{leaf}"] = torch.cat(parts).t()
    return renamed


def test_biases_start_at_zero_and_norms_at_one() -> None:
    model = model_named("gpt_tiny")
    for name, expected in (("norm.weight", 1.0), ("norm.bias", 0.0), ("layers.0.self_attn.q_proj.bias", 0.0)):
        assert initial_value(name, torch.Size((4,)), model, 0, CPU).eq(expected).all()


# --- dropout


def dropping(share: float = 0.5) -> Decoder:
    return model_with_random_biases(dataclasses.replace(model_named("gpt_tiny"), dropout=share))


def test_dropout_changes_the_output_and_keeps_its_scale() -> None:
    module = dropping()
    torch.manual_seed(0)
    first, second = module(TOKENS), module(TOKENS)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(module(TOKENS), first)
    torch.testing.assert_close(module.eval()(TOKENS), dropping(0.0)(TOKENS))


def test_a_recomputed_forward_drops_the_same_elements() -> None:
    """With checkpointing, gradients equal those without, also where attention has masks of the rank's own."""
    gradients = []
    for checkpointed in (False, True):
        module = dropping()
        for block in module.layers_by_index().values():
            block.self_attn.dropout_rng_rank = 1  # type: ignore[union-attr,assignment]
            if checkpointed:
                checkpoint_block(block, lambda: (nullcontext(), Probe().recompute()))
        torch.manual_seed(0)
        module(TOKENS, TOKENS).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, rtol=1e-6, atol=1e-9)


def test_tensor_parallel_ranks_drop_different_heads() -> None:
    drawn = []
    for rank in (0, 1, None):
        torch.manual_seed(0)
        with rank_local_rng(rank):
            inside = torch.rand(8)
        drawn.append((inside, torch.rand(8)))
    (first, after_first), (second, after_second), (shared, after_shared) = drawn
    assert not torch.equal(first, second) and not torch.equal(first, shared)
    assert torch.equal(after_first, after_second) and not torch.equal(after_first, after_shared)


def layout(**degrees: Any) -> Layout:
    strategy = dataclasses.replace(compose_config("strategy=single").strategy, data_parallel="fsdp", **degrees)
    return resolve_layout(strategy, 4)


def test_dropout_seeds_follow_the_layout() -> None:
    def groups(layout_of_ranks: Layout) -> list[int]:
        seeds = [dropout_seed(0, layout_of_ranks, rank) for rank in range(4)]
        return [seeds.index(seed) for seed in seeds]

    assert groups(layout(dp_shard=4)) == [0, 1, 2, 3] == groups(layout(pp=4)) == groups(layout(cp=4))
    assert groups(layout(tp=4)) == [0, 0, 0, 0]
    assert groups(layout(tp=4, sequence_parallel=True)) == [0, 1, 2, 3]
    assert groups(layout(tp=2, dp_shard=2)) == [0, 0, 2, 2]
    assert dropout_seed(0, layout(tp=4), 0) != dropout_seed(1, layout(tp=4), 0)


DROPPING = ("model=gpt_tiny", "model.dropout=0.1")

SHALLOW = ("strategy=tp", "checkpointing=full", "model.num_hidden_layers=2")


@pytest.mark.long
def test_dropout_is_repeatable_and_compared_without_checkpointing(results: Path) -> None:
    """Tensor-parallel ranks agree on what they share, or their norms and losses would differ."""
    records = [run_with(results, *DROPPING, *SHALLOW, f"force={force}") for force in ("false", "true")]
    for record in records:
        assert_ok(record.row)
        assert record.row["grad_deviation"] is not None and "none:" not in record.proof["reference"]
        assert record.row["activation_bytes"] == pytest.approx(record.row["predicted_activation_bytes"], rel=0.03)
    assert records[0].row["loss_last"] == records[1].row["loss_last"]
    plain = run_with(results, *DROPPING, *SHALLOW, "checkpointing=none")
    assert plain.row.get("grad_deviation") is None and "drops the same" in plain.proof["reference"]


def test_a_biases_gradient_is_relative_to_its_modules() -> None:
    """The gradient of a key's bias is only rounding; a gradient that is really wrong is still found."""

    def rank(bias: float) -> RankReport:
        entries = [["k.weight", [2], ((0, 2),), 1.0, 0.5], ["k.bias", [2], ((0, 2),), bias**2, bias]]
        moments = dict.fromkeys(("first_gradients", "first_moments", "last_gradients"), entries)
        return RankReport.from_json({"rank": 0, "losses": [1.0], "grad_norms": [1.0], **moments})

    def deviation(expected: float, bias: float) -> float:
        return max(difference.value for difference in differences(rank(expected), [rank(bias)], "float32"))

    assert deviation(1e-9, 3e-9) < 1e-8
    assert deviation(0.2, 0.1) == pytest.approx(0.1 / (1 + 0.2**2) ** 0.5)


# --- the paper's block


def test_activations_of_a_block_are_the_papers() -> None:
    """The figures are those of Korthikanti et al. (arXiv 2205.05198).

    They are sbh(34 + 5as/h) bytes a layer in 16 bit, and 14.9 GB in the example of 10B parameters.
    """
    model = dataclasses.replace(model_named("gpt_10b"), attention="eager", dropout=0.1)
    s, h, a = model.context_length, model.hidden_size, model.num_attention_heads
    paper = s * h * (34 + 5 * a * s / h)
    assert model.num_hidden_layers * paper == pytest.approx(14.9e9, rel=0.005)
    on_gpu = MicroBatchShape(model, 1, s, "bfloat16", "cuda")
    flash, without = (
        dataclasses.replace(on_gpu, model=dataclasses.replace(model, **change))
        for change in ({"attention": "flash"}, {"dropout": 0.0})
    )
    future = s * s  # the mask of what comes later
    for shape, size in (
        (on_gpu, paper + 2 * a * s * s + 16 * s + future),  # softmax in fp32, and norms' statistics
        (flash, 34 * s * h + 4 * a * s + 16 * s),
        (without, s * h * (32 + 6 * a * s / h) + 16 * s + future),
        (dataclasses.replace(on_gpu, tp=8), s * h * (10 + 24 / 8 + 7 * a * s / (8 * h)) + 16 * s + future),
        # On a CPU masks are as wide as what they drop.
        (dataclasses.replace(on_gpu, device="cpu"), s * h * (36 + 8 * a * s / h) + 8 * s + future),
    ):
        assert sum(block_tensors(shape).values()) == size, shape
