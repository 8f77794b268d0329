"""Programs that tests need and pip does not have, installed as Debian packages if they are missing."""

import os
import shutil
import subprocess
from collections.abc import Sequence

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # daemons are not on every user's path

INSTALL_SECONDS = 600.0


def find_program(*programs: str) -> str | None:
    """Return the path of the first of these programs that is installed, or None."""
    return next((path for program in programs if (path := shutil.which(program, path=PATH))), None)


def install(name: str, programs: Sequence[str], packages: Sequence[str]) -> str:
    """Install the programs that are missing; return why that failed, or an empty string.

    It takes no time if all of them are installed.
    """

    def missing() -> list[str]:
        return [program for program in programs if find_program(program) is None]

    if not missing():
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"{name}'s {missing()[0]} is not installed; installing it takes root and apt-get"
    apt_get = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120"]
    install_packages = [*apt_get, "install", "-y", "--no-install-recommends", *packages]
    message = ""
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
        message = (done.stderr.strip() or "no word").splitlines()[-1]
    return f"{name} could not be installed: {message}"
