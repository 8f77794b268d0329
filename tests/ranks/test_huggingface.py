"""Models of transformers from a local config.json: inspected once, trained like ours, and proven by that inspection."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from harness.config.command import read_run_config
from harness.config.fingerprint import make_run_id
from harness.config.model import HFModelInfo
from harness.config.schema import RunConfig
from harness.cost_model.flops import executed_flops, model_flops, takes_fused_kernel
from harness.cost_model.memory import estimate_memory
from harness.cost_model.shard_groups import local_parameter_count
from harness.engines.base import load_engine
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import resolve_layout
from harness.layout.model_profile import active_parameter_count, model_profile, parameter_count
from harness.layout.partition import local_numel, whole_model
from harness.layout.state_widths import StateWidths
from harness.models import hf
from harness.models.build import build_model
from harness.models.init_weights import materialize
from harness.proof.step import flops_problems
from harness.records.rank_report import RankReport
from harness.records.schema import Record
from harness.report.claims import claims
from harness.report.lines import lines_of
from harness.runner.config_columns import config_columns
from harness.runner.resolve import resolve_run_config
from harness.simulator.process import StepRequest
from harness.util.text import UserError
from tests.support import commands, faults
from tests.support.commands import Entry, Harness, assert_not_proven, assert_ok, compose_config, long
from tests.support.models import model_named
from tests.support.simulated_steps import simulate_steps

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}

COMMON = SIZES | {"intermediate_size": 128, "max_position_embeddings": 128}

MODELS: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"num_key_value_heads": 2},
    "qwen2": COMMON | {"num_key_value_heads": 2},  # biases of q, k and v
    "qwen3": COMMON | {"num_key_value_heads": 2, "head_dim": 16},  # norms of queries and keys
    "phi3": COMMON | {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1},  # fused; the attention is whole
    "glm4": COMMON | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},  # a fused MLP
    "olmo2": COMMON | {"num_key_value_heads": 2},  # norms of all queries and keys, so that the attention is whole
    "minicpm3": COMMON  # latent attention
    | {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "qwen3_5_text": COMMON  # layers whose attention is whole, and others whose is not
    | {"num_key_value_heads": 2, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "gemma": COMMON | {"num_key_value_heads": 2, "head_dim": 16},  # tied, and scaled by a buffer
    "gpt_neox": COMMON,  # one matrix for q, k and v; attention beside the MLP
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320, "n_positions": 128},  # drops 0.1; no plan
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320, "n_positions": 128, "rotary_dim": 8},
    "opt": COMMON | {"ffn_dim": 128, "word_embed_proj_dim": 64},
}

# The tensors that tensor-parallel ranks divide of models which repeat others: attention, or a fused MLP.
CUT = {"phi3": set(), "glm4": {"heads"}, "olmo2": {"inner"}, "qwen3_5_text": {"inner"}}

SPARSE = COMMON | {"num_key_value_heads": 2, "num_experts_per_tok": 2}

MODELS |= {
    "mixtral": SPARSE | {"num_local_experts": 8},
    "qwen3_moe": SPARSE | {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 16, "norm_topk_prob": True},
    "olmoe": SPARSE | {"num_experts": 8, "pad_token_id": 0, "eos_token_id": 1},
    # A shared expert beside those of the router.
    "qwen2_moe": SPARSE | {"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
}

MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe")

BATCH = ("train.global_batch=4", "train.micro_batch=2", "train.seq_len=32", "train.steps=1", "train.warmup_steps=2")


def folder(root: Path, kind: str, **changes: Any) -> Path:
    """Return a model's folder with its config.json."""
    path = root / f"small-{kind}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": kind} | MODELS[kind] | changes))
    return path


def config_of(path: Path, *overrides: str) -> RunConfig:
    return compose_config("model=hf", f"model.path={path}", *BATCH, *overrides)


