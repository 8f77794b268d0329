"""Lint, format and types are part of the tests."""

import subprocess
import sys

import pytest

from tests.support.commands import ROOT


@pytest.mark.parametrize("command", [["mypy"], ["ruff", "check"], ["ruff", "format", "--check"]], ids=" ".join)
def test_the_code_passes(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
