"""Runs whose projections multiply in float8, emulated on a CPU: their proof, their plan, and faults of them."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from harness.cli.main import main
from harness.config.command import read_run_config
from harness.config.from_dict import from_dict
from harness.config.schema import PrecisionConfig
from harness.cost_model.communication import expected_bytes
from harness.cost_model.float8 import RECIPES
from harness.cost_model.flops import scaled_flops
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout
from harness.models.float8 import recipe_of_values
from harness.util.text import UserError
from tests.support import faults
from tests.support.commands import (
    Entry,
    assert_not_proven,
    assert_ok,
    compose_layout,
    long,
    read_rows,
    run_harness,
    run_with,
    widths_of,
)
from tests.support.row_invariants import check_peak

FLOAT8 = "precision=fp8_mixed"
ROWWISE = f"{FLOAT8} precision.recipe=rowwise"
GATHERED = f"{FLOAT8} precision.float8_all_gather=true"

TWO_LAYERS = "model.num_hidden_layers=2"  # unless a case has more: casts by single operators take long on a CPU

# Five million parameters, and ten million.
MEDIUM = (
    "model.hidden_size=256 model.num_attention_heads=4 model.num_key_value_heads=2 model.intermediate_size=768"
    " model.num_hidden_layers=6 train.seq_len=128 train.global_batch=8"
)
LARGER = (
    "model.hidden_size=384 model.num_attention_heads=6 model.num_key_value_heads=2 model.intermediate_size=1024"
    " model.num_hidden_layers=6 train.seq_len=128 train.global_batch=8"
)

STRATEGIES = {
    "ddp": 2,
    "zero1": 2,
    "zero2": 2,
    "zero3": 2,
    "fsdp_full_shard": 4,
    "fsdp_shard_grad_op": 2,
    "fsdp_no_shard": 2,
    "fsdp_hybrid_shard strategy.dp_replicate=2 strategy.dp_shard=2": 4,
    "tp": 2,
    "tp_sp": 2,
    "cp": 2,
    "cp_ulysses": 2,
    "pp_1f1b": 2,
    "fsdp_tp strategy.tp=2": 4,
    "ddp strategy.engine=accelerate": 2,
}


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        long(f"ddp {FLOAT8} checkpointing=selective", 2),
        (f"fsdp_full_shard {ROWWISE} checkpointing=full train.global_batch=3 train.micro_batch=1", 3),
        (f"fsdp_full_shard {GATHERED}", 2),
        long(f"zero3 {FLOAT8}", 2),
        (f"tp {ROWWISE} model.num_key_value_heads=4 train.global_batch=4", 2),
        *(
            long(f"{strategy} {precision} checkpointing={checkpointing} {LARGER}", world)
            for (strategy, world), precision, checkpointing in itertools.product(
                STRATEGIES.items(), (FLOAT8, ROWWISE), ("none", "full")
            )
        ),
        *(
            long(f"{strategy} {GATHERED} checkpointing={checkpointing} {LARGER}", world)
            for (strategy, world), checkpointing in itertools.product(
                {"fsdp_full_shard train.micro_batch=1": 8, "fsdp_shard_grad_op": 4, "fsdp_no_shard": 2}.items(),
                ("none", "full", "selective"),
            )
        ),
        long(f"ddp {FLOAT8} model=gpt_tiny", 2),
        long(f"ddp {ROWWISE} train.loss_chunks=2 optimizer=muon {LARGER}", 2),
        long(f"fsdp_full_shard {FLOAT8} {LARGER} train.global_batch=9 train.micro_batch=1", 3),
    ],
)
def test_float8_is_proven(results: Path, overrides: str, world: int) -> None:
    record = run_with(results, f"world_size={world}", TWO_LAYERS, *f"strategy={overrides}".split())
    assert_ok(record.row)
    assert record.row["proven_steps"] >= 1
    config, layout = read_run_config(record.config), from_dict(Layout, record.layout)
    recipe = config.precision.recipe
    scaled = [rank.profiled.scaled_flops[recipe] for rank in record.ranks]
    assert layout.pp_enabled or len({*scaled}) == 1
    assert record.row["recipe"] == recipe
    check_peak(record.row, 0.02)


# Of two equal layers, whose code is compiled once.
COMPILED = "train.compile=true train.steps=1 train.warmup_steps=2 model.num_hidden_layers=2 train.seq_len=64"


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        f"ddp {FLOAT8} checkpointing=full",
        f"ddp {ROWWISE}",
        f"fsdp_full_shard {GATHERED}",
        f"tp {ROWWISE} model.num_key_value_heads=4",
    ],
)
def test_compiled_float8_is_proven(results: Path, words: str) -> None:
    """Compiled code has no tensor of torchao: the values of its operands show the recipe."""
    record = run_with(results, *f"strategy={words} world_size=2 {COMPILED}".split())
    assert_ok(record.row)
    config, layout = read_run_config(record.config), from_dict(Layout, record.layout)
    for rank in record.ranks:
        assert rank.profiled.scaled_flops == {config.precision.recipe: scaled_flops(config, layout, rank.rank)}


def test_values_show_the_recipe_of_their_scales() -> None:
    torch.manual_seed(0)
    plain = torch.randn(64, 96, dtype=torch.bfloat16).float()
    forms = {}
    for dtype, granularity in itertools.product((torch.float8_e4m3fn, torch.float8_e5m2), ScalingGranularity):
        is_row = granularity is ScalingGranularity.AXISWISE
        cast = hp_tensor_to_float8_dynamic(
            plain,
            dtype,
            LinearMMConfig(),
            scaling_granularity=granularity,
            axiswise_dim=-1 if is_row else None,
            round_scales_to_power_of_2=is_row,
        )
        forms[dtype, is_row] = cast._data.float() / cast._scale
    for (_, is_row), (_, is_other_row) in itertools.product(forms, forms):
        operands = [forms[torch.float8_e4m3fn, is_row], forms[torch.float8_e5m2, is_other_row]]
        assert recipe_of_values(operands) == ("rowwise" if is_row and is_other_row else "tensorwise")
    part = forms[torch.float8_e4m3fn, False][:7, :16]  # a rank's, which the largest magnitude is not in
    assert recipe_of_values([part, part]) == "tensorwise"
    assert recipe_of_values([plain, forms[torch.float8_e4m3fn, True]]) == ""
    assert recipe_of_values([plain.bfloat16().float() * 1.01, part]) == ""


FAULTS = [
    (faults.doubled_amax, f"ddp {FLOAT8}", "of the range of float8"),
    (faults.clamped_values, f"ddp {FLOAT8}", "deviates by"),
    (faults.unscaled_projections, f"ddp {FLOAT8}", "multiplied scaled matrices in none operations"),
    (faults.one_unscaled_projection, f"zero2 {FLOAT8}", "operations of a step, and"),
    (faults.another_recipe, f"ddp {ROWWISE}", "tensorwise operations of a step, and"),
    (faults.amax_of_own_shard, f"fsdp_full_shard {GATHERED}", "deviates by"),
]


@pytest.mark.parametrize(
    ("fault", "strategy", "problem"),
    [
        *FAULTS,
        long(faults.doubled_amax, f"fsdp_full_shard {ROWWISE}", "of the range of float8"),
        *(long(fault, f"{words} {MEDIUM}", problem) for fault, words, problem in FAULTS),
        *(long(fault, f"{words} {COMPILED}", problem) for fault, words, problem in FAULTS if "oper" in problem),
    ],
)
def test_a_fault_of_float8_is_an_error(results: Path, fault: Entry, strategy: str, problem: str) -> None:
    words = f"world_size=2 {TWO_LAYERS} strategy={strategy}".split()
    assert_not_proven(run_with(results, *words, entry=fault), problem)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("strategy=ddp model=moe_tiny", "this project's dense decoder"),
        ("strategy=ddp adapter=lora", "was not tried with adapter=lora"),
        ("strategy=pp_zero_bubble", "computes both gradients of a projection at once"),
        ("strategy=zero_offload", "was not tried with offload"),
        ("strategy=ddp train.seq_len=40 train.micro_batch=1", "tokens in 40"),
        ("strategy=tp model.intermediate_size=272", "up_proj in 136"),
        ("strategy=ddp precision.float8_all_gather=true", "one of fully_shard"),
        ("strategy=fsdp_full_shard precision.float8_all_gather=true train.save=sync", "train.save=sync"),
    ],
)
def test_what_float8_cannot_be_combined_with_is_refused(words: str, reason: str) -> None:
    problems = list(incompatibilities(*compose_layout(2, FLOAT8, "model=tiny", *words.split())))
    assert any(reason in problem and "choose" in problem for problem in problems), problems


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_formats_of_blocks_are_planned_only(results: Path, recipe: str) -> None:
    with pytest.raises(UserError, match="is planned and never run: choose tensorwise or rowwise"):
        run_with(results, "strategy=ddp", FLOAT8, f"precision.recipe={recipe}")


def test_a_recipe_belongs_to_its_precision() -> None:
    dtypes = ("bfloat16", "float32", "float32", "float32")
    assert PrecisionConfig("fp8_mixed", *dtypes, recipe="rowwise").least_dtype == "float8"
    with pytest.raises(UserError, match=r"precision.recipe=rowwise is for precision=fp8_mixed alone"):
        PrecisionConfig("bf16_mixed", *dtypes, recipe="rowwise")
    with pytest.raises(UserError, match=r"precision.float8_all_gather=True needs one scale"):
        PrecisionConfig("fp8_mixed", *dtypes, recipe="rowwise", float8_all_gather=True)
    assert RECIPES.keys() == {"tensorwise", "rowwise", "mxfp8", "nvfp4"}


def planned_seconds(capsys: pytest.CaptureFixture[str], *words: str) -> float:
    """Return the step that is planned of torchtitan's Llama 3.1 8B on 8 H100 of 96 GB."""
    setting = (
        "stack=torchtitan strategy=fsdp_full_shard model=8b cluster=8xh100_96 train.seq_len=8192 train.global_batch=16"
        " train.micro_batch=2 checkpointing=selective checkpointing.saved_products=every_second format=json"
    )
    assert main(["plan", *setting.split(), "plan.simulate=false", *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    return float(row["predicted_step_seconds"])


def test_the_published_gain_of_float8_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    # torchtitan/benchmarks/llama3_h100_202412_torchtitan.md, table 1: tokens per second of a device
    published = {"bf16_mixed": 6667, "fp8_mixed": 8532}
    rates = {
        name: 2 * 8192 / planned_seconds(capsys, f"precision={name}", "train.compile=true", *others)
        for name, others in (("bf16_mixed", ()), ("fp8_mixed", ("precision.float8_all_gather=true",)))
    }
    assert rates == {name: pytest.approx(rate, rel=0.1) for name, rate in published.items()}
    # Without a compiler casts cost more than products save (github.com/pytorch/ao/issues/2262).
    assert planned_seconds(capsys, FLOAT8) > planned_seconds(capsys, "precision=bf16_mixed")


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("cluster=8xh200", 2),
        ("cluster=8xmi300x precision.recipe=rowwise", 2),
        ("cluster=8xb200 precision.recipe=mxfp8", 2),
        ("cluster=8xb200 precision.recipe=nvfp4", 4),
    ],
)
def test_a_plan_says_the_rate_that_it_assumes(words: str, rate: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "strategy=fsdp_full_shard", "model=8b", FLOAT8, *words.split(), "plan.simulate=false"]) == 0
    assert f"are planned at {rate} times the rate of bfloat16" in capsys.readouterr().out


def test_a_device_without_the_format_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = "strategy=fsdp_full_shard model=8b cluster=8xa100_80 plan.simulate=false"
    assert main(["plan", *words.split(), FLOAT8]) != 0
    assert "has no known peak FLOP/s in float8_e4m3fn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [
        *(long(precision, "none") for precision in (FLOAT8, ROWWISE, GATHERED)),
        *(long(precision, "full") for precision in (FLOAT8, ROWWISE, GATHERED)),
    ],
)
def test_a_simulated_rank_is_its_plan(tmp_path: Path, precision: str, checkpointing: str) -> None:
    setting = f"strategy=fsdp_full_shard cluster=8xh100 {precision} checkpointing={checkpointing} {MEDIUM}".split()
    assert run_harness(tmp_path, *setting, "launch=simulated", "name=simulated").returncode == 0
    row = read_rows(tmp_path, "simulated").iloc[0]
    assert row["status"] == "ok"
    config, layout = compose_layout(8, *setting)
    planned = expected_bytes(config, layout, widths_of(config, layout), 0, is_padded=True)
    assert row["communication_bytes"] == pytest.approx(
        sum(planned.values()), rel=1e-4
    )  # it counts norms and flags, too
    assert row["peak_requested_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.005)
