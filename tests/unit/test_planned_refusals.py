"""A plan and a run refuse the same configurations: no plan prints a command that a run of the same devices refuses."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from harness.config.schema import RunConfig
from harness.config.stack import load_stack
from harness.cost_model.prediction import Prediction
from harness.engines.base import load_engine, unsupported_elsewhere
from harness.hardware.machine import described_cluster, described_machine
from harness.layout.layout import resolve_layout
from harness.planner import space
from harness.runner.plan import find_problems, machine_problems
from harness.util.text import UserError
from tests.support.commands import compose_config

STRATEGIES = (
    *("ddp", "zero1", "zero2", "zero3", "zero_offload", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_no_shard"),
    *("tp", "tp_sp strategy.tp=2 strategy.dp_shard=4", "cp", "cp_ulysses", "ep", "zero1_torch", "pp_zero_bubble"),
    *("fsdp_pp strategy.pp=2 strategy.schedule=zero_bubble strategy.zero_stage=2", "pp_zbv strategy.pp=2", "pp_1f1b"),
    *("fsdp_full_shard strategy.offload=parameters", "fsdp_full_shard strategy.secondary_shards=2", "fsdp_tp"),
    *("ddp strategy.engine=accelerate", "fsdp_full_shard strategy.engine=accelerate"),
)

PRECISIONS = (
    *("bf16_mixed", "fp8_mixed", "fp8_mixed precision.recipe=rowwise", "fp8_mixed precision.recipe=mxfp8"),
    "fp8_mixed precision.float8_all_gather=true",
)

MODELS = ("tiny", "gpt_tiny", "moe_tiny", "tiny adapter=lora", "tiny adapter=qlora")

CHECKPOINTINGS = ("none", "full", "selective", "attention", "full checkpointing.offload_activations=true")

TRAINS = ("", "train.compile=true", "train.loss_chunks=2", "train.save=sync", "train.seq_len=200")


def configs() -> Iterator[RunConfig]:
    """Yield every pair of values of two axes, with the first values of the others; parts are composed once."""
    base = ("cluster=8xh100", "train.global_batch=64", "train.micro_batch=1", "model.num_hidden_layers=16")

    def composed(group: str, words: tuple[str, ...]) -> list[RunConfig]:
        return [compose_config(*base, *f"{group}={entry}".split()) for entry in words]

    axes = (
        composed("strategy", STRATEGIES),
        composed("precision", PRECISIONS),
        composed("model", MODELS),
        composed("checkpointing", CHECKPOINTINGS),
        [compose_config(*base, *words.split()) for words in TRAINS],
    )
    pairs = itertools.combinations(range(len(axes)), 2)
    cases = (itertools.product(*(axis if n in pair else axis[:1] for n, axis in enumerate(axes))) for pair in pairs)
    for strategy, precision, model, checkpointing, train in itertools.chain.from_iterable(cases):
        yield replace(
            strategy,
            precision=precision.precision,
            model=model.model,
            checkpointing=checkpointing.checkpointing,
            train=train.train,
        )


def refused_alone(config: RunConfig) -> tuple[bool, set[str], set[str]]:
    """Return whether a plan can be run, and what only a run and only its plan refuse on eight devices.

    What depends on the machine at hand is left out: tools that compile, and packages of an engine.
    """
    cluster = described_cluster(config.cluster)
    machine, layout = described_machine(cluster), resolve_layout(config.strategy, 8)
    engine = load_engine(layout.engine)
    prediction = Prediction(config, layout, cluster, load_stack("harness"), engine.state_widths)
    at_hand = {*machine_problems(config, layout, machine), *engine.unsupported(config, layout, machine)}
    anywhere = {*unsupported_elsewhere(engine, config, layout, machine)}
    run = {*find_problems(config, layout, machine)} - (at_hand - anywhere)
    plan = {*space.plan_problems(prediction)}
    return prediction.is_runnable, run - plan, plan - run


@cache
def differences() -> set[str]:
    """Return every line that only a run or only its plan has, in all of these configurations."""
    lines = set()
    for config in configs():
        try:
            is_runnable, of_run, of_plan = refused_alone(config)
        except UserError:
            continue  # no layout: both say so before they ask for problems
        lines |= of_run | of_plan if is_runnable else of_plan
    return lines


def test_a_plan_refuses_what_a_run_refuses() -> None:
    assert differences() == set()


def test_a_rule_of_runs_that_plans_lack_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "compiler_incompatibilities", lambda *_: iter(()))
    differences.cache_clear()
    assert any("train.compile=true fuses" in line for line in differences())
    differences.cache_clear()