@pytest.fixture(scope="module", autouse=True)
def traced() -> Iterator[None]:
    """Trace each model that tests share once: that takes a second, and the configurations of a file are many."""
    trace, known = hf.trace_model, dict[tuple[str, ...], HFModelInfo]()

    def trace_once(config: Any, attention: str, seq_len: int, path: object) -> HFModelInfo:
        key = (config.to_json_string(), attention, str(seq_len), str(path))
        return known.get(key) or known.setdefault(key, trace(config, attention, seq_len, path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "trace_model", trace_once)
        yield


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_equals_the_librarys(results: Path, kind: str) -> None:
    """Shapes are the library's, and so are the buffers that no checkpoint has: rotary frequencies, sines, scales."""
    attention = "eager" if kind == "gptj" else "flash"
    model = config_of(folder(results, kind), f"model.attention={attention}").model
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **MODELS[kind]))
    assert model_profile(model).parameter_shapes == {
        name: tuple(weight.shape) for name, weight in theirs.named_parameters()
    }
    assert parameter_count(model) == sum(weight.numel() for weight in theirs.parameters()) == model.parameters
    ours = build_model(model)
    assert all(parameter.is_meta for parameter in ours.parameters())
    materialize(ours, model, 0, torch.device("cpu"), torch.float32)
    buffers = dict(theirs.named_buffers())
    assert dict(ours.named_buffers()).keys() == buffers.keys()
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, buffers[name]) and buffer.abs().sum() > 0
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.arange(24).view(1, 24)
    torch.testing.assert_close(ours.eval()(tokens), theirs.eval()(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ("flash", "eager"))
@pytest.mark.parametrize("checkpointing", ("none", "full"))
def test_operations_of_a_library_model_are_those_of_our_formula(
    results: Path, attention: str, checkpointing: str
) -> None:
    """The library's llama does as many operations as ours, also when recomputing and in a fused kernel's backward."""
    both = (f"model.attention={attention}", f"checkpointing={checkpointing}", "strategy=single")
    library = config_of(folder(results, "llama"), *both)
    same = dataclasses.replace(
        model_named("tiny"), **SIZES, intermediate_size=128, num_key_value_heads=2, attention=attention
    )
    ours = dataclasses.replace(library, model=same)
    alone = resolve_layout(library.strategy, 1)
    assert model_flops(library) == model_flops(ours)
    assert executed_flops(library, alone) == executed_flops(ours, alone)
    assert executed_flops(library, alone, recomputes_last_projection=True) == executed_flops(ours, alone, "cpu", True)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        long("llama", "strategy=tp checkpointing=full"),
        ("llama", "strategy=tp checkpointing=every_n checkpointing.every=2"),
        long("gpt_neox", "strategy=tp precision=bf16_mixed"),
        long(
            "qwen2",
            "strategy=fsdp_full_shard precision=bf16_mixed checkpointing=full",
        ),
        long("gpt2", "strategy=zero3 checkpointing=full model.dropout=0"),
        long("gemma", "strategy=fsdp_shard_grad_op"),
        long("gpt2", "strategy=ddp checkpointing=full"),
        long("qwen3", "strategy=zero3"),
        ("phi3", "strategy=fsdp_full_shard precision=bf16_mixed checkpointing=full"),
        long("qwen3", "strategy=fsdp_tp strategy.tp=2 world_size=4 model.tie_word_embeddings=true"),
        long("phi3", "strategy=tp checkpointing=full"),
        long("gemma", "strategy=tp"),
        long("minicpm3", "strategy=tp checkpointing=full"),
        long("phi3", "strategy=tp world_size=4"),
        long("olmo2", "strategy=tp world_size=4"),
        long("minicpm3", "strategy=fsdp_tp strategy.tp=2 world_size=4"),
        long("minicpm3", "strategy=tp world_size=4"),
        long("qwen3_5_text", "strategy=tp checkpointing=full"),
        long("glm4", "strategy=tp precision=bf16_mixed"),
        long("mixtral", "strategy=zero3 checkpointing=full"),
        ("qwen3_moe", "strategy=ddp precision=bf16_mixed checkpointing=selective"),
        long("olmoe", "strategy=fsdp_full_shard checkpointing=selective"),
        long("qwen2_moe", "strategy=zero1"),
        long("mixtral", "strategy=fsdp_hybrid_shard strategy.dp_replicate=2 world_size=4 train.global_batch=8"),
    ],
)
def test_a_run_is_proven(results: Path, kind: str, overrides: str) -> None:
    record = run_with(results, kind, *overrides.split())
    row = record.row
    assert_ok(row)
    assert row["model"] == f"small-{kind}" and row["parameters"] == record.config["model"]["parameters"]
    drops = kind == "gpt2" and "dropout" not in overrides
    assert record.config["model"]["dropout"] == (0.1 if drops else 0)
    assert row["loss_deviation"] < (0 if drops else 1e-3 if "bf16" in overrides else 1e-4) or row["loss_deviation"] == 0
    bound = 0.2 if "fsdp" in overrides else 0.1 if row["tp"] > 1 else 0.05  # gloo frees copies late
    assert row["predicted_peak_bytes"] / row["peak_allocated_bytes"] == pytest.approx(1, abs=bound)
    assert row["predicted_activation_bytes"] is None
    assert ("active_parameters" in row) == (kind in MIXTURES)
    assert (row["expert_load"] is not None) == (kind in MIXTURES)
    stored = read_run_config(record.config)  # a report needs neither the library nor the path
    assert model_flops(stored) == row["model_flops"]
    layout = resolve_layout(stored.strategy, row["world_size"])
    if layout.tp > 1:
        estimate = estimate_memory(stored, layout, load_engine("torch").state_widths(stored, layout), "cpu")
        assert row["parameter_bytes"] == estimate.parameter_bytes and row["optimizer_bytes"] == estimate.optimizer_bytes


