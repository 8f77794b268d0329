"""`harness selftest` on a CPU: every step by real runs, what fails is said and repeated, and what passed is not."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.hardware.machine import Machine
from harness.runner.plan import capacity_problem, make_plan
from harness.selftest import observations, run
from harness.selftest.bench import StepFailedError
from harness.selftest.run import STEPS, Step
from harness.util.files import JsonObject
from tests.support.commands import ROOT, compose

BY_NAME = {step.name: step for step in STEPS}

ON_EVERY_MACHINE = [step.name for step in STEPS if not step.gpus]

H100S = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, 8, 8, (79 * 2**30,) * 8, 64, 2**40, device_bytes=80 * 2**30)


def selftest(folder: Path, *arguments: str) -> int:
    return main(["selftest", "--device", "cpu", "--to", str(folder), *arguments])


def stored(folder: Path) -> dict[str, JsonObject]:
    steps: dict[str, JsonObject] = json.loads((folder / "selftest" / "selftest.json").read_text())["steps"]
    return steps


def test_a_step_that_fails_is_said_and_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault is a rank that is killed where every run must be ok."""
    names = "environment,kill,pipelines"
    doomed = tuple(dataclasses.replace(step, status="ok") if step.name == "kill" else step for step in STEPS)
    monkeypatch.setattr(run, "STEPS", doomed)
    assert selftest(tmp_path, "--only", names) == 1
    printed = capsys.readouterr().out
    assert "ended as error, and ok is expected" in " ".join(printed.split())
    assert "needs 4 CUDA devices; runs here use the processor alone" in printed
    assert "1 passed, 1 failed, 1 skipped" in printed
    failed = stored(tmp_path)["kill"]
    assert failed["outcome"] == "failed" and "SIGKILL" in failed["detail"]
    assert failed["runs"][0].keys() >= {"row", "proof", "notes", "logs", "ranks"}  # a killed rank may leave no report

    monkeypatch.setattr(run, "STEPS", STEPS)
    assert selftest(tmp_path, "--only", names) == 0
    printed = capsys.readouterr().out
    assert "2 passed, 0 failed, 1 skipped" in printed
    assert [line.split()[2] for line in printed.splitlines() if line.startswith("environment")] == ["before"]
    assert "rank 1 was killed by SIGKILL" in stored(tmp_path)["kill"]["detail"]
    first = stored(tmp_path)
    assert selftest(tmp_path, "--only", names) == 0 and stored(tmp_path) == first  # nothing was run
    assert selftest(tmp_path, "--only", "environment", "--again") == 0
    assert "before" not in capsys.readouterr().out.rpartition("outcome")[2]


def test_a_machine_without_a_compiler_is_told_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert selftest(tmp_path, "--only", "environment") == 1
    assert "install g++ or clang, or name one in CXX" in " ".join(capsys.readouterr().out.split())


def test_steps_are_listed_and_unknown_ones_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(tmp_path, "--list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BY_NAME)
    assert selftest(tmp_path, "--only", "kill,nope") == 2
    assert "--only=nope is not a step: choose among environment, devices," in capsys.readouterr().err


def test_the_self_test_needs_nothing_of_the_tests() -> None:
    for path in (ROOT / "harness" / "selftest").glob("*.py"):
        assert "from tests" not in path.read_text() and "import tests" not in path.read_text()


@pytest.mark.long
def test_every_step_passes_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(tmp_path) == 0, capsys.readouterr().out
    steps = stored(tmp_path)
    passed = [name for name in ON_EVERY_MACHINE if name != "two-nodes"]
    assert [name for name, step in steps.items() if step["outcome"] == "passed"] == passed
    assert all("needs" in step["detail"] for name, step in steps.items() if name not in passed)
    assert selftest(tmp_path) == 0
    assert capsys.readouterr().out.count(" before ") == len(passed)
    with pytest.raises(StepFailedError, match="=cuda needs a CUDA device"):
        observations.seen_devices("0")


@pytest.mark.long
@pytest.mark.parametrize("step", [step for step in STEPS if step.gpus], ids=lambda step: step.name)
def test_runs_for_gpus_are_accepted_on_eight_of_them(step: Step) -> None:
    """Nothing runs here: each configuration must be possible, and fit unless it is to run out of memory."""
    for overrides in step.runs:
        arguments = f"{step.base} {overrides}".format(world=min(step.gpus, 2), hang=60).split()
        config, command = compose(*{text.partition("=")[0]: text for text in arguments}.values())
        if config.train.compile and importlib.util.find_spec("triton") is None:  # which compiles layers for a GPU
            continue
        plan = make_plan(config, H100S, command)
        assert step.name == "exhausted-device" or capacity_problem(plan, ()) is None, overrides
