"""Programs that tests need and pip does not have: looked for, else installed as Debian packages."""

import os
import shutil
import subprocess
from collections.abc import Sequence

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # daemons are not on every user's path

INSTALL_SECONDS = 600.0


def found(*programs: str) -> str | None:
    """The path of the first of these that is there."""
    return next((path for program in programs if (path := shutil.which(program, path=PATH))), None)


def install(name: str, programs: Sequence[str], packages: Sequence[str]) -> str:
    """Sees that all programs are there, which takes no time when they are; returns why they are not, or nothing."""

    def missing() -> list[str]:
        return [program for program in programs if found(program) is None]

    if not missing():
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"{name}'s {missing()[0]} is not installed; installing it takes root and apt-get"
    apt_get = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120"]
    install_packages = [*apt_get, "install", "-y", "--no-install-recommends", *packages]
    said = ""
    for command in (install_packages, [*apt_get, "update"], install_packages):  # a fresh machine has old lists or none
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{name} was not installed within {INSTALL_SECONDS:.0f} s"
        if not missing():
            return ""
        said = (done.stderr.strip() or "no word").splitlines()[-1]
    return f"{name} could not be installed: {said}"
