"""Type every line of results/slips.csv again, and write its answer beside it: python -m tests.support.slips.

Its lines are what users of torch, DeepSpeed, Megatron-LM and Hydra may type by mistake. A line that is not answered by
one line and status 2 ends the program with an error and changes nothing.
"""

import contextlib
import csv
import io
import shlex
import tempfile

from harness.cli.main import main
from tests.support.commands import ROOT

TABLE = ROOT / "results" / "slips.csv"


def answer(typed: str) -> str:
    """Return the line that the command prints for a mistake. Raises ValueError for anything else."""
    printed, refusal = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(refusal):
        status = main(shlex.split(typed))
    if status != 2 or printed.getvalue() or refusal.getvalue().count("\n") != 1:
        raise ValueError(f"{typed}: status {status}, {printed.getvalue()}{refusal.getvalue()}")
    return refusal.getvalue().strip()


def rewrite() -> None:
    """Write the table again, in a folder without results or files of configuration."""
    with TABLE.open(newline="") as file:
        typed = [row["typed"] for row in csv.DictReader(file)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        rows = [{"typed": line, "answer": answer(line)} for line in typed]
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["typed", "answer"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    rewrite()
