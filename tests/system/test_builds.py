"""What is built once on a machine is announced before the wait for it: by real builds into an empty cache."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import ROOT

TITLES = {"allocator": "compiling the counting allocator", "operator_log": "compiling the operator log"}

# A compiler that waits until the test has read what it compiles, and gives up after a minute.
PATIENT_COMPILER = """#!/bin/sh
for argument; do case $argument in *.cpp) name=$(basename "$argument" .cpp);; esac; done
for _ in $(seq 600); do [ -e "$GATES/$name" ] && exec c++ "$@"; sleep 0.1; done
exit 1
"""


@pytest.mark.long
def test_a_build_is_announced_before_it_ends(tmp_path: Path) -> None:
    compiler, gates, cache = tmp_path / "compiler", tmp_path / "gates", tmp_path / "cache"
    compiler.write_text(PATIENT_COMPILER)
    compiler.chmod(0o755)
    gates.mkdir()
    options = [
        "strategy=single",
        "cluster.device=cpu",
        "tracking=none",
        f"results_dir={tmp_path}",
        f"data.cache={cache}",
    ]
    command = subprocess.Popen(
        [sys.executable, "-m", "harness", *options],
        cwd=ROOT,
        env=os.environ | {"CXX": str(compiler), "GATES": str(gates)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        for name, title in TITLES.items():
            line = next((line for line in command.stdout if title in line), "")
            assert "once on this machine, which takes up to a minute" in line
            assert list(cache.rglob(f"{name}-*.so")) == []
            (gates / name).touch()
        while command.poll() is None and not list(cache.rglob("operator_log-*.so")):
            time.sleep(0.05)
    finally:
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    assert all(len(list(cache.rglob(f"{name}-*.so"))) == 1 for name in TITLES)
