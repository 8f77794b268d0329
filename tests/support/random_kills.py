"""Random kills of a real sweep's processes, after which the same command must come to the undisturbed table.

python -m tests.support.random_kills --kills 300 --table results/random_kills.csv
Every line of the table is a sweep in a folder of its own, whose number is the seed of its kills. The lines that are
there stay: a second call goes on after them, until all together have so many kills.
"""

import collections
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.records.store import read_all
from harness.util.text import one_line
from tests.support.campaigns import REQUIRED_PATH, Line, complete_table, parse_options, read_table
from tests.support.folder_invariants import Ledger, differences, litter, moment
from tests.support.processes import PATIENCE_SECONDS, Command, kill_one, run_to_end, seconds_until_gone, start

GONE_SECONDS = 10.0  # for what a dead command leaves, on a machine with other work

FIND_SECONDS = 3.0  # to wait for a process of the kind to be killed

LOOK_SECONDS = 0.1

AGAIN = ("retry=error", "retry_pause_seconds=1")  # a forkserver that is killed while it starts ranks is an error


@dataclass(frozen=True, eq=False)
class Way:
    """A way to make a sweep, with the kinds of processes that can be killed and how often each is."""

    name: str
    arguments: tuple[str, ...]
    kinds: dict[str, int]
    commands: int = 1
    longest_seconds: float = 12.0  # from a command's start, or from one kill, to the next: a few runs


PARENTS = {
    "parent": 40,
    "parent SIGTERM": 8,
    "parent SIGINT": 8,
    "parent SIGHUP": 4,
    "group SIGINT": 4,
    "group SIGHUP": 4,
}

RANKS = {"rank": 22, "forkserver": 12, "tracker": 3}

ONE_BY_ONE = (*AGAIN, "strategy=ddp,zero2,fsdp_full_shard,tp")  # the reference, a single process, is made too

BESIDE = (*AGAIN, "strategy=single", "world_size=1", "checkpointing=none,full,selective,attention", "sweep.parallel=2")

WAYS = {  # with their shares of the folders
    Way("one by one", ONE_BY_ONE, PARENTS | RANKS): 5,
    Way("side by side", BESIDE, PARENTS | RANKS | {"slot": 20}): 4,
    Way("two commands", ONE_BY_ONE, PARENTS | RANKS, commands=2): 2,
}


@dataclass
class Tally:
    """The kills so far, and the invariants that were violated."""

    kills: collections.Counter[tuple[str, str, str]] = field(default_factory=collections.Counter)  # way, kind, moment
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)  # of rows that are errors
    lived_on_seconds: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    folders: int = 0

    def violated(self, problems: Sequence[str], where: str) -> None:
        for problem in problems:
            self.violations.append(f"{where}: {problem}")
            print(f"VIOLATED {where}: {problem}", flush=True)


def undisturbed(way: Way, folder: Path) -> tuple[Path, float]:
    """Run the sweep without kills first, so that all that is built once exists; return its folder and its seconds."""
    started = time.monotonic()
    status, output = run_to_end(folder, *way.arguments)
    if status != 0 or not read_all(folder / "sweep").records:
        raise SystemExit(f"the undisturbed sweep ended with {status}: {output}")
    return folder, time.monotonic() - started


def disturbed(way: Way, calm: tuple[Path, float], folder: Path, chance: random.Random, tally: Tally, most: int) -> None:
    """Start one folder's sweep until it is finished, with at most so many kills, and compare its table."""
    tally.folders += 1
    ledger, goal, longest_seconds = Ledger(folder), tally.kills.total() + most, min(way.longest_seconds, calm[1])
    for attempt in range(most + 3):
        where = f"{folder.name} attempt {attempt}"
        commands = [start(folder, way.arguments) for _ in range(way.commands)]
        killed = kills(way, longest_seconds, commands, ledger, chance, tally, where, goal)
        rows = [record.row for record in read_all(folder / "sweep").records] if (folder / "sweep").exists() else []
        reasons = [row["reason"] for row in rows if row["status"] == "error"]
        tally.reasons.update(reason.partition(";")[0][:90] for reason in reasons)
        tally.violated([f"Ctrl-C made an error: {reason}" for reason in reasons if "SIGINT" in reason], where)
        for command in commands:
            # Python's own resource tracker prints a traceback when it is killed.
            if "Traceback" in command.output() and (command, "tracker") not in killed:
                tally.violated([f"a traceback: {command.output()[-1500:]}"], where)
            status = command.process.returncode
            if status not in (0, 1) and not any((command, kind) in killed for kind in PARENTS):
                tally.violated([f"exit status {status}: {command.output()[-500:]}"], where)
        if not killed and rows and all(row["status"] == "ok" for row in rows):
            tally.violated(differences(folder, calm[0]), where)
            tally.violated([f"left behind: {name}" for name in litter(folder)], where)
            return
    tally.violated([f"not done: {[(row['run_id'], row['status'], row['reason']) for row in rows]}"], folder.name)


