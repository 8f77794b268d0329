"""The cost of the harness: the same training as a plain torchrun script and as one row of a sweep, side by side.

    python -m tests.benchmarks.overhead --pairs 15 --out results/overhead.json

Both have the model, batches, optimizer, warm-up and timed steps of strategy=ddp model=tiny on two CPU processes, with
the same threads and environment (GOMP_SPINCOUNT too, so that its gain is not credited to the harness). The benchmark
fails if the two do not train the same.

Whole runs come one after the other, in alternating order. One process runs all rows, as in a sweep: from the second row
on, ranks are forked from a warm process and the reference is on file. The first pair, the cold one, is reported
separately. A row's wall time is all that a sweep does for it once its configuration is composed: plan, ranks, proof and
record. The script's is that of its command.

Steps come from two runs that are alive at the same time, one of which is always stopped: while both have steps to time
they take turns, so that a machine that is slower for a while is slower for both. The end of a turn falls into one step
of many, which does not change a median. The process that watches the row's ranks is never stopped: its work is in both
sides' steps.

Imports are inside the functions, because multiprocessing imports this module anew in every rank, but not the harness's
modules.
"""

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]

RANKS = 2

TURN_SECONDS = 0.5

LOSS_BOUND = 1e-5  # relative, of every step

RESAMPLES = 10_000

FEWEST = 6  # ratios of which the least and the most enclose the median with 95 % (1 - 2 / 2^6 = 0.97)

Result = dict[str, Any]  # step_seconds, seconds (of each timed step), losses, wall_seconds


def main() -> None:
    from tests.support.campaigns import parse_options

    options = parse_options(
        __doc__,
        pairs={"default": 15, "help": "of each kind, not counting a cold one"},
        steps={"type": int, "nargs": "+", "default": [10, 40], "help": "timed steps of whole runs"},
        steps_in_turns={"default": 150, "help": "timed steps of the runs that take turns"},
        out={"default": ROOT / "results" / "overhead.json"},
    )
    with tempfile.TemporaryDirectory() as scratch:
        whole = [Pair(steps, Path(scratch) / str(steps)) for steps in options.steps]
        turns = Pair(options.steps_in_turns, Path(scratch) / "turns")
        report = {
            "machine": describe_machine(),
            "whole_runs": [
                compare_sides("wall_seconds", pair.steps, pair.run_alternately, options.pairs, cold=1) for pair in whole
            ],
            "steps_in_turns": compare_sides("step_seconds", turns.steps, turns.run_in_turns, options.pairs),
        }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report) + "\n")
    for comparison in report["whole_runs"]:
        print("a whole run,", describe(comparison))
    print("a step,", describe(report["steps_in_turns"]))
    print(options.out)


def describe_machine() -> dict[str, Any]:
    from harness.config.schema import ClusterConfig
    from harness.launcher.forkserver import rank_environment
    from harness.measure.environment import collect_environment
    from harness.records.provenance import git_commit, versions
    from harness.runner import resolve

    environment = rank_environment("cpu", RANKS)
    return {
        "versions": versions(),
        "commit": git_commit(),
        "environment": collect_environment(resolve.detect_machine(ClusterConfig("local", device="cpu"))),
        "ranks": {name: environment[name] for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")},
    }


def compare_sides(
    key: str, steps: int, run: Callable[[int], dict[str, Result]], pairs: int, cold: int = 0
) -> dict[str, Any]:
    """Return the pairs of one kind and their ratios, harness over script, without the first `cold` ones."""
    measured = []
    for index in range(cold + pairs):
        results = run(index)
        check_same_losses(results["bare"]["losses"], results["harness"]["losses"])
        ratio = results["harness"][key] / results["bare"][key]
        measured.append({"cold": index < cold, **results, "ratio": ratio})
    summary = summarize([pair["ratio"] for pair in measured if not pair["cold"]])
    return {"of": key, "steps": steps, "ratio": summary, "pairs": measured}


class Pair:
    """The script and the row of one training, which can be run any number of times."""

    def __init__(self, steps: int, scratch: Path) -> None:
        from harness.runner import resolve
        from harness.runner.launch_run import build_run_spec
        from harness.runner.plan import make_plan
        from tests.support.commands import compose

        self.steps = steps
        values = ("strategy=ddp", "model=tiny", "cluster.device=cpu", f"world_size={RANKS}", "force=true")
        self.config, self.command = compose(*values, f"train.steps={steps}", "name=overhead", f"results_dir={scratch}")
        planned = make_plan(self.config, resolve.detect_machine(self.config.cluster), self.command)
        self.directory, self.folder = planned.folder.path, scratch / "bare"
        self.folder.mkdir(parents=True)
        build_run_spec(planned)[0].write(self.folder)

    def run_alternately(self, index: int) -> dict[str, Result]:
        sides = {"bare": lambda: self.start_script().finish(), "harness": self.run_row}
        return {name: sides[name]() for name in sorted(sides, reverse=index % 2 == 0)}

    def run_in_turns(self, index: int) -> dict[str, Result]:
        script = self.start_script()
        script.command.stdout.readline()  # it is warm
        with taking_turns(script.command.pid, self.phase):
            row = self.run_row()
        return {"bare": script.finish(), "harness": row}

    def phase(self) -> str:
        """Return the phase of the row's ranks."""
        from harness.records.run_folder import RunFolder

        beat = RunFolder(self.directory).read_heartbeat(0)
        return beat.phase if beat else ""

    def run_row(self) -> Result:
        from tests.support.commands import execute_run

        started = time.perf_counter()
        record = execute_run(self.config, self.command)
        wall_seconds = time.perf_counter() - started
        if record.row["status"] != "ok":
            raise SystemExit(f"the harness's run ended without a measured row: {record.row['reason']}")
        lines = (self.directory / "steps.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines[: self.config.train.warmup_steps + self.steps]]  # then profiled
        return {
            "step_seconds": record.row["step_seconds"],
            "seconds": [entry["seconds"] for entry in entries if entry["phase"] == "timed"],
            "losses": [entry["loss"] for entry in entries],
            "wall_seconds": wall_seconds,
        }

    def start_script(self) -> "Script":
        """Start the script as its user does."""
        from harness.launcher.forkserver import rank_environment

        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command += ["--master-port", str(free_port()), "-m", "tests.benchmarks.bare_ddp", str(self.folder)]
        started, environment = time.perf_counter(), os.environ | rank_environment("cpu", RANKS)
        messages = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the script)
        running = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=messages, text=True
        )
        return Script(running, messages, started)


