"""The runs of one command: in which order, made where, until every one has its row."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness import launch, room, run, stored
from harness.budget import Budget
from harness.compose import folder_of
from harness.config import ClusterConfig, ModelConfig, RunConfig
from harness.display import Display
from harness.errors import UserError
from harness.machine import Machine, look
from harness.plan.flops import model_flops
from harness.records import Record
from harness.run import Plan
from harness.search import Search

AGAIN_SECONDS = 0.5  # before a run that another command is at is looked for again


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
        return folder_of(self.config.to_dict())

    @property
    def cost(self) -> float:
        """Operations of the whole run, the same however they are divided: only good to compare."""
        return float(model_flops(self.config) * self.config.train.all_steps)


class Place(Protocol):
    """Where runs are made: in this process, side by side in others, as jobs of a cluster."""

    @property
    def side_by_side(self) -> int:
        """How many runs there can be at once."""
        ...

    def machine(self, cluster: ClusterConfig) -> Machine:
        """What to plan for. Raises UserError."""
        ...

    def on_file(self, item: Item) -> Record | None:
        """Its record, if that stands."""
        ...

    def takes(self, item: Item) -> bool:
        """Whether it can be begun now, beside what runs."""
        ...

    def start(self, item: Item) -> None: ...

    def ended(self) -> list[tuple[Item, Record | None]]:
        """What ended, after waiting a moment if nothing did; None: another command is at it."""
        ...

    def interrupt(self) -> list[tuple[Item, Record]]:
        """Ends what it runs; the records of that."""
        ...

    def close(self) -> None: ...


class Watcher(Protocol):
    """Who is told how far the sweep is."""

    def begins(self, item: Item) -> None: ...

    def has(self, item: Item, record: Record, is_new: bool) -> None: ...

    def say(self, line: str) -> None: ...


def in_order(items: Iterable[Item]) -> list[Item]:
    """Each run once; the cheap first, whose end tells most of the others, and of equals as asked for."""
    unique: dict[tuple[Path, str], Item] = {}
    for item in items:
        unique.setdefault((item.folder, item.name), item)
    return sorted(unique.values(), key=lambda item: (item.turn, item.cost))


@dataclass
class Sweep:
    place: Place
    watcher: Watcher
    budget: Budget
    waiting: list[Item]
    running: list[Item] = field(default_factory=list)

    def go(self) -> None:
        """Until every run has its row, the budget is spent, or the disk is full. Raises KeyboardInterrupt."""
        self.waiting = [item for item in self.waiting if not self.is_done(item)]
        try:
            while self.waiting or self.running:
                self.begin()
                if not self.running:
                    if not self.waiting:
                        return
                    time.sleep(max(0.0, min(item.not_before for item in self.waiting) - time.monotonic()))
                    continue
                for item, record in self.place.ended():
                    self.end(item, record)
        except KeyboardInterrupt:
            for item, record in self.place.interrupt():
                self.watcher.has(item, record, True)
            raise
        finally:
            self.place.close()

    def is_done(self, item: Item) -> bool:
        record = self.place.on_file(item)
        if record is not None:
            self.watcher.has(item, record, False)
            self.follow(item, record)
        return record is not None

    def begin(self) -> None:
        """Everything that can be begun now, in order."""
        now = time.monotonic()
        for item in list(self.waiting):
            if item.not_before > now or not self.place.takes(item):
                continue
            why_not = self.budget.spent() or self.full(item)
            if why_not:
                self.watcher.say(f"{why_not}: {len(self.waiting)} runs are not begun; the same command goes on")
                self.waiting.clear()
                return
            self.waiting.remove(item)
            self.running.append(item)
            self.budget.made += 1
            if not item.is_elsewhere:
                self.watcher.begins(item)
            self.place.start(item)

    def full(self, item: Item) -> str:
        return "" if room.is_left(item.folder) else f"no room is left in {item.folder}"

    def end(self, item: Item, record: Record | None) -> None:
        self.running.remove(item)
        if record is None:
            if not item.is_elsewhere:
                self.watcher.say(f"{item.name} is being run by another command: coming back to it")
            item.is_elsewhere, item.not_before = True, time.monotonic() + AGAIN_SECONDS
            self.budget.made -= 1
            self.waiting.append(item)
            return
        self.budget.ended(record["row"]["status"])
        self.watcher.has(item, record, True)
        self.follow(item, record)

    def follow(self, item: Item, record: Record) -> None:
        """What a search tries next, before everything else."""
        if item.search is None:
            return
        found = item.search.next(record)
        if found is None:
            self.watcher.say(item.search.result())
            return
        following = Item(found.config, found, found.run_id, item.turn, item.search)
        if not self.is_done(following):
            self.waiting.insert(0, following)


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
    """One run after another, in this process."""

    side_by_side = 1

    def __init__(self, models: Sequence[ModelConfig], display: Display) -> None:
        self.models, self.display = models, display
        self.done: list[tuple[Item, Record | None]] = []

    def machine(self, cluster: ClusterConfig) -> Machine:
        found = this_machine(cluster)
        launch.prepare(found.device)  # its imports go on while the runs are planned
        return found

    def on_file(self, item: Item) -> Record | None:
        return standing(item, self.display.say)

    def takes(self, item: Item) -> bool:
        return not self.done

    def start(self, item: Item) -> None:
        assert item.plan is not None
        means = run.Means(models=self.models, tick=lambda at: self.display.tick(item, at), say=self.display.say)
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
