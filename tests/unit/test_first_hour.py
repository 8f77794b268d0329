"""The first hour on GPUs: what a bundle has, that its runs are possible, and that no part of it stops another."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.config.command import read_command_config
from harness.config.hydra import compose_values
from harness.hardware.machine import Machine
from harness.launcher.rank_entry import worker_entry
from harness.records.store import write_record
from harness.runner.plan import capacity_problem, make_plan
from harness.runner.resolve import resolve_run_config
from harness.selftest import bundle, first_hour, peaks
from harness.selftest.bench import Bench
from harness.selftest.run import STEPS, each_run, print_header
from tests.support.commands import ROOT
from tests.support.example_records import FAILED, MIB, record_of, row
from tests.support.slurm_cluster import wait_for

H100S = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, 8, 8, (79 * 2**30,) * 8, 64, 2**40, device_bytes=80 * 2**30)

GROUPS = first_hour.GROUPS

FAILED_ROW = row(2, "ddp", "torch", 0, **FAILED | {"status": "error", "reason": "rank 0 raised"})


def test_a_bundle_is_the_running_package_with_wheels_and_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pip and the simulations are told is recorded in their place. A folder with anything in it is left alone."""
    commands: list[Sequence[str]] = []

    def record(command: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bundle.subprocess, "run", record)
    folder = tmp_path / "kit"
    bundle.make_bundle(folder, "3.12", "aarch64", ["cluster=8xh200", "model=125m"])
    monkeypatch.undo()
    for path in ("harness/runner/plan.py", "harness/selftest/first_hour.toml"):
        assert (folder / path).read_bytes() == (ROOT / path).read_bytes()
    listed = subprocess.run(
        [sys.executable, "-m", "harness", "ls", "sweeps"], cwd=folder, env=os.environ | {"PYTHONPATH": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "quickstart" in listed.stdout  # from its own presets
    wheel, download, *simulations = commands
    assert {word.partition("==")[0] for word in wheel} >= {"deepspeed", "antlr4-python3-runtime"}
    assert {"--python-version=3.12", "--platform=manylinux_2_28_aarch64"} <= set(download)
    names = {word.partition("==")[0] for word in (*wheel, *download)}
    assert {"hydra-core", "pydantic-core", "orjson", "deepspeed"} <= names
    assert not {*first_hour.TABLE["bundle"]["left_out"], "sympy", "training-harness"} & names
    requirements = (folder / "requirements.txt").read_text()
    assert "torch" not in requirements.split() and "deepspeed" in requirements and "extra" not in requirements
    assert len(simulations) == sum("runs" in part for group in GROUPS.values() for part in group["parts"].values())
    for words in simulations:
        assert {"launch=simulated", "cluster=8xh200", "model=125m"} <= set(words) and "cluster=8xh100" not in words
    other = subprocess.run(["sh", folder / "run"], env=os.environ | {"PYTHON": sys.executable}, capture_output=True)
    assert other.returncode == 2 and b"the wheels are for Python 3.12" in other.stdout
    with pytest.raises(FileExistsError):
        bundle.make_bundle(folder, "3.12", "x86_64", [])


@pytest.mark.parametrize("group", GROUPS)
def test_the_parts_of_a_group_are_possible_on_eight_gpus_and_fit(group: str) -> None:
    """Each step exists; the runs of a sweep are possible on a described machine, and fit it."""
    known = {step.name for step in STEPS}
    for part in GROUPS[group]["parts"].values():
        assert set(part.get("steps", "").split(",")) - {""} <= known
        words = first_hour.part_words(group, part, Path("results"))
        for run in each_run(" ".join(words[3:])) if "runs" in part else ():
            values = compose_values(*run.split(), "cluster.device=cuda")
            plan = make_plan(resolve_run_config(values), H100S, read_command_config(values))
            assert capacity_problem(plan, ()) is None, run


def test_no_part_stops_the_next_and_all_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The planted faults are a part that fails and one that hangs and ignores its interruption."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(first_hour.TABLE, "grace_seconds", 0.2)
    hangs = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    words = {"fails": "raise SystemExit(3)", "hangs": hangs, "last": "print('reached')"}
    parts = {name: {"seconds": 2.0, "runs": ""} for name in words}
    monkeypatch.setitem(first_hour.GROUPS, "one_gpu", {"seconds": 30.0, "parts": parts})
    run_part, texts = first_hour.run_part, iter(["", *words.values(), ""])
    monkeypatch.setattr(first_hour, "run_part", lambda name, _, end: run_part(name, ("-c", next(texts)), end))
    started = time.monotonic()
    first_hour.main(["model=tiny"])
    printed = capfd.readouterr().out
    assert time.monotonic() - started < 25
    assert "== fails: exit status 3" in printed and "== hangs: out of time after 2 s" in printed
    assert "reached" in printed and "== table: exit status 0" in printed


def test_an_interrupted_hour_is_packed(tmp_path: Path) -> None:
    """As Ctrl+C does, every process is interrupted."""
    (tmp_path / "run").write_text((ROOT / "harness" / "selftest" / "run_bundle.sh").read_text().replace("VERSION", "3"))
    (tmp_path / "results").mkdir()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.12 && exit\necho started\nexec sleep 60\n")
    python.chmod(0o755)
    hour = subprocess.Popen(["sh", "run"], cwd=tmp_path, env=os.environ | {"PYTHON": str(python)}, process_group=0)
    wait_for(
        lambda: "started" in "".join(path.read_text() for path in tmp_path.glob("log.txt")), 30, "the hour to start"
    )
    os.killpg(hour.pid, signal.SIGINT)
    assert hour.wait(30) == 0 and (tmp_path / "records.tar.gz").stat().st_size


def test_settings_replace_those_of_the_parts() -> None:
    part = GROUPS["one_gpu"]["parts"]["rows"]
    words = first_hour.part_words("one_gpu", part, Path("results"), "model=tiny", "cluster.device=cpu")
    assert [word for word in words if word.startswith("model=")] == ["model=tiny"] and words[-1] == "cluster.device=cpu"


def test_the_table_sets_the_sources_of_a_peak_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A measured run stands beside the simulation of its configuration on another device; what did not run is there."""
    monkeypatch.chdir(tmp_path)
    sizes = {"predicted_peak_bytes": 21 * MIB, "peak_allocated_bytes": 24 * MIB, "peak_requested_bytes": 20 * MIB}
    least = {"peak_allocated_bytes": 23 * MIB, "peak_requested_bytes": 19 * MIB}
    rows = {
        "results": [
            row(1, "zero3", "deepspeed", 3, launch="processes", measured_on="H200", **sizes),
            FAILED_ROW,
        ],
        "simulated": [
            row(3, "zero3", "deepspeed", 3, launch="simulated", measured_on="H100", **least),
            row(4, "zero1", "deepspeed", 1, launch="simulated", measured_on="H100"),
        ],
    }
    for folder, entries in rows.items():
        for entry in entries:
            record = dataclasses.replace(record_of(entry), config={"strategy": {"name": entry["strategy"]}})
            write_record(tmp_path / folder / "one_gpu" / entry["run_id"], record)
    peaks.main("one_gpu")
    printed = capsys.readouterr().out
    cells = {line.split()[1]: line.split() for line in printed.splitlines() if line.startswith("tiny ")}
    assert cells["zero3"][2:] == ["ok", "21.0", "19.0", "20.0", "-", "1.0500", "0.9500"]
    assert cells["zero1"][2:4] == ["not", "run"]
    assert cells["ddp"][2] == "error" and " ".join(cells["ddp"]).endswith("rank 0 raised")


def test_the_self_test_says_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU that is what the published self-test took; on a GPU rows in bf16 are among its steps."""
    stored = json.loads((ROOT / "results" / "published" / "selftest" / "selftest.json").read_text())["steps"]
    took = sum(step["seconds"] for step in stored.values())
    on_cpu = Bench(Path(), "cpu")
    print_header(on_cpu, STEPS)
    assert abs(sum(step.seconds["cpu"] for step in STEPS if not step.gpus) / took - 1) < 0.1
    assert "2 ranks a run: about 49 s" in capsys.readouterr().out
    on_gpus = Bench(Path(), "cuda")
    monkeypatch.setitem(vars(on_gpus), "machine", H100S)
    print_header(on_gpus, STEPS)
    assert "on 8 x NVIDIA H100 80GB HBM3, 2 ranks a run: about 30 min" in capsys.readouterr().out
    limits: list[str] = []
    for bench in (on_cpu, on_gpus):
        monkeypatch.setattr(bench, "_execute", lambda arguments, _: limits.extend(arguments) or record_of(FAILED_ROW))
        bench.make_run("hang_seconds={hang}", "", worker_entry, may_not_fit=True)
    assert limits == ["hang_seconds=20", "hang_seconds=60"]
    (step,) = (step for step in STEPS if step.name == "bf16")
    assert step.gpus == 1 and len(step.runs) == 3 and all("precision=bf16_mixed" in run for run in step.runs)
