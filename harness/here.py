"""Runs one after another in this process; and what that has in common with other ways on this machine."""

from collections.abc import Sequence
from typing import Any

from harness import launch, run, stored
from harness.config import ClusterConfig, ModelConfig
from harness.display import Display
from harness.errors import UserError
from harness.items import Item, planned_item
from harness.machine import Machine, look
from harness.records import Record
from harness.team import Team


def this_machine(cluster: ClusterConfig) -> Machine:
    if cluster.nodes > 1:
        raise UserError(
            f"cluster.nodes={cluster.nodes} is more than this machine: choose 1, or hydra/launcher=submitit_slurm"
        )
    return look(cluster)


def standing(item: Item, say: stored.Say) -> Record | None:
    """The record on file of a planned run."""
    assert item.plan is not None
    return stored.standing(item.config, item.plan.directory, say)


class Here:
    """One run after another, in this process; in a cluster's job, over the nodes that it leads."""

    side_by_side = 1

    def __init__(self, models: Sequence[ModelConfig], display: Display, team: Team | None = None) -> None:
        self.models, self.display, self.team = models, display, team
        self.done: list[tuple[Item, Record | None]] = []

    def item(self, values: dict[str, Any], turn: int) -> Item:
        return planned_item(values, turn, self.machine)

    def machine(self, cluster: ClusterConfig) -> Machine:
        found = look(cluster) if self.team else this_machine(cluster)
        launch.prepare(found.device)  # its imports go on while the runs are planned
        return found

    def on_file(self, item: Item) -> Record | None:
        return standing(item, self.display.say)

    def takes(self, item: Item) -> bool:
        return not self.done

    def start(self, item: Item) -> None:
        assert item.plan is not None
        means = run.Means(
            models=self.models,
            tick=lambda at: self.display.tick(item, at),
            say=self.display.say,
            team=self.team,
        )
        self.done.append((item, run.execute(item.plan, means)))

    def ended(self) -> list[tuple[Item, Record | None]]:
        ((item, record),) = self.done
        if record is not None and record["row"]["status"] == "interrupted":  # by a signal to this process
            raise KeyboardInterrupt
        self.done = []
        return [(item, record)]

    def interrupt(self) -> list[tuple[Item, Record]]:
        return [(item, record) for item, record in self.done if record is not None]

    def close(self) -> None:
        pass
