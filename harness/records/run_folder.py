"""All paths inside a comparison's folder and a run's folder: no other module has a file's name.

results/NAME/                      ComparisonFolder: the runs of one comparison
  runs.csv, runs.parquet           one row per run
  tracking.json                    what each tracker has of the table
  plan_validation.json             whether the predicted winner of a sweep won, where plan.validate=true
  references/RUN_ID/               single-process runs that the others are compared with
  RUN_ID/                          RunFolder: one run
    run.json                       what the ranks are to run
    record.json                    everything known of the run
    tracking.json                  what each tracker has of the run
    steps.jsonl                    one line per training step
    ranks/rank_00000.json          what a rank reports when it ends
    ranks/rank_00000.pulse         a rank's heartbeat
    logs/rank_0.log                a rank's standard output and error
    logs/stacks_0.txt              stack traces of a rank that hangs
    logs/launcher.log              messages of the launcher
    memory/rank_00000.pickle       a memory snapshot, where measure.memory_snapshot=true
    trace.json                     a simulated step as a trace for Perfetto, where the cluster has hardware
    export/                        what `harness export` writes by default
    checkpoint/                    a checkpoint until it is checked, where train.save is sync or async
  .locks/RUN_ID.lock               locked by the command that works on the run
  .locks/command-ID.json, .lock    the queue of a running command
  .jobs/                           messages between a command and its Slurm jobs
  .reserve                         disk space reserved for the rows of failed runs
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.config.command import NAME_RULE, split_values
from harness.config.from_dict import from_dict, require
from harness.config.schema import Device, RunConfig
from harness.data.corpus import Corpus
from harness.layout.layout import Layout
from harness.records.json_types import type_check
from harness.records.rank_report import RankReport
from harness.util.files import JsonObject, read_json_object
from harness.util.text import UserError, one_line

COMMAND_PREFIX = "command-"  # of a running command's files in .locks

_RECORD = "record.json"

_REFERENCES = "references"

TRACKED = "tracking.json"  # what each tracker has of a run or of a comparison, in its folder

# The files of a comparison that a bundle has. Logs, and what single ranks report, stay behind.
SHARED = (
    *("*.csv", "*.parquet", "report.*", "figures/*", "plan_validation.json"),
    *(f"*/{_RECORD}", "*/run.json", "*/steps.jsonl"),
)


@dataclass(frozen=True)
class Entry:
    """A file or a folder within the folder that has it as an attribute, by its name."""

    name: str

    def __get__(self, folder: "RunFolder | ComparisonFolder", _: type) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class NumberedEntry:
    """A file of each rank, or of each run, within the folder that has it as an attribute: a function of the key."""

    name: str

    def __get__(self, folder: "RunFolder | ComparisonFolder", _: type) -> Callable[[int | str], Path]:
        return lambda key: folder.path / self.name.format(key)


class Heartbeat(NamedTuple):
    """The progress and memory that a rank last reported."""

    phase: str
    step: int
    allocated_bytes: int | None  # on the rank's device, by torch's allocator; None where it is not counted
    host_bytes: int | None  # the resident memory of the process
    beats: int = 0  # the number of heartbeats until this one, any of which is progress


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    spec = Entry("run.json")
    record = Entry(_RECORD)
    steps = Entry("steps.jsonl")
    ranks = Entry("ranks")
    logs = Entry("logs")
    launcher_log = Entry("logs/launcher.log")
    trace = Entry("trace.json")
    export = Entry("export")
    checkpoint = Entry("checkpoint")
    rank_report = NumberedEntry("ranks/rank_{:05d}.json")
    heartbeat = NumberedEntry("ranks/rank_{:05d}.pulse")
    log = NumberedEntry("logs/rank_{}.log")
    stacks = NumberedEntry("logs/stacks_{}.txt")
    memory_snapshot = NumberedEntry("memory/rank_{:05d}.pickle")

    @property
    def comparison(self) -> "ComparisonFolder":
        """The folder of runs that this run is in; for a reference, the folder `references`."""
        return ComparisonFolder(self.path.parent)

    @property
    def is_reference(self) -> bool:
        """Whether this is a single-process run that others are compared with."""
        return self.path.parent.name == _REFERENCES

    @property
    def lock(self) -> Path:
        """The file that a command locks while it works on this run."""
        return self.comparison.lock(self.path.name)

    def read_heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a rank; None before the first."""
        try:
            values = json.loads(self.heartbeat(rank).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return None if type_check(Heartbeat)(values) else Heartbeat(*values)

    def read_rank_reports(self, world_size: int) -> list[RankReport]:
        """Return the reports of the ranks that wrote one; a report is whole or absent. Raise UserError if damaged."""
        paths = [self.rank_report(rank) for rank in range(world_size)]
        return [RankReport.from_json(read_whole(path, RankReport)) for path in paths if path.exists()]


@dataclass(frozen=True)
class ComparisonFolder:
    """The folder of one comparison, results/NAME."""

    path: Path

    runs_csv = Entry("runs.csv")
    runs_parquet = Entry("runs.parquet")
    plan_validation = Entry("plan_validation.json")
    references = Entry(_REFERENCES)
    jobs = Entry(".jobs")
    job_token = Entry(".jobs/token")  # by which the nodes of a job know each other; its user alone can read it
    reserve = Entry(".reserve")
    locks = Entry(".locks")
    lock = NumberedEntry(".locks/{}.lock")  # locked by the command that works on the run, or has the queue
    command = NumberedEntry(".locks/{}.json")

    def run(self, run_id: str) -> RunFolder:
        """Return the folder of one run, directly in this one. Raise UserError for what cannot name it."""
        require(is_run_id(run_id), "run_id", run_id, "cannot name the folder of a run: remove the file that has it")
        return RunFolder(self.path / run_id)

    def commands(self) -> list[str]:
        """Return the names of the commands that list a queue, or were killed while they did."""
        paths = self.locks.glob(f"*{COMMAND_PREFIX}*.json*")
        return sorted({path.name.removeprefix(".").partition(".")[0] for path in paths})

    def damaged_files(self) -> list[Path]:
        """Return the files of queues, of jobs, of a plan and of what trackers have that are not a group of keys."""
        names = (f".locks/{COMMAND_PREFIX}*.json", ".jobs/*.json", TRACKED, f"*/{TRACKED}", "plan_validation.json")
        return [path for name in names for path in sorted(self.path.glob(name)) if not read_json_object(path)]

    def recorded_runs(self, pattern: str = "*") -> Iterator[RunFolder]:
        """Yield the folders of runs that have a record, by name; references and hidden folders are left out."""
        folders = (path.parent for path in self.path.glob(f"{pattern}/{_RECORD}"))
        for folder in sorted(folders, key=lambda folder: folder.name):
            if folder.name != _REFERENCES and not folder.name.startswith("."):
                yield RunFolder(folder)


def is_run_id(text: object) -> bool:
    """Return whether a value can name a folder within another."""
    return isinstance(text, str) and text.isprintable() and re.fullmatch(r"(?!\.\.?$)[^/]+", text) is not None


def comparison_folder(name: str, results_dir: str) -> ComparisonFolder:
    """Return the folder of a comparison by its keys. Raise UserError if they are no path that a script can have."""
    text = str(name)  # the command line may give a number
    require(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is not None, "name", name, NAME_RULE)
    rule = "has a character that cannot be printed: choose a path without"
    require(str(results_dir).isprintable(), "results_dir", results_dir, rule)
    return ComparisonFolder(Path(str(results_dir)) / text)


@dataclass(frozen=True)
class RunSpec:
    """The task of the ranks: the configuration, its layout, and what the parent prepared for them."""

    run_id: str
    config: RunConfig
    layout: Layout
    corpus: Corpus
    device: Device
    threads: int  # per rank
    allocator: str | None = None  # the counting allocator's library, if it could be built
    operator_log: str | None = None  # the library of the log by which a CPU's steps are traced, if it could be built
    timeout_seconds: float = 1800.0  # of the run, which its collectives outlast
    memory_snapshot: bool = False  # whether every rank writes one of its profiled step
    perturbs: bool = False  # whether the ranks train a second time, with other rounding
    simulated_ranks: tuple[int, ...] = ()  # the ranks that a simulated run plays, one after another
    device_guard: str | None = None  # the library that lets torch accept tensors on a CUDA device that is not there
    device_name: str = ""  # the name of the simulated device
    device_bytes: int | None = None  # the bytes of the whole simulated device; None is no limit

    def write(self, run_dir: Path) -> None:
        """Write the run file."""
        RunFolder(run_dir).spec.write_text(
            json.dumps(dataclasses.asdict(self) | {"config": self.config.to_dict()}, indent=1)
        )


def read_run_spec(run_dir: Path) -> RunSpec:
    """Return what the run file says. Raise UserError if it is missing or damaged."""
    values = read_whole(RunFolder(run_dir).spec, RunSpec)
    values["config"] = split_values(values["config"])[0]  # older run files also have the keys of the command
    return from_dict(RunSpec, values)


def read_whole(path: Path, kind: type) -> JsonObject:
    """Return the values of a file for a dataclass. Raise UserError that names the file if it has others."""
    try:
        values: JsonObject = json.loads(path.read_bytes())
        problem = type_check(kind)(values).lstrip(" .")
    except (OSError, ValueError, RecursionError) as error:
        problem = one_line(error)
    if problem:
        raise UserError(f"{path} cannot be read ({problem}): run it again with force=true")
    return values
