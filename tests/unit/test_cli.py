"""The start of the command line: it imports little, and does nothing harmful without arguments."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT

HEAVY = ("torch", "hydra", "omegaconf", "pandas", "deepspeed", "transformers")


def imported(*arguments: str) -> tuple[list[str], str, float]:
    """Return which heavy packages a command imports, its output, and its CPU seconds."""
    code = (
        "import json, sys\nfrom harness.cli.main import main\n"
        f"status = main({list(arguments)!r})\n"
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]), file=sys.stderr)\n"
        "sys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stderr.splitlines()[-1]), done.stdout, seconds


@pytest.mark.parametrize(("argument", "output"), [("--help", "usage: harness"), ("--version", "harness ")])
def test_help_and_version_import_nothing_heavy(argument: str, output: str) -> None:
    heavy, printed, seconds = imported(argument)
    assert heavy == [] and output in printed
    assert seconds < 1


def test_without_arguments_help_is_shown_and_nothing_is_trained() -> None:
    heavy, printed, _ = imported()
    assert heavy == [] and printed == imported("--help")[1]


def test_status_needs_no_torch(tmp_path: Path) -> None:
    heavy, printed, _ = imported("status", str(tmp_path))
    assert "torch" not in heavy and "no run is recorded" in printed
