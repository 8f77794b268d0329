"""The README's install command beside a CUDA build of torch, on a machine that has no CUDA toolkit."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.commands import ROOT

SITE = Path(sysconfig.get_paths()["purelib"])

# What an environment with torch has: torch's own requirements, and what builds packages without isolation.
BESIDE_TORCH = (
    "setuptools",
    "wheel",
    "typing_extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "filelock",
    "numpy",
)


def install_command() -> str:
    """Return the part of the README's first command that installs."""
    block = re.findall(r"```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (part,) = (part for part in block.split(" && ") if "pip install" in part)
    return str(part)


def test_the_install_command_keeps_deepspeed_from_asking_for_a_cuda_toolkit() -> None:
    """Each of the README's commands, and what a refusal advises, has the variable with which the long test passes."""
    texts = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", ROOT / "CONTRIBUTING.md"]
    commands = [line for path in texts for line in path.read_text().splitlines() if "pip install -q -e" in line]
    assert len(commands) == 4 and all(" DS_ACCELERATOR=cpu .venv/bin/pip install " in line for line in commands)
    assert install_command() == "DS_ACCELERATOR=cpu .venv/bin/pip install -q -e '.[deepspeed]'"


def run(folder: Path, command: str, succeeds: bool = True) -> str:
    """Return what a shell command prints beside `.venv` without a CUDA toolkit and without wheels of earlier builds."""
    hidden = ("CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden} | {"PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == succeeds, done.stderr
    return done.stdout + done.stderr


def environment_with_cuda_torch(folder: Path, pip: str) -> None:
    """Make `.venv` with this version of pip and a torch that sees a GPU."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / ".venv")], check=True)
    install = ".venv/bin/python -m pip install -q"
    run(folder, f"{install} {' '.join(BESIDE_TORCH)} && {install} -U {pip}")
    (site,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    for pattern in ("torch", "torchgen", "functorch", "torch-*.dist-info"):
        for path in SITE.glob(pattern):
            (site / path.name).symlink_to(path)
    shutil.copy(ROOT / "tests" / "support" / "cuda_torch.py", site / "sitecustomize.py")
    check = "import torch, torch.utils.cpp_extension as c; assert torch.cuda.is_available() and c.CUDA_HOME is None"
    run(folder, f'.venv/bin/python -c "{check}"')


@pytest.mark.long
@pytest.mark.parametrize(
    ("pip", "option"), [("pip==23.2.1", ""), ("pip", "--no-build-isolation")], ids=["old", "current"]
)
def test_the_harness_installs_beside_a_cuda_torch_without_a_toolkit(pip: str, option: str, tmp_path: Path) -> None:
    """Without the variable DeepSpeed's setup.py fails, which is why it is an extra.

    An old pip runs it in the environment, a new one if asked to.
    """
    for name in ("pyproject.toml", "README.md", "LICENSE", "harness", "conf", "sweeps"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment_with_cuda_torch(tmp_path, pip)
    run(tmp_path, ".venv/bin/pip install -q -e .")  # without the variable, and without DeepSpeed
    requirement = next(line.strip(' ",') for line in (ROOT / "pyproject.toml").open() if '"deepspeed>=' in line)
    install = f".venv/bin/pip install -q --no-deps {option} '{requirement.split(chr(34))[0]}'"
    assert "MissingCUDAException" in run(tmp_path, install, succeeds=False)
    for command in (f"DS_ACCELERATOR=cpu {install}", ".venv/bin/pip uninstall -q -y deepspeed", install_command()):
        run(tmp_path, command)
    check = ".venv/bin/python -c 'import deepspeed' && .venv/bin/harness --help && .venv/bin/pip check"
    assert "quickstart" in run(tmp_path, check)
