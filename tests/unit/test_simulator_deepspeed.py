"""DeepSpeed's code for CUDA on the CPU: how often a step's host waits for all work of its device."""

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config.strategy import AXES
from harness.layout.layout import resolve_layout
from harness.simulator.process_group import fake_process_group
from tests.support.commands import compose_config
from tests.support.deepspeed_accelerator import count_synchronizations

WORLD_SIZE = 2

MICRO_BATCHES = 2

SMALL = (
    "model.num_hidden_layers=1",
    "train.seq_len=8",
    "train.micro_batch=1",
    f"train.global_batch={MICRO_BATCHES * WORLD_SIZE}",
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(0, WORLD_SIZE):
        yield init_device_mesh("cpu", (1, 1, WORLD_SIZE, 1, 1), mesh_dim_names=AXES)


def waits_per_step(mesh: DeviceMesh, *overrides: str) -> int:
    """Return how often the third step waits; from then on DeepSpeed's throughput timer runs (its start_step is 2)."""
    config = compose_config(*overrides, *SMALL)
    return count_synchronizations(config, resolve_layout(config.strategy, WORLD_SIZE), mesh, steps=3)[-1]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_no_preset_waits_for_its_device(strategy: str, mesh: DeviceMesh) -> None:
    assert waits_per_step(mesh, f"strategy={strategy}") == 0


def test_overlap_with_one_owner_of_each_bucket_waits_at_every_bucket(mesh: DeviceMesh) -> None:
    """This was the preset of ZeRO-2: stage_1_and_2.py waits in allreduce_and_copy, which reduces to one owner."""
    assert waits_per_step(mesh, "strategy=zero2", "strategy.options.overlap_comm=true") > MICRO_BATCHES


def test_the_timer_of_the_librarys_defaults_waits_twice_in_a_micro_batch(mesh: DeviceMesh) -> None:
    assert waits_per_step(mesh, "strategy=zero1_defaults") == 2 * MICRO_BATCHES
