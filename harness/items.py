"""The runs that a command asks for, each planned as far as the machine it is for is known."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import compose, run
from harness.config import ClusterConfig, RunConfig
from harness.machine import Machine
from harness.plan.flops import model_flops
from harness.run import Plan
from harness.search import Search, is_asked, planned


@dataclass(eq=False)
class Item:
    """A run to be made. plan is None where only the place that makes it knows the machine."""

    config: RunConfig
    plan: Plan | None
    name: str  # what it is called while it has no record
    turn: int = 0  # repeats come in turns, so that they are not of one moment
    search: Search | None = None  # what follows from its record
    not_before: float = 0.0  # time.monotonic()
    is_elsewhere: bool = False  # another command was at it

    @property
    def folder(self) -> Path:
        return compose.folder_of(self.config.to_dict())

    @property
    def cost(self) -> float:
        """Operations of the whole run, the same however they are divided: only good to compare."""
        return float(model_flops(self.config) * self.config.train.all_steps)


def in_order(items: Iterable[Item]) -> list[Item]:
    """Each run once; the cheap first, whose end tells most of the others, and of equals as asked for."""
    unique: dict[tuple[Path, str], Item] = {}
    for item in items:
        unique.setdefault((item.folder, item.name), item)
    return sorted(unique.values(), key=lambda item: (item.turn, item.cost))


def planned_item(values: dict[str, Any], turn: int, machine_of: Callable[[ClusterConfig], Machine]) -> Item:
    """The run of these values, or the first of those that a search makes of them. Raises UserError."""

    def plan(one: dict[str, Any]) -> Plan:
        config = compose.run_config(one)
        return run.plan(config, machine_of(config.cluster))

    if is_asked(values):
        search = Search(planned(values, plan), run.fits)
        return Item(search.first.config, search.first, search.first.run_id, turn, search)
    found = plan(values)
    return Item(found.config, found, found.run_id, turn)
