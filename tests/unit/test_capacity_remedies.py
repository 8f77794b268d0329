"""The remedies offered for a run that does not fit: each can itself be run, and fits."""

import dataclasses
import re

import pytest

from harness.cost_model import capacity
from harness.cost_model.memory import estimate_memory
from harness.hardware.machine import Machine
from harness.runner.plan import capacity_problem, make_plan
from tests.support.commands import compose_config
from tests.support.models import PREPARED

BATCH = ("train.global_batch=16", "train.micro_batch=2", "train.seq_len=128", "data=synthetic")

WITHOUT_VOCABULARY_TP = "strategy.tp=2 strategy.vocabulary_parallel=false"

# Each run with the kinds of remedies that must be offered, and no others, if memory is one byte short.
CASES = {
    "strategy=zero3": "checkpointing model world_size",
    "strategy=fsdp_full_shard precision=bf16_mixed": "checkpointing model world_size",
    "strategy=fsdp_shard_grad_op strategy.dp_shard=4": "checkpointing model",  # no larger world has more shards
    "strategy=zero3 strategy.dp_shard=4 train.global_batch=8": "checkpointing model",
    "strategy=ddp checkpointing.offload_activations=true train.seq_len=1024": "checkpointing model",
    "strategy=pp_zero_bubble": "checkpointing model",
    "strategy=pp_1f1b train.compile=true": "checkpointing model",
    "strategy=tp train.compile=true": "checkpointing model",
    f"strategy=zero1 {WITHOUT_VOCABULARY_TP}": "checkpointing model world_size",
    f"strategy=zero2 {WITHOUT_VOCABULARY_TP} precision=bf16_mixed": "checkpointing model world_size",
    "strategy=single checkpointing=selective": "checkpointing model",
}


@pytest.mark.parametrize("case", CASES)
def test_every_remedy_is_itself_accepted_and_fits(case: str) -> None:
    overrides = ("model=350m", "world_size=4", "model.tie_word_embeddings=false", *BATCH, *case.split())
    device = "cpu" if "offload" in case else "cuda"  # of a GPU's memory full saves nothing beside offload
    large_machine = Machine(device, "", 1, 4, devices=64, free_bytes=(2**45,) * 64, cores=2)
    plan = make_plan(compose_config(*overrides), large_machine)
    needed = capacity.needed_bytes(estimate_memory(plan.config, plan.layout, plan.widths, device), 4, device)
    small_machine = dataclasses.replace(large_machine, free_bytes=(needed - 1,) * 64)
    reason = capacity_problem(dataclasses.replace(plan, machine=small_machine), PREPARED)
    assert reason is not None
    pattern = r"(checkpointing=\w+|model=\w+|world_size=\d+(?: and train\.global_batch=\d+)?)[^,]* \("
    remedies = re.findall(pattern, reason.partition(": choose ")[2])
    assert {remedy.partition("=")[0] for remedy in remedies} == set(CASES[case].split()), reason
    for remedy in remedies:
        assert (
            capacity_problem(make_plan(compose_config(*overrides, *remedy.split(" and ")), small_machine), PREPARED)
            is None
        ), remedy
