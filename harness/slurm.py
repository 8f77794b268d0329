"""Runs as jobs of Slurm. The truth is in files (harness.letters) and the runs' records, not in what Slurm says."""

import importlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins

from harness import compose, locks, queue, records, refused, stored
from harness.display import Display
from harness.errors import UserError
from harness.items import Item
from harness.letters import FOLDER, file_of, job_of, key_of, told
from harness.queue import Queue
from harness.records import Record, atomic_write_json
from harness.search import candidates, is_asked
from harness.typed import from_dict

POLL_SECONDS = 1.0
GONE_SECONDS = 10.0  # from a job's leaving the queue to its being given up: files of a shared folder may come late


class SubmititSlurm(BasicLauncher):
    """What conf/hydra/launcher/submitit_slurm.yaml names: composes jobs as ever; Slurm below takes the keys."""

    __module__ = "hydra_plugins.harness"

    def __init__(self, **_: Any) -> None:
        super().__init__()


def register() -> None:
    """Hydra takes launchers of the package hydra_plugins alone: there this one is found too."""
    try:
        package = importlib.import_module("hydra_plugins")
    except ImportError:  # no plugin is installed
        package = sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
        package.__path__ = []
    package.harness = sys.modules[__name__]  # type: ignore[attr-defined]
    Plugins.instance().register(SubmititSlurm)


def is_asked_for(launcher: dict[str, Any]) -> bool:
    return str(launcher.get("_target_")).endswith(SubmititSlurm.__name__)


@dataclass
class Submitted:
    """A combination on its way."""

    item: Item
    values: dict[str, Any]
    job: str | None = None  # 12, or 12_3 of an array; None: not submitted yet
    missing_since: float | None = None  # time.monotonic() at which the job was not in the queue any more
    begun: list[str] = field(default_factory=list)


class Slurm:
    """Submits all it is given, in arrays, and waits for the answers. Jobs outlive this command; the next finds them."""

    def __init__(self, launcher: dict[str, Any], display: Display) -> None:
        keys = {key: value for key, value in launcher.items() if key != "_target_"}
        self.queue: Queue = from_dict(Queue, keys, "hydra.launcher") if is_asked_for(launcher) else Queue()
        self.display = display
        self.values: dict[Item, dict[str, Any]] = {}
        self.at_work: dict[Item, Submitted] = {}
        self.looked_at = 0.0

    @property
    def side_by_side(self) -> int:
        return self.queue.array_parallelism

    def item(self, values: dict[str, Any], turn: int) -> Item:
        """Its plan is its node's affair. Raises UserError if there can be no configuration."""
        config = compose.run_config(candidates(values)[0] if is_asked(values) else values)
        named = (config.strategy.name, config.checkpointing.name, config.model.name, key_of(values))
        item = Item(config, None, "-".join(named), turn)
        self.values[item] = values
        return item

    def on_file(self, item: Item) -> Record | None:
        """The record of the node's answer; of several runs the last that is ok."""
        runs = told(file_of(item, "answer"))
        found = [stored.standing(item.config, item.folder / run, self.display.say) for run in runs]
        if not found or None in found:
            return None
        return best([record for record in found if record is not None])

    def takes(self, item: Item) -> bool:
        return True

    def start(self, item: Item) -> None:
        self.at_work[item] = Submitted(item, self.values[item])

    def ended(self) -> list[tuple[Item, Record | None]]:
        new = [one for one in self.at_work.values() if one.job is None]
        if new:
            self.submit(new)
        time.sleep(max(0.0, self.looked_at + POLL_SECONDS - time.monotonic()))
        self.looked_at = time.monotonic()
        states = queue.states({one.job for one in self.at_work.values() if one.job})
        found: list[tuple[Item, Record | None]] = []
        for item, one in list(self.at_work.items()):
            record = self.end_of(one, states)
            if record is not None:
                found.append((item, record))
                del self.at_work[item]
        self.display.show()
        return found

    def submit(self, new: Sequence[Submitted]) -> None:
        """Every one that no other command has submitted, those of equal needs as one array."""
        folders = {one.item.folder for one in new}
        for folder in folders:
            jobs = folder / FOLDER
            jobs.mkdir(parents=True, exist_ok=True)
            with locks.alone(jobs / "submission"):
                mine = [one for one in new if one.item.folder == folder]
                alive = queue.states({job for one in mine if (job := job_of(one.item))})
                if alive is None:
                    raise UserError("hydra/launcher=submitit_slurm: squeue does not say which jobs there are")
                for one in mine:
                    job = job_of(one.item)
                    one.job = job if job in alive else None
                fresh = [one for one in mine if one.job is None]
                for header, group in arrays(self.queue, fresh):
                    self.submit_array(jobs, header, group)

    def submit_array(self, jobs: Path, header: str, group: Sequence[Submitted]) -> None:
        for one in group:
            file_of(one.item, "answer").unlink(missing_ok=True)
            file_of(one.item, "begun").unlink(missing_ok=True)
            bare = one.item.folder / refused.bare_id(one.values)  # which lost() may have left
            shutil.rmtree(bare, ignore_errors=True)
            atomic_write_json(file_of(one.item), {"values": one.values, "job": None})
        works = [file_of(one.item).resolve() for one in group]
        number = queue.submit(queue.script(header, self.queue, works, jobs.resolve()), jobs)
        for index, one in enumerate(group):
            one.job = f"{number}_{index}"
            atomic_write_json(file_of(one.item), {"values": one.values, "job": one.job})
        self.display.say(f"Slurm job {number}: {len(group)} runs")

    def end_of(self, one: Submitted, states: dict[str, str] | None) -> Record | None:
        """Its record, if its node answered or its job is gone without."""
        item = one.item
        one.begun = told(file_of(item, "begun")) or one.begun
        if one.begun:
            self.display.at(item, item.folder / one.begun[-1])
        runs = told(file_of(item, "answer"))
        with suppress(UserError):
            if runs:
                return best([records.read_record(item.folder / run) for run in runs])
        if states is None or one.job in states:  # Slurm does not answer, or has it still
            self.display.note(item, "" if states is None else states[str(one.job)].lower())
            one.missing_since = None
            return None
        if any(locks.is_held(item.folder / run) for run in one.begun):  # its node is at it, whatever Slurm thinks
            return None
        one.missing_since = one.missing_since or time.monotonic()
        if time.monotonic() - one.missing_since < GONE_SECONDS:
            return None
        return lost(one)

    def interrupt(self) -> list[tuple[Item, Record]]:
        """Nothing ends: jobs go on."""
        numbers = sorted({str(one.job).partition("_")[0] for one in self.at_work.values() if one.job})
        if numbers:
            goes = f"Slurm's jobs {', '.join(numbers)} go on; the same command waits for them, scancel ends them"
            self.display.say(goes)
        return []

    def close(self) -> None:
        pass


