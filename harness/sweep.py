"""The runs of one command: in which order, made where, until every one has its row."""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness import room
from harness.budget import Budget
from harness.items import Item
from harness.records import Record

AGAIN_SECONDS = 0.5  # before a run that another command is at is looked for again


class Place(Protocol):
    """Where runs are made: in this process, side by side in others, as jobs of a cluster."""

    @property
    def side_by_side(self) -> int:
        """How many runs there can be at once."""
        ...

    def item(self, values: dict[str, Any], turn: int) -> Item:
        """The run of these values, planned if its machine is known. Raises UserError if it is impossible."""
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
