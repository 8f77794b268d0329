"""python -m harness.export results/NAME/RUN: the run's layout for other launchers and libraries, to take home."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from harness.errors import exit_status, printable
from harness.export import reasons
from harness.export.run import Recorded, read
from harness.records import atomic_write_text


class File(NamedTuple):
    """One file: why it cannot be written, and what is in it."""

    name: str
    reasons: Callable[[Recorded], Iterator[str]]
    text: Callable[[Recorded], str]


def files() -> list[File]:
    from harness.export import configs, prepared, script  # torch among them

    return [
        File("accelerate.yaml", reasons.accelerate, configs.accelerate_yaml),
        File("train_accelerate.py", reasons.accelerate, prepared.train_accelerate_py),
        File("deepspeed.json", reasons.deepspeed, configs.deepspeed_json),
        File("train.py", reasons.train, script.train_py),
        File("torchrun.sh", reasons.train, configs.torchrun_sh),
    ]


def export(run: Recorded) -> Iterator[str]:
    """Writes what can be written; a line for every file."""
    run.target.mkdir(parents=True, exist_ok=True)
    for file in files():
        path = run.target / file.name
        reason = next(file.reasons(run), None)
        if reason is not None:
            path.unlink(missing_ok=True)  # of an export before
            yield f"{file.name}: not written, {reason}"
            continue
        atomic_write_text(path, file.text(run))
        if path.suffix == ".sh":
            path.chmod(0o755)
        yield f"{file.name}: {path}"


def main(arguments: list[str] | None = None) -> int:
    about = "A recorded run as configuration of Accelerate, DeepSpeed and torchrun, with a script that trains alike."
    parser = argparse.ArgumentParser(prog="python -m harness.export", description=about)
    parser.add_argument("run", type=Path, metavar="results/NAME/RUN", help="the folder of one run")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write instead of RUN/export")
    chosen = parser.parse_args(arguments)
    return exit_status(lambda: write(chosen.run, chosen.to))


def write(run: Path, target: Path | None) -> None:
    for line in export(read(run, target)):
        print(printable(line))


if __name__ == "__main__":
    sys.exit(main())
