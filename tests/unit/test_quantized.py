"""Plans of frozen matrices in 4 bits: the bytes of state, gathers and whole matrices, and published peaks."""

import dataclasses
import statistics
from typing import Any

import pytest

import harness.cost_model.layer_backward
import harness.cost_model.sharding
from harness.cli.main import main
from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.config.stack import load_stack
from harness.cost_model.dp_communication import dp_bytes
from harness.cost_model.fully_shard import FullyShard
from harness.cost_model.memory import estimate_memory
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.cost_model.quantized import quantized_base, scale_bytes
from harness.cost_model.stage_activations import one_layer_activations
from harness.cost_model.timing.kernels import layer_seconds
from harness.layout.partition import Stage, split_into_stages
from tests.support.campaigns import read_table
from tests.support.commands import ROOT, compose_layout, widths_of
from tests.support.planned import planned
from tests.support.published import fitcheck

# Llama 3.1 8B's matrices: queries and outputs, keys and values, and three of the MLP; then embedding, head and norms.
MATRICES = [4096 * 4096] * 2 + [1024 * 4096] * 2 + [14336 * 4096] * 3
SIDES = [4096 + 4096] * 2 + [1024 + 4096] * 2 + [14336 + 4096] * 3
LAYERS, RANK, TABLE, NORMS = 32, 16, 128256 * 4096, 65 * 4096
ADAPTERS = LAYERS * RANK * sum(SIDES)
# In bytes: a scale of one byte for 64 weights, and one of four bytes for 256 of these; then a table of 16 values for
# each matrix, and of 256 for its scales, with their mean.
TABLES, TABLES_OF_SCALES = 64 * LAYERS * len(MATRICES), 1028 * LAYERS * len(MATRICES)
SCALES = LAYERS * sum(size // 64 + 4 * (size // 64 // 256) for size in MATRICES) + TABLES + TABLES_OF_SCALES


def plan_8b(strategy: str, world_size: int, *overrides: str) -> tuple[RunConfig, Any]:
    words = ("model=8b", "adapter=qlora", "train.micro_batch=1", "train.global_batch=8", "train.seq_len=2048")
    return compose_layout(world_size, f"strategy={strategy}", *words, *overrides)


def parameter_bytes(strategy: str, world_size: int, *overrides: str) -> int:
    config, layout = plan_8b(strategy, world_size, *overrides)
    return estimate_memory(config, layout, widths_of(config, layout), "cuda").parameter_bytes


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 8)])
def test_the_state_of_a_quantized_model_is_counted_by_hand(strategy: str, world_size: int) -> None:
    """16-bit copies of adapters, embedding, head and norms are beside half a byte a weight, and its scales."""
    assert ADAPTERS == 41_943_040
    expected = 2 * (2 * TABLE + NORMS + ADAPTERS) + LAYERS * sum(MATRICES) // 2 + SCALES
    assert parameter_bytes(strategy, world_size, "precision=bf16_mixed") == expected
    in_fp32 = 4 * LAYERS * sum(size // 64 for size in MATRICES) + TABLES
    plain = parameter_bytes(strategy, world_size, "precision=bf16_mixed", "model.adapter.double_quant=false")
    assert plain == expected - SCALES + in_fp32


def without_scales(model: ModelConfig, stages: list[Stage]) -> tuple[int, int]:
    return quantized_base(model, stages)[0], 0


def of_one_layer(model: ModelConfig, stages: list[Stage]) -> tuple[int, int]:
    elements, scales = quantized_base(model, stages)
    return elements // LAYERS, scales


def with_embedding(model: ModelConfig, stages: list[Stage]) -> tuple[int, int]:
    elements, scales = quantized_base(model, stages)
    return elements + TABLE, scales + scale_bytes(TABLE, True)


@pytest.mark.parametrize("fault", [without_scales, of_one_layer, with_embedding])
def test_a_miscounted_base_is_caught(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(harness.cost_model.sharding, "quantized_base", fault)
    with pytest.raises(AssertionError):
        test_the_state_of_a_quantized_model_is_counted_by_hand("single", 1)


def test_shards_are_of_packed_weights_and_gathers_too() -> None:
    """Ranks divide packed weights and have all scales; an embedding that is frozen has one gather, all else two."""
    config, layout = plan_8b("fsdp_full_shard", 8, "precision=bf16")
    widths, (stage,) = widths_of(config, layout), split_into_stages(config.model, layout)
    packed, others = LAYERS * sum(MATRICES) // 2, 2 * (2 * TABLE + NORMS + ADAPTERS)
    assert parameter_bytes("fsdp_full_shard", 8, "precision=bf16") == (packed + others) // 8 + SCALES
    sent = dp_bytes(config, layout, widths, stage, None, 1, None)
    assert sent["dp_shard gather"] == 7 / 8 * (2 * (packed + others) - 2 * TABLE)
    sharding = FullyShard(config, layout, widths, "cuda", (stage,))
    own = packed // LAYERS + 2 * (2 * 4096 + ADAPTERS // LAYERS)
    assert sharding.whole(sharding.groups[0].layer) == own


def test_gathers_of_whole_weights_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunConfig, "gathered_matrix_bytes", lambda _, width: width)
    with pytest.raises(AssertionError):
        test_shards_are_of_packed_weights_and_gathers_too()


def added_by_4_bits(strategy: str = "ddp") -> list[int]:
    """Return the bytes that backward of a layer has beside those with 16-bit matrices, at the moments that differ."""
    config, layout = plan_8b(strategy, 8, "precision=bf16_mixed")
    plain = dataclasses.replace(config.model, adapter=dataclasses.replace(config.model.adapter, name="lora"))
    configs = (dataclasses.replace(config, model=plain), config)
    shapes = (micro_batch_shape(each, layout, "cuda") for each in configs)
    of_16_bits, of_4_bits = (one_layer_activations.__wrapped__(shape, config.checkpointing, False) for shape in shapes)
    pairs = zip(of_16_bits.moments, of_4_bits.moments, strict=True)
    return [wide for before, after in pairs if (wide := after.temporaries - before.temporaries)]


def test_a_matrix_is_whole_where_backward_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(added_by_4_bits()) == sorted(2 * size for size in MATRICES)
    monkeypatch.setattr(harness.cost_model.layer_backward, "whole_matrix_bytes", lambda *_: 0)
    assert added_by_4_bits() == []


def test_a_layer_reads_packed_weights_and_writes_whole_ones() -> None:
    """It does both in each pass, and nothing else takes longer than beside 16-bit matrices."""
    config, layout = plan_8b("ddp", 8, "precision=bf16_mixed", "cluster=8xrtx4090")
    hardware, timing = config.cluster.hardware, load_stack("harness").timing
    assert hardware is not None
    plain = dataclasses.replace(config.model, adapter=dataclasses.replace(config.model.adapter, name="lora"))
    before, after = (
        layer_seconds(micro_batch_shape(each, layout, "cuda"), hardware, timing)
        for each in (dataclasses.replace(config, model=plain), config)
    )
    moved = (0.5 + 2) * sum(MATRICES) + SCALES // LAYERS
    seconds = moved / (hardware.memory_bandwidth * hardware.fitted.memory_efficiency)
    assert after.forward - before.forward == pytest.approx(seconds)
    assert after.backward - before.backward == pytest.approx(seconds)


# --- Published peaks


def test_packed_weights_and_scales_are_those_that_were_measured() -> None:
    rows = [row for row in fitcheck.rows() if row.config.model.adapter.is_quantized and "scale_bytes" in row.measured]
    assert len({row.config.model.name for row in rows}) == len(fitcheck.MODELS)
    for row in rows:
        model = row.config.model
        elements, scales = quantized_base(model, split_into_stages(model, row.layout))
        assert (elements // 2, scales) == (row.measured["packed_bytes"], row.measured["scale_bytes"])


def test_the_table_of_adapters_is_what_plans_say() -> None:
    lines = [*fitcheck.lines()]
    assert read_table(ROOT / "results" / "planner" / "adapters.csv") == lines
    page = (ROOT / "docs" / "explanation" / "how-far-to-trust.md").read_text()
    table = page[page.index("| frozen weights |") :].partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    keys = [(adapter, attention) for adapter in ("qlora", "lora") for attention in ("flash", "eager")]
    assert [cells[2:] for cells in shown] == [
        [
            str(len(own)),
            *(range_of([float(line[f"{name}_mib"]) / float(line["measured_mib"]) for line in own]) for name in NAMES),
        ]
        for own in ([line for line in lines if (line["adapter"], line["attention"]) == key] for key in keys)
    ]


NAMES = ("planned", "with_logits")


def range_of(ratios: list[float]) -> str:
    """Return the median and the ends of some ratios."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


# --- Commands


def test_a_plan_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """8b fits a device of 24 GiB in 4 bits. With shards no command is offered that would run or export it."""
    plan = planned("model=8b", "adapter=qlora", "cluster=8xrtx4090", "cluster.gpus_per_node=1", "train.seq_len=2048")
    assert plan.predictions[0].is_runnable
    assert plan.predictions[0].fits
    assert plan.predictions[0].verdict.fits == "likely"
    words = ["model=8b", "adapter=qlora", "cluster=8xrtx4090", "precision=bf16", "strategy=fsdp_full_shard"]
    plan = planned(*words, "train.seq_len=2048")
    assert plan.predictions[0].planned_alone == "adapter=qlora"
    assert main(["export", "--plan", *words, "--to", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("adapter=qlora is planned alone: leave it out to export")