def write_scripts(place: Slurm, items: Sequence[Item]) -> list[Path]:
    """For launch=script: batch scripts to submit by hand, with the files that they name."""
    written = []
    for folder in dict.fromkeys(item.folder for item in items):
        jobs = folder / FOLDER
        jobs.mkdir(parents=True, exist_ok=True)
        mine = [Submitted(item, place.values[item]) for item in items if item.folder == folder]
        for number, (header, group) in enumerate(arrays(place.queue, mine)):
            for one in group:
                atomic_write_json(file_of(one.item), {"values": one.values, "job": None})
            works = [file_of(one.item).resolve() for one in group]
            path = folder / ("sweep.sbatch" if number == 0 else f"sweep_{number}.sbatch")
            records.atomic_write_text(path, queue.script(header, place.queue, works, jobs.resolve()))
            written.append(path)
    return written


def arrays(asked: Queue, group: Sequence[Submitted]) -> Iterator[tuple[str, list[Submitted]]]:
    """Those of equal needs, as many as Slurm takes at once, with the lines that say the needs."""
    by_needs: dict[str, list[Submitted]] = {}
    for one in group:
        by_needs.setdefault(queue.header(asked, one.item.config), []).append(one)
    for header, alike in by_needs.items():
        for first in range(0, len(alike), queue.MOST_IN_ARRAY):
            yield header, alike[first : first + queue.MOST_IN_ARRAY]


def best(found: Sequence[Record]) -> Record:
    """Of a search's runs the last that is ok, else the last."""
    ok = [record for record in found if record["row"]["status"] == "ok"]
    return (ok or list(found))[-1]


ENDS = {"CANCELLED": "interrupted", "PREEMPTED": "interrupted", "TIMEOUT": "timeout", "OUT_OF_MEMORY": "oom"}


def lost(one: Submitted) -> Record:
    """The row of a run whose job ended without its word: what Slurm says of the job."""
    state = queue.end_state(str(one.job))
    ending = {
        "status": ENDS.get(state, "error"),
        "reason": f"Slurm's job {one.job} ended as {state or 'unknown'} before its node had recorded the run",
    }
    record = amended(one, ending)
    if ending["status"] != "interrupted":  # which the next command makes again; the rest stands as other ends do
        atomic_write_json(file_of(one.item, "answer"), {"runs": [record["row"]["run_id"]]})
    return record


def amended(one: Submitted, ending: dict[str, str]) -> Record:
    """The row that its node had begun, with that end; a bare one if it had not come so far."""
    for run in reversed(one.begun):
        with suppress(UserError):
            record = records.read_record(one.item.folder / run)
            if record["row"]["status"] == "interrupted":
                records.write_record(one.item.folder / run, record | {"row": record["row"] | ending})
            return records.read_record(one.item.folder / run)
    return refused.values_only(one.values, ending["reason"], ending["status"])
