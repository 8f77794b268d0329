"""The commands of the guide to simulated and virtual runs can be planned, so that none of them is refused."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

import harness
from harness.hardware.machine import Machine
from harness.runner.plan import make_plan
from harness.runner.simulation import machine_of_run
from harness.util.errors import UserError
from tests.support.commands import compose_config

GUIDE = Path(harness.__file__).parents[1] / "docs" / "guides" / "simulation.md"

THIS = Machine("cpu", "cpu", 1, 2, 0, (2**40,), 2)  # a CPU for two ranks, with memory for every command


def commands() -> list[list[str]]:
    """Return the overrides of every run that the guide's commands make, those of a sweep one after another."""
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    lines = [shlex.split(line)[1:] for block in blocks for line in block.splitlines() if "launch=" in line]
    runs = []
    for line in lines:
        choices = [
            [f"{key}={value}" for value in values.split(",")]
            for key, _, values in (a.partition("=") for a in line if a != "-m")
        ]
        runs += [list(run) for run in itertools.product(*choices)]
    return runs


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
