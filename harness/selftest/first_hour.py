"""The first hour on GPUs, in a folder that harness.selftest.bundle made: `python -m harness.selftest.first_hour`.

It installs what this Python lacks, runs the parts of a group of first_hour.toml one after another within the group's
time, and prints the table of peaks. A part that fails or is out of time stops no other. Only the standard library is
imported, since nothing is installed yet.
"""

import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

RESULTS, SIMULATED = Path("results"), Path("simulated")

OUT_OF_TIME = (124, 137)  # what comes of `timeout` that interrupts or kills

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

GROUPS: dict[str, Any] = TABLE["groups"]


def part_words(group: str, part: Mapping[str, Any], results: Path, *settings: str) -> list[str]:
    """Return the words behind `python` that run a part, of which settings change the runs of sweeps alone."""
    if "steps" in part:
        return ["-m", "harness", "selftest", f"--only={part['steps']}", f"--to={results}"]
    words = f"name={group} results_dir={results} {TABLE['settings']} {part['runs']}".split()
    return ["-m", "harness", "-m", *{word.partition("=")[0]: word for word in (*words, *settings)}.values()]


def main(arguments: Sequence[str]) -> None:
    """Run the group that the first argument names, or the first one, with further settings of its runs."""
    name, *settings = arguments if {*arguments[:1]} & {*GROUPS} else (next(iter(GROUPS)), *arguments)
    end = time.monotonic() + GROUPS[name]["seconds"]
    run_part("install", TABLE["install"].split(), end)
    for title, part in GROUPS[name]["parts"].items():
        run_part(title, part_words(name, part, RESULTS, *settings), min(end, time.monotonic() + part["seconds"]))
    run_part("table", ("-m", "harness.selftest.peaks", name), end + TABLE["table_seconds"])


def run_part(name: str, words: Sequence[str], end: float) -> None:
    """Run Python with these words, and interrupt it at `end`, by time.monotonic()."""
    started = time.monotonic()
    print(f"== {name}, at most {end - started:.0f} s: {' '.join(words)}", flush=True)
    limit = ("--foreground", "--signal=INT", f"--kill-after={TABLE['grace_seconds']}", f"{max(1.0, end - started)}")
    status = subprocess.run(["timeout", *limit, sys.executable, *words], stdin=subprocess.DEVNULL).returncode
    outcome = "out of time" if status in OUT_OF_TIME else f"exit status {status}"
    print(f"== {name}: {outcome} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(sys.argv[1:])
