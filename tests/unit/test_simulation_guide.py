"""The commands of the guide to simulated and virtual runs can be planned, so that none of them is refused."""

import re
from pathlib import Path

import pytest

import harness
from harness.hardware.machine import Machine
from harness.runner.local_machine import machine_of_run
from harness.runner.plan import make_plan
from harness.selftest.run import each_run
from harness.util.text import UserError
from tests.support.commands import compose_config

GUIDE = Path(harness.__file__).parents[1] / "docs" / "guides" / "simulation.md"

THIS = Machine("cpu", "cpu", 1, 2, 0, (2**40,), 2)  # a CPU for two ranks, with memory for every command


def commands() -> list[list[str]]:
    """Return the overrides of every run that the guide's commands make, those of a sweep one after another."""
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    lines = [line.split()[1:] for block in blocks for line in block.splitlines() if "launch=" in line]
    sweeps = (" ".join(word for word in line if word != "-m") for line in lines)
    return [run.split() for sweep in sweeps for run in each_run(sweep)]


def plan(overrides: list[str]) -> None:
    config = compose_config(*overrides, "data=synthetic")
    make_plan(config, machine_of_run(config.to_dict(), lambda _: THIS))


@pytest.mark.parametrize("overrides", commands(), ids=" ".join)
def test_a_command_of_the_guide_can_be_planned(overrides: list[str]) -> None:
    plan(overrides)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    """The check notices what the guide once said."""
    with pytest.raises(UserError, match="choose a multiple of 64"):
        plan(["launch=virtual", "strategy=zero3", "world_size=64", "model=350m"])