@dataclass
class Script:
    command: "subprocess.Popen[str]"
    messages: Any
    started: float

    def finish(self) -> Result:
        output, _ = self.command.communicate()
        wall_seconds = time.perf_counter() - self.started
        if self.command.returncode != 0:
            self.messages.seek(0)
            raise SystemExit(f"the script failed:\n{self.messages.read()}")
        result: Result = json.loads(output.splitlines()[-1])
        return result | {"wall_seconds": wall_seconds}


@contextmanager
def taking_turns(script: int, phase: Callable[[], str]) -> Iterator[None]:
    """Stop the script and the row's ranks in turns while the row's steps are timed; otherwise stop the script.

    The row starts up before that and proves itself afterwards, and no script is to be timed beside either.
    """
    done = threading.Event()

    def take() -> None:
        is_scripts_turn = False
        while not done.wait(TURN_SECONDS):
            is_scripts_turn = not is_scripts_turn and phase() == "timed"
            resume_one_side(script, is_scripts_turn)

    resume_one_side(script, False)
    turns = threading.Thread(target=take)
    turns.start()
    try:
        yield
    finally:
        done.set()
        turns.join()
        resume_one_side(script, None)


def resume_one_side(script: int, is_scripts_turn: bool | None) -> None:
    """Let one side's processes run and stop the other's; None lets both run."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            for process in (child, *child.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.resume() if is_scripts_turn in (None, child.pid == script) else process.suspend()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def check_same_losses(bare: Sequence[float], harness: Sequence[float]) -> None:
    """Raise SystemExit if any step's losses differ."""
    for step, (expected, loss) in enumerate(zip(bare, harness, strict=True)):
        if not abs(loss - expected) <= LOSS_BOUND * abs(expected):
            raise SystemExit(f"not the same training: loss {expected} in the script, {loss} in step {step} of the row")


def summarize(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median and its 95 % interval by the bootstrap's percentiles (Efron 1979); None with too few ratios."""
    interval = None
    if len(ratios) >= FEWEST:
        chance = random.Random(0)
        medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
        interval = [medians[round(share * (RESAMPLES - 1))] for share in (0.025, 0.975)]
    return {"median": statistics.median(ratios) if ratios else None, "interval": interval}


def describe(comparison: dict[str, Any]) -> str:
    median, interval = comparison["ratio"]["median"], comparison["ratio"]["interval"]
    cold_ratios = [pair["ratio"] for pair in comparison["pairs"] if pair["cold"]]
    counted = f"{comparison['steps']} steps, {len(comparison['pairs']) - len(cold_ratios)} pairs, harness over script"
    known = "unknown" if median is None else f"{median:.3f}"
    within = " (95 %: {:.3f} to {:.3f})".format(*interval) if interval else ""
    return f"{counted}: {known}{within}" + "".join(f"; cold {ratio:.3f}" for ratio in cold_ratios)


if __name__ == "__main__":
    main()
