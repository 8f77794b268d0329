"""The remedies offered for a run that does not fit: each can itself be run, and fits."""

import dataclasses

import pytest

from harness.config.hydra import compose_values
from harness.config.schema import Device
from harness.hardware.machine import Machine
from harness.runner.plan import capacity_problem, make_plan
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.util import native_build
from tests.support.commands import compose_config
from tests.support.models import PREPARED

BATCH = ("train.global_batch=16", "train.micro_batch=2", "train.seq_len=128", "data=synthetic")

WITHOUT_VOCABULARY_TP = "strategy.tp=2 strategy.vocabulary_parallel=false"

# Each run with the kinds of remedies that must be offered, in this order and no others, if memory is one byte short.
CASES = {
    "strategy=zero3": "world_size precision checkpointing micro_batch offload model",
    "strategy=fsdp_full_shard precision=bf16_mixed": "world_size checkpointing micro_batch offload model",
    # More ranks would hold no more shards.
    "strategy=fsdp_shard_grad_op strategy.dp_shard=4": "strategy precision checkpointing micro_batch offload model",
    "strategy=zero3 strategy.dp_shard=4 train.global_batch=8": "precision checkpointing micro_batch offload model",
    "strategy=ddp checkpointing.offload_activations=true train.seq_len=1024": (
        "strategy precision checkpointing micro_batch model"
    ),
    "strategy=pp_zero_bubble": "world_size precision checkpointing micro_batch model",
    "strategy=pp_1f1b train.compile=true": "world_size precision checkpointing micro_batch model",
    "strategy=tp train.compile=true": "world_size precision checkpointing micro_batch model",
    "strategy=single checkpointing=selective": "strategy precision saved_products checkpointing micro_batch model",
    f"strategy=zero1 {WITHOUT_VOCABULARY_TP}": "world_size precision checkpointing micro_batch offload model",
    f"precision=bf16_mixed strategy=zero2 {WITHOUT_VOCABULARY_TP}": "world_size offload model",
}


def offered(reason: str) -> list[list[str]]:
    """Return the settings of each remedy, without those that try the run as it is or change the budget."""
    texts = reason.partition(": choose ")[2].split(", or ")
    names = [text.partition(" (")[0].replace(" on more such machines", "").replace(" and ", " ") for text in texts]
    return [name.split() for name in names if "=" in name and name != "preflight=false to try"]


def kind(remedy: list[str]) -> str:
    """Return the last part of the key of a remedy's first setting."""
    return remedy[0].partition("=")[0].rpartition(".")[2]


def with_remedy(overrides: tuple[str, ...], remedy: list[str]) -> list[str]:
    """Return the overrides with a remedy; another strategy takes the place of the first with its keys."""
    keys = {text.partition("=")[0] for text in remedy}
    rest = [text for text in overrides if text.partition("=")[0] not in keys]
    if "strategy" in keys:
        rest = [text for text in rest if not text.startswith("strategy.")]
    return [*rest, *remedy]


@pytest.mark.parametrize("case", CASES)
def test_every_remedy_is_itself_accepted_and_fits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "triton_problem", lambda capability: None)  # as on the GPUs of these machines
    overrides = ("model=350m", "world_size=4", "model.tie_word_embeddings=false", *BATCH, *case.split())
    overrides = tuple({text.partition("=")[0]: text for text in overrides}.values())
    device: Device = "cpu" if "offload" in case else "cuda"  # of a GPU's memory full saves nothing beside offload
    large_machine = Machine(device, "", 1, 4, devices=64, free_bytes=(2**45,) * 64, cores=2, host_free_bytes=2**45)
    plan = make_plan(compose_config(*overrides), large_machine)
    needed = plan.memory.needed_bytes * (4 if device == "cpu" else 1)
    small_machine = dataclasses.replace(large_machine, free_bytes=(needed - 1,) * 64)
    reason = capacity_problem(dataclasses.replace(plan, machine=small_machine), PREPARED)
    assert reason is not None
    remedies = offered(reason)
    assert " ".join(dict.fromkeys(map(kind, remedies))) == CASES[case], reason
    for remedy in remedies:
        changed = make_plan(compose_config(*with_remedy(overrides, remedy)), small_machine)
        assert capacity_problem(changed, PREPARED) is None, remedy


def h100s(count: int, **changes: object) -> Machine:
    """Return a stand-in for a machine of H100s."""
    free = (79 * 2**30,) * count
    machine = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, count, count, free, 64, 2**40, device_bytes=80 * 2**30)
    return dataclasses.replace(machine, compute_capability=(9, 0), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        ("strategy=ddp model=7b", "strategy=fsdp_full_shard"),
        ("strategy=single model=7b", "strategy=fsdp_full_shard"),
        ("strategy=cp model=7b", "strategy.data_parallel=fsdp strategy.zero_stage=3"),
        ("strategy=zero3 model=8b world_size=4", "world_size=8"),
        ("strategy=zero3 model=70b", "checkpointing=full world_size=32 train.global_batch=64"),
        ("strategy=ddp model=30b train.micro_batch=6", "strategy=fsdp_full_shard checkpointing=full"),
    ],
)
def test_the_first_remedy_keeps_the_model(overrides: str, first: str) -> None:
    """What is offered first can be run on the same machine, or on more of them, with the model of the user."""
    settings = (*overrides.split(), "data=synthetic", "tracking=none")
    machine = h100s(8)
    values = resolve_auto(compose_values(*settings), machine.device, machine.compute_capability)
    reason = capacity_problem(make_plan(resolve_run_config(values), machine), PREPARED) or ""
    remedies = offered(reason)
    assert " ".join(remedies[0]) == first, reason
    models = [remedy for remedy in remedies if kind(remedy) == "model"]
    assert models == [] or models == remedies[-1:]