def kills(
    way: Way,
    longest_seconds: float,
    commands: Sequence[Command],
    ledger: Ledger,
    chance: random.Random,
    tally: Tally,
    where: str,
    goal: int,
) -> list[tuple[Command, str]]:
    """Kill processes at random moments until every command has ended; return the kinds killed of each command."""
    killed: list[tuple[Command, str]] = []

    def living() -> list[Command]:
        return [command for command in commands if command.process.poll() is None]

    while living():
        is_over = tally.kills.total() >= goal
        wait = PATIENCE_SECONDS if is_over else chance.uniform(0, longest_seconds)
        ends_at = time.monotonic() + wait
        while time.monotonic() < ends_at and living():
            tally.violated(ledger.look(), where)
            time.sleep(LOOK_SECONDS)
        if not (alive := living()):
            break
        if is_over:
            tally.violated([f"not over after {wait:.0f} s: {alive[0].output()[-500:]}"], where)
            for command in alive:
                os.killpg(command.process.pid, signal.SIGKILL)
        command, kind = chance.choice(alive), chance.choices(list(way.kinds), list(way.kinds.values()))[0]
        at = moment(ledger.folder)
        if not strike(command, kind, chance):
            continue
        tally.kills[way.name, kind, at] += 1
        print(f"{tally.kills.total()} {where}: {kind} killed at {at}", flush=True)
        killed.append((command, kind))
    for command in commands:
        command.wait()
        lived_on, left = seconds_until_gone(command, GONE_SECONDS)
        tally.lived_on_seconds.append(lived_on)
        tally.violated([f"alive after {lived_on:.0f} s: {what}" for what in left], where)
    tally.violated(ledger.look(), where)
    return killed


def strike(command: Command, kind: str, chance: random.Random) -> bool:
    """Kill a process of the kind; return whether there was one."""
    process_kind, _, name = kind.partition(" ")
    if process_kind == "group":  # Ctrl-C, or a terminal that is closed
        os.killpg(command.process.pid, getattr(signal, name))
        return True
    ends_at = time.monotonic() + FIND_SECONDS
    while time.monotonic() < ends_at:
        if kill_one(command, process_kind, chance, getattr(signal, name or "SIGKILL")):
            return True
        time.sleep(0.02)
    return False


COLUMNS = (
    *("folder", "way", "kills", "kinds", "moments"),
    *("lost", "doubled", "orphans", "other", "longest_life_seconds", "seconds", "violations"),
)

# The kinds of violations that are counted, by words that one of each has; any other is counted as `other`.
VIOLATIONS = {
    "lost": ("has no row", "is gone", "half a record", "not done"),
    "doubled": ("should not be", "was touched", "runs.csv lists"),
    "orphans": ("alive after",),
}


def kind_of_violation(text: str) -> str:
    return next((kind for kind, words in VIOLATIONS.items() if any(word in text for word in words)), "other")


def line_of(tally: Tally, way: Way, folder: str, seconds: float) -> Line:
    """Return the line of one sweep."""
    counts = collections.Counter(kind_of_violation(text) for text in tally.violations)
    _, kinds, moments = zip(*tally.kills.elements(), strict=True) if tally.kills else ((), (), ())
    return {
        "folder": folder,
        "way": way.name,
        "kills": tally.kills.total(),
        "kinds": "; ".join(kinds),
        "moments": "; ".join(moments),
        **{kind: counts[kind] for kind in (*VIOLATIONS, "other")},
        "longest_life_seconds": round(max(tally.lived_on_seconds, default=0), 2),
        "seconds": round(seconds),
        "violations": " | ".join(one_line(text) for text in tally.violations),
    }


def main() -> None:
    arguments = parse_options(__doc__, kills={"default": 300}, table=REQUIRED_PATH)
    calm: dict[tuple[str, ...], tuple[Path, float]] = {}

    def left() -> int:
        return arguments.kills - sum(int(line["kills"]) for line in read_table(arguments.table))

    def cases() -> Iterator[tuple[str]]:
        for number in itertools.count():
            if left() <= 0:
                lines = read_table(arguments.table)
                print(*(f"{sum(int(line[kind]) for line in lines)} {kind}" for kind in COLUMNS[5:9]), sep=", ")
                return
            yield (str(number),)

    def run(case: tuple[str]) -> Line:
        chance, tally, started = random.Random(int(case[0])), Tally(), time.monotonic()
        way = chance.choices(list(WAYS), list(WAYS.values()))[0]
        if way.arguments not in calm:
            calm[way.arguments] = undisturbed(way, Path(scratch, f"calm_{len(calm)}"))
        most = min(chance.randint(4, 10), left())
        disturbed(way, calm[way.arguments], Path(scratch, f"folder_{case[0]}"), chance, tally, most)
        return line_of(tally, way, case[0], time.monotonic() - started)

    with tempfile.TemporaryDirectory() as scratch:
        complete_table(arguments.table, COLUMNS, COLUMNS[:1], cases(), run, lambda line: not line["violations"])


def report(tally: Tally, seconds: float) -> None:
    print(f"{tally.kills.total()} kills in {tally.folders} folders and {seconds:.0f} s")
    for index, what in enumerate(("way", "kind", "moment")):
        counted = collections.Counter(kill[index] for kill in tally.kills.elements())
        print(f"by {what}: {dict(counted.most_common())}")
    print(f"errors: {dict(tally.reasons.most_common())}")
    print(f"longest life after the parent: {max(tally.lived_on_seconds, default=0):.2f} s")
    print(f"violations: {len(tally.violations)}", *tally.violations, sep="\n  ")


if __name__ == "__main__":
    main()