@pytest.mark.parametrize("kind", [*CUT, "minicpm3", "gpt_neox"])
def test_a_plan_divides_what_the_ranks_do(results: Path, kind: str) -> None:
    """No library's head leaves logits divided. What a formula lacks of the trace is whole on each rank."""
    config = config_of(folder(results, kind), "strategy=tp")
    assert model_profile(config.model).cut_tensors == CUT.get(kind, {"heads", "inner"})
    peaks = {}
    for ranks in (1, 2):
        layout = resolve_layout(config.strategy, ranks)
        peaks[ranks] = estimate_memory(config, layout, StateWidths(0, 0, 0, 0, 0), "cpu").activation_bytes
    assert (peaks[2] < peaks[1]) == bool(CUT.get(kind, {"heads"}))


def run_with(results: Path, kind: str, *overrides: str, **entry: Entry) -> Record:
    return commands.run_with(results, "model=hf", f"model.path={folder(results, kind)}", *BATCH, *overrides, **entry)


@pytest.mark.parametrize("kind", ("llama", "qwen2", "gpt_neox"))
def test_a_tensor_parallel_rank_holds_its_share_of_every_layer(results: Path, kind: str) -> None:
    """The proof of shards checks this, so the claim on parameters holds, but not for a model whose layers are whole."""
    config = config_of(folder(results, kind), "strategy=tp")
    layout, model = resolve_layout(config.strategy, 2), config.model
    own = int(sum(local_numel(model, layout, whole_model(model)).values()))
    layers = [
        shape
        for name, shape in model_profile(model).parameter_shapes.items()
        if model_profile(model).layer_index(name) is not None
    ]
    assert own < parameter_count(model) - sum(math.prod(shape) for shape in layers if len(shape) == 2) / 2 + 1
    assert local_parameter_count(model, whole_model(model), 2, 2) == own
    widths = load_engine("torch").state_widths(config, layout)
    assert estimate_memory(config, layout, widths, "cpu").parameter_bytes == 4 * own

    def verdicts(elements: int) -> list[bool]:
        single = config_of(folder(results, kind), "strategy=single")
        sizes = ((config, layout, elements), (single, resolve_layout(single.strategy, 1), parameter_count(model)))
        records = [
            Record(
                config_columns(config_, layout_)
                | {"run_id": str(layout_.tp), "status": "ok", "parameter_bytes": 4 * size},
                config_.to_dict(),
                layout_.to_dict(),
            )
            for config_, layout_, size in sizes
        ]
        return [
            claim.agrees
            for claim in claims(lines_of(records))
            if claim.required and claim.claim.startswith("parameters")
        ]

    assert verdicts(own) == [True] and verdicts(parameter_count(model)) == [False]


