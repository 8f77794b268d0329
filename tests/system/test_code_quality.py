"""Lint, format, types, and the files of services that run them are part of the tests."""

import re
import tomllib

import pytest
import yaml

from tests.support.lowest_versions import lowest_versions
from tests.support.processes import ROOT, run_python

WORKFLOW = ".github/workflows/ci.yml"

RELEASE = ".github/workflows/release.yml"

COMMANDS = (
    ["mypy"],
    ["ruff", "check"],
    ["ruff", "format", "--check"],
    ["check_jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW, RELEASE],
    ["pre_commit", "validate-config"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_code_passes(command: list[str]) -> None:
    done = run_python(ROOT, "-m", *command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_supported_python_runs_the_project_s_own_script() -> None:
    """The versions are those of `requires-python`; the oldest libraries run on the first."""
    (job,) = yaml.safe_load((ROOT / WORKFLOW).read_text())["jobs"].values()
    assert [step.get("run") for step in job["steps"]][-1] == "bash .ci/run ${{ matrix.libraries }}" and (
        ROOT / ".ci" / "run"
    ).exists()
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    first, end = map(int, re.findall(r"3\.(\d+)", stated))
    assert job["strategy"]["matrix"] == {
        "python": [f"3.{minor}" for minor in range(first, end)],
        "libraries": ["highest"],
        "include": [{"python": f"3.{first}", "libraries": "lowest"}],
    }


def test_the_oldest_libraries_are_the_project_s_lower_bounds() -> None:
    assert {"torch==2.11", "hydra-core==1.3.8", "deepspeed==0.19.7", "pytest-xdist==3.8"} <= {*lowest_versions()}


def test_the_script_names_tests_that_there_are() -> None:
    """A case is named by its overrides, which change: pytest finds none of its old name, and CI fails."""
    script = (ROOT / ".ci" / "run").read_text()
    (row,) = re.findall(r"row=(\S+)", script)
    names = [
        name.replace("$row", row) for name in re.findall(r'^ +"?((?:\$row|tests/unit)[^"\n\\]*[^"\s\\])', script, re.M)
    ]
    assert len(names) >= 7
    done = run_python(ROOT, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "--collect-only", *names)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_hook_is_a_program_of_the_development_environment() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert all(hook["language"] == "system" and hook["entry"].startswith(".venv/bin/") for hook in local["hooks"])
