"""A folder with all that the first hour on a GPU machine without internet needs, for `harness selftest --bundle`.

FOLDER/harness is the running package, FOLDER/wheels what it needs beside torch in the versions installed here, and
FOLDER/simulated the rows of the first hour by launch=simulated.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from harness.config.locations import PRESETS
from harness.selftest.first_hour import GROUPS, SIMULATED, TABLE, part_words
from harness.util.text import UserError


def make_bundle(folder: Path, python: str, processor: str, settings: Sequence[str]) -> None:
    """Make the bundle for machines with a version of Python, such as 3.12, and a processor, such as x86_64.

    `settings` are those of the simulated rows, beside their own. Raises OSError if there is a bundle in the folder, and
    UserError if the wheels cannot be downloaded.
    """
    copies = {"": Path(__file__).parents[1], "presets/conf": PRESETS / "conf", "presets/sweeps": PRESETS / "sweeps"}
    for name, source in copies.items():
        shutil.copytree(source, folder / "harness" / name, ignore=shutil.ignore_patterns("__pycache__", "presets"))
    script = Path(__file__).with_name("run_bundle.sh").read_text("utf-8")
    (folder / "run").write_text(script.replace("VERSION", python))
    requirements = filter(dependency, metadata.requires("training-harness") or ())
    (folder / "requirements.txt").write_text("\n".join(line.partition(";")[0] for line in dict.fromkeys(requirements)))
    download_wheels(folder / "wheels", python, processor)
    for name, group in GROUPS.items():
        for part in (part for part in group["parts"].values() if "runs" in part):
            words = part_words(name, part, folder / SIMULATED, "cluster=8xh100", "launch=simulated", *settings)
            subprocess.run([sys.executable, *words], check=False)  # a simulation that fails is a row


def download_wheels(target: Path, python: str, processor: str) -> None:
    """Download what the installed harness depends on into a folder, in the installed versions. Raises UserError."""
    versions: dict[str, str] = {}
    add_dependencies("training-harness", versions)
    del versions["training-harness"]
    from_source = [f"{name}=={versions.pop(name)}" for name in TABLE["bundle"]["from_source"]]
    platforms = [f"--platform={platform}_{processor}" for platform in TABLE["bundle"]["platforms"]]
    kind = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    wheels = [f"{name}=={version}" for name, version in versions.items()]
    for words in (["wheel", f"--wheel-dir={target}", *from_source], ["download", f"--dest={target}", *kind, *wheels]):
        command = [sys.executable, "-m", "pip", *words, "--no-deps", "-q", "--disable-pip-version-check"]
        if subprocess.run(command, env=os.environ | {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}).returncode:
            raise UserError(f"--python={python} --processor={processor}: pip {words[0]} failed, for the reason above")


def add_dependencies(name: str, versions: dict[str, str]) -> None:
    """Add the installed version of a distribution and of all that it depends on, without what is left out."""
    with suppress(metadata.PackageNotFoundError):  # of another system or another version of Python
        if name not in versions:
            versions[name] = metadata.version(name)
            for other in filter(None, map(dependency, metadata.requires(name) or ())):
                add_dependencies(other, versions)


def dependency(requirement: str) -> str:
    """Return the name of a distribution that is required; an empty one for an extra's and for what is left out.

    DeepSpeed is an extra of the harness that goes along.
    """
    name = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()
    is_extra = "extra ==" in requirement and "extra == 'deepspeed'" not in requirement.replace('"', "'")
    return "" if is_extra or name in TABLE["bundle"]["left_out"] else name