def test_the_observed_attention_kernel_decides_the_expected_operations(results: Path) -> None:
    """The model is inspected on a CPU and run on a GPU, where a fused kernel drops and other kernels may be chosen."""
    for kind, is_fused in (("llama", True), ("gpt2", False)):
        config = config_of(folder(results, kind), "strategy=single")
        layout, scores = (
            resolve_layout(config.strategy, 1),
            2 * 2 * 32**2 * 64 * 4,
        )  # a product of each layer, four sequences
        assert takes_fused_kernel(config, "cpu") == is_fused
        expected = {"composed": model_flops(config), "flash": model_flops(config) + scores}
        assert expected[["composed", "flash"][is_fused]] == 4 * config.model.hf_info.step_flops
        for kernel, flops in expected.items():
            for reported in expected:
                profiled = {"flops": flops, "attention_kernels": [reported]}
                ranks = [RankReport.from_json({"devices": 1, "profiled": profiled})]
                assert any(flops_problems(config, layout, StateWidths(4, 4, 4, 8, 4), ranks)) == (reported != kernel)


@pytest.mark.long
def test_grouped_heads_run_as_a_fused_kernel_on_cuda(tmp_path: Path) -> None:
    """In fp32 no fused kernel takes groups, and the library's own rule (use_gqa_in_sdpa) asks for none of them."""
    path, small = folder(tmp_path, "llama"), ("train.global_batch=1", "train.micro_batch=1")
    cases = {"strategy=tp checkpointing=full precision=fp32": 2, "strategy=single precision=bf16_mixed": 1}
    configs = [config_of(path, *small, *overrides.split()) for overrides in cases]
    layouts = [resolve_layout(config.strategy, ranks) for config, ranks in zip(configs, cases.values(), strict=True)]
    requests = [StepRequest(config, layout) for config, layout in zip(configs, layouts, strict=True)]
    reports = simulate_steps(requests)
    assert [report.traceback for report in reports] == ["", ""]
    # Of the kernels that take groups torch prefers cuDNN's on Hopper.
    assert [report.profiled.attention_kernels for report in reports] == [["efficient"], ["cudnn"]]
    for config, layout, report in zip(configs, layouts, reports, strict=True):
        assert layout.world_size * report.profiled.flops == executed_flops(config, layout, "cuda")


