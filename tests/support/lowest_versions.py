"""Prints the lowest version that pyproject.toml allows of every library, as constraints for pip.

It runs before anything is installed.
"""

import re
import tomllib
from itertools import chain
from pathlib import Path


def lowest_versions() -> list[str]:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    requirements = chain(project["dependencies"], *project["optional-dependencies"].values())
    # A constraint of pip names a library without its extras.
    return [re.sub(r"(\[.*\])?>=([^,]+).*", r"==\2", each) for each in requirements if ">=" in each]


if __name__ == "__main__":
    print(*lowest_versions(), sep="\n")
