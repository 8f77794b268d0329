"""The settings that are auto: what they become on a CPU and on GPUs, and that this is a sensible measurement there."""

import pytest

from harness.config.hydra import compose_values
from harness.config.schema import Device, RunConfig
from harness.cost_model.flops import model_flops
from harness.cost_model.memory import estimate_memory
from harness.hardware.machine import Machine
from harness.layout.layout import resolve_layout
from harness.runner.plan import capacity_problem, make_plan
from harness.runner.resolve import resolve_auto, resolve_run_config

H100S = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, 8, 8, (79 * 2**30,) * 8, 64, 2**40, device_bytes=80 * 2**30)

PEAK_FLOPS, UTILIZATION = 989e12, 0.4  # of an H100 in bfloat16; a usual share of it


def configured(device: Device, capability: tuple[int, int] | None, *overrides: str) -> RunConfig:
    values = compose_values(*overrides, "data=synthetic", "tracking=none")
    return resolve_run_config(resolve_auto(values, device, capability))


@pytest.mark.parametrize(
    ("device", "capability", "precision", "batch"),
    [
        ("cpu", None, "fp32", (8, 10, 3)),
        ("cuda", (7, 5), "fp32", (48, 30, 5)),
        ("cuda", (8, 0), "bf16_mixed", (48, 30, 5)),
        ("cuda", None, "bf16_mixed", (48, 30, 5)),  # AMD's
    ],
)
def test_defaults_suit_the_device(
    device: Device, capability: tuple[int, int] | None, precision: str, batch: tuple[int, int, int]
) -> None:
    config = configured(device, capability)
    assert config.precision.name == precision
    assert (config.train.global_batch, config.train.steps, config.train.warmup_steps) == batch
    stated = configured(device, capability, "precision=fp16_mixed", "train.steps=7", "train.global_batch=96")
    assert (stated.precision.name, stated.train.steps, stated.train.global_batch) == ("fp16_mixed", 7, 96)
    assert stated.train.warmup_steps == batch[2]


def test_seven_billion_parameters_on_eight_gpus_are_a_sensible_measurement() -> None:
    config = configured("cuda", (9, 0), "strategy=zero3", "model=7b")
    plan = make_plan(config, H100S)
    assert capacity_problem(plan, ()) is None
    peak_bytes = estimate_memory(plan.config, plan.layout, plan.widths, "cuda").peak_bytes
    assert 33 < peak_bytes / 2**30 < 36
    step_seconds = model_flops(config) / 8 / (UTILIZATION * PEAK_FLOPS)
    assert 2 < step_seconds < 4  # a GPU's energy counter needs two seconds
    assert config.train.steps >= 20 and config.train.total_steps * step_seconds < 180


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_the_batch_divides_over_usual_numbers_of_gpus(ranks: int) -> None:
    for overrides in (["model=7b"], ["sweeps=quickstart"], ["sweeps=checkpointing"]):
        config = configured("cuda", (9, 0), "strategy=ddp", *overrides)
        resolve_layout(config.strategy, ranks).grad_accumulation_steps(config.train)