@pytest.mark.long
@pytest.mark.parametrize("kind", ("llama", "qwen2", "qwen3", "phi3", "gpt_neox", "gpt2", "gptj"))
@pytest.mark.parametrize("checkpointing", ("none", "full"))
@pytest.mark.parametrize("precision", ("fp32", "bf16_mixed"))
def test_every_layout_is_proven(results: Path, kind: str, checkpointing: str, precision: str) -> None:
    strategies = ["ddp", "zero1", "zero2", "zero3", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_no_shard"]
    strategies += ["tp"] if kind not in ("gpt2", "gptj") else []
    for strategy in strategies:
        options = [
            f"strategy={strategy}",
            f"checkpointing={checkpointing}",
            f"precision={precision}",
            "model.dropout=0",
        ]
        options += ["model.attention=eager"] if kind == "gptj" else []
        row = run_with(results, kind, *options).row
        assert_ok(row)


@pytest.mark.parametrize(
    ("kind", "fault", "overrides", "problem"),
    [
        ("llama", faults.rows_not_summed, "strategy=tp", "0.69 x the"),
        ("llama", faults.layer_of_library_twice, "strategy=ddp", "a step ran"),
        ("qwen3", faults.whole_parameters_apart, "strategy=tp", "gradient deviates"),
        long("minicpm3", faults.rotated_keys_apart, "strategy=tp", "gradient deviates"),
    ],
)
def test_a_fault_is_an_error(results: Path, kind: str, fault: Entry, overrides: str, problem: str) -> None:
    record = run_with(results, kind, *overrides.split(), entry=fault)
    assert_not_proven(record, problem)


def test_a_router_without_a_gradient_is_an_error(results: Path) -> None:
    words = ["strategy=ddp", "precision=bf16_mixed", "checkpointing=selective"]
    record = run_with(results, "qwen3_moe", *words, entry=faults.router_of_library_detached)
    assert_not_proven(record, ".mlp.gate.weight")


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_counts_what_a_token_uses(results: Path, kind: str) -> None:
    """By the parameters of the library's modules and by traced operations, which have each row of an expert once."""
    model = config_of(folder(results, kind)).model
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **MODELS[kind]))
    stacked = [each for each in theirs.parameters() if each.dim() == 3]
    idle = sum(each.numel() * (8 - 2) // 8 for each in stacked)
    assert (model.num_experts, model.num_experts_per_tok) == (8, 2)
    assert active_parameter_count(model) == sum(each.numel() for each in theirs.parameters()) - idle
    norms = sum(each.numel() for each in theirs.parameters() if each.dim() == 1)
    products = active_parameter_count(model) - norms - 320 * 64  # without the embedding's rows
    assert model.hf_info is not None
    assert model.hf_info.forward_flops == 2 * 32 * products + 2 * 4 * 32**2 * 64


PUBLISHED = {
    # Total and active parameters in billions, by the papers' abstracts or model cards.
    "mixtral": (
        {"intermediate_size": 14336, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000},
        (46.70, 12.9),
    ),
    "qwen3_moe": (
        {"intermediate_size": 6144, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
        | {"moe_intermediate_size": 768, "head_dim": 128, "tie_word_embeddings": False},
        (30.53, 3.3),
    ),
    "olmoe": (
        {"intermediate_size": 1024, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304},
        (6.92, 1.3),
    ),
}


@pytest.mark.parametrize("kind", [long(kind) for kind in PUBLISHED])
def test_a_published_mixture_has_its_parameters(tmp_path: Path, kind: str) -> None:
    sizes, (total, active) = PUBLISHED[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | sizes))
    model = config_of(tmp_path).model
    assert round(parameter_count(model) / 1e9, 2) == total
    assert abs(active_parameter_count(model) / 1e9 - active) < 0.06


@pytest.mark.parametrize(
    ("kind", "overrides", "reason"),
    [
        (
            "llama",
            "strategy=pp_1f1b",
            "strategy.pp=2 needs this project's stages, which model=small-llama does not have",
        ),
        ("llama", "strategy=tp_sp", "strategy.sequence_parallel=true is not part of the plan of model=small-llama"),
        ("gpt2", "strategy=tp", "strategy.tp=2 needs a tensor-parallel plan, which model=small-gpt2 (gpt2) lacks"),
        ("llama", "strategy=tp world_size=4", "strategy.tp=4 does not divide num_key_value_heads=2"),
        (
            "qwen3_moe",
            "strategy=tp",
            "strategy.tp=2 does not know the style ",
        ),
        (
            "mixtral",
            "strategy=tp",
            "strategy.tp=2 does not know the style ",
        ),
        ("mixtral", "strategy=fsdp_ep", "strategy.ep=2 needs this project's experts, which model=small-mixtral does"),
        (
            "mixtral",
            "checkpointing=selective checkpointing.saved_products=every_second",
            "checkpointing.saved_products=every_second needs",
        ),
        ("llama", "train.seq_len=129", "train.seq_len=129 is more than the 128 tokens"),
    ],
)
def test_incompatible_strategies_are_refused(results: Path, kind: str, overrides: str, reason: str) -> None:
    config = config_of(folder(results, kind), "world_size=2", *overrides.split())
    problems = list(incompatibilities(config, resolve_layout(config.strategy, config.world_size or 2)))
    assert any(problem.startswith(reason) and "choose" in problem for problem in problems), problems


def test_a_plan_that_cannot_be_applied_is_refused(results: Path) -> None:
    """It has a style that is not known here, or leaves whole a table whose tied head it cuts."""
    config = config_of(folder(results, "gemma"), "strategy=tp", "world_size=2")
    info = config.model.hf_info
    assert info is not None
    for plan, reason in (
        (
            info.tensor_plan | {"model.layers.0.mlp.up_proj": "packed_colwise"},
            "the style packed_colwise of model.layers.0.mlp.up_proj",
        ),
        (
            {"lm_head": "gathered"},
            "strategy.tp=2 cuts apart what model.tie_word_embeddings=true of model=small-gemma ties",
        ),
    ):
        model = dataclasses.replace(config.model, hf_info=dataclasses.replace(info, tensor_plan=plan))
        changed = dataclasses.replace(config, model=model)
        (problem,) = incompatibilities(changed, resolve_layout(config.strategy, 2))
        assert reason in problem and ": choose" in problem


def complaint(root: Path, content: str, **values: Any) -> str:
    """Return what is said of a model with this config.json."""
    (root / "config.json").write_text(content)
    with pytest.raises(UserError) as raised:
        hf.fill_model_config({"family": "hf", "attention": "flash", "path": str(root)} | values, 32)
    assert "\n" not in str(raised.value)
    return str(raised.value)


LLAMA = json.dumps({"model_type": "llama"} | MODELS["llama"])
BLOOM = json.dumps({"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320})


@pytest.mark.parametrize(
    ("content", "values", "reason"),
    [
        (LLAMA, {"path": None}, "model.path is missing"),
        (LLAMA, {"path": "nowhere"}, "is no config.json and no folder with one"),
        ("{", {}, "no readable config.json"),
        ('{"model_type": "unheard-of"}', {}, "is not a configuration that transformers"),
        ('{"model_type": "t5"}', {}, "not a causal language model"),
        ('{"model_type": "bert"}', {}, "not a causal language model"),
        ('{"model_type": "deepseek_v3", "kv_lora_rank": 8}', {}, "with latent attention (model type deepseek_v3"),
        ('{"model_type": "gpt_oss"}', {"attention": "eager"}, "with attention sinks (model type gpt_oss)"),
        (LLAMA, {"dropout": 0.1}, "has no dropout of its own"),
        (LLAMA, {"rope_theta": 7.0}, "model.rope_theta=7.0 cannot be set"),
        (BLOOM, {}, "choose model.attention=eager"),  # whose scores have slopes
    ],
)
def test_an_invalid_model_is_a_one_line_error(tmp_path: Path, content: str, values: Any, reason: str) -> None:
    assert reason in complaint(tmp_path, content, **values)


# Each type has its own defaults but for these sizes, where it has them; 0 is a token of every vocabulary.
SHRUNKEN = COMMON | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}

MOST_PARAMETERS = 10_000_000  # of a model that is trained for a step

LEAST_TYPES = 60  # of some two hundred, of which many are mixtures of experts, encoders or have other names of sizes


@pytest.mark.long
def test_every_causal_model_of_the_library_trains_or_is_refused_in_one_line(tmp_path: Path) -> None:
    trained = []
    for config_class in transformers.AutoModelForCausalLM._model_mapping:
        known = {entry.name for entry in dataclasses.fields(config_class)} | {*config_class.attribute_map}
        sizes = {key: value for key, value in SHRUNKEN.items() if key in known}
        path = tmp_path / f"{config_class.model_type}.json"
        path.write_text(json.dumps({"model_type": config_class.model_type} | sizes))
        try:
            config = config_of(path)
        except UserError as error:
            assert "\n" not in str(error) and str(error).startswith("model."), error
            continue
        model = build_model(config.model)
        if config.model.parameters > MOST_PARAMETERS:  # its sizes have other names
            continue
        materialize(model, config.model, 0, torch.device("cpu"), torch.float32)
        tokens = torch.zeros((1, 32), dtype=torch.int64)
        model(tokens).float().mean().backward()
        cut = dataclasses.replace(config, strategy=config_of(path, "strategy=tp", "world_size=2").strategy)
        problems = list(incompatibilities(cut, resolve_layout(cut.strategy, 2)))
        assert not any("is not supported" in problem for problem in problems), problems
        assert sum(map(torch.numel, model.parameters())) == config.model.parameters, config_class
        trained.append(config_class.model_type)
    assert len(trained) >= LEAST_TYPES and {"qwen3", "phi3", "gemma3_text", "olmo2", "smollm3"} <= {*trained}, trained


@pytest.mark.parametrize("kind", ["llava", "gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_the_text_part_of_a_model_of_several_kinds_of_input_is_a_model(tmp_path: Path, kind: str) -> None:
    types = {"llava": "llama", "gemma3": "gemma3_text", "mistral3": "mistral"}
    text = {"model_type": types.get(kind, f"{kind}_text")} | SHRUNKEN
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    config = config_of(tmp_path)
    assert config.model.vocab_size == 320 and config.model.num_hidden_layers == 2


@pytest.mark.parametrize(("kind", "same"), [("qwen2_vl", "qwen2"), ("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3")])
def test_text_that_has_no_causal_model_of_its_own_is_computed_as_by_the_library(
    tmp_path: Path, kind: str, same: str
) -> None:
    rotations = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {"model_type": f"{kind}_text", "rope_parameters": rotations} | SHRUNKEN
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    model = config_of(tmp_path, "train.seq_len=24").model
    assert model.hf_info is not None and model.hf_info.config["model_type"] == same
    ours = build_model(model)
    materialize(ours, model, 0, torch.device("cpu"), torch.float32)
    theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, text_config=text).text_config)
    weights = {name.removeprefix("model."): each for name, each in ours.state_dict().items()}
    head = weights.pop("lm_head.weight")
    theirs.load_state_dict(weights)
    tokens = torch.arange(24).view(1, 24)
    logits = theirs.eval()(tokens).last_hidden_state @ head.T
    torch.testing.assert_close(ours.eval()(tokens), logits, rtol=1e-5, atol=1e-6)


def test_lists_with_an_entry_for_each_layer_have_as_many(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    path = folder(tmp_path, "qwen3", layer_types=kinds, sliding_window=16, use_sliding_window=True)
    for layers in (1, 3):
        info = config_of(path, f"model.num_hidden_layers={layers}").model.hf_info
        assert info is not None and info.config["layer_types"] == (kinds * 2)[:layers]


def test_a_model_without_its_library_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'training-harness[hf]'" in complaint(tmp_path, LLAMA)


def test_an_invalid_path_leaves_no_files(tmp_path: Path, harness: Harness) -> None:
    done = harness("model=hf", f"model.path={tmp_path / 'nowhere'}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is no config.json" in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_models_identity_does_not_depend_on_its_folder(tmp_path: Path) -> None:
    first, second = folder(tmp_path, "llama"), tmp_path / "elsewhere" / "small-llama"
    second.mkdir(parents=True)
    file = second / "config.json"
    file.write_text((first / "config.json").read_text())
    config, other = config_of(first), config_of(second)
    assert config.model.name == "small-llama"
    assert make_run_id(config, "cpu", 1, "") == make_run_id(other, "cpu", 1, "")
    assert config_of(file).model.name == "llama_115k"
    file.write_text(json.dumps({"model_type": "llama", "_name_or_path": "someone/My-Llama"} | MODELS["llama"]))
    assert config_of(file).model.name == "My-Llama"
    assert make_run_id(config_of(first, "model.vocab_size=400"), "cpu", 1, "") != make_run_id(config, "cpu", 1, "")
    values = config.to_dict()
    assert resolve_run_config(json.loads(json.dumps(values))) == config  # asked once: what is known is not asked again
