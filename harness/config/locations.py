"""The folders of configuration files: conf/ and sweeps/ of the current folder, then those of the package."""

import itertools
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel carries conf/ and sweeps/ inside the package, in presets/; in a clone they are beside it.
PRESETS = _PACKAGE / "presets" if (_PACKAGE / "presets").is_dir() else _PACKAGE.parent
PACKAGED_CONF = PRESETS / "conf"


def user_folder(name: str) -> Path | None:
    """Return conf/ or sweeps/ of the current folder, unless there is none or it is the packaged one."""
    folder = Path.cwd() / name
    return folder if folder.is_dir() and folder.resolve() != PRESETS / name else None


def preset_folders(name: str) -> list[Path]:
    """Return the folders of this name that hold configuration files, the first taking precedence."""
    return [folder for folder in (user_folder(name), PRESETS / name) if folder is not None]


def files_in(group: str) -> dict[str, Path]:
    """Return the YAML file of every name in a configuration group, or of every named sweep, in the order of names."""
    folders = preset_folders(group) if group == "sweeps" else [folder / group for folder in preset_folders("conf")]
    paths = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    return dict(sorted(paths.items()))


def first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the top of a YAML file, without `# @package` lines."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [line.removeprefix("#").strip() for line in comment if not line.startswith("# @")]
    return " ".join(lines).partition(". ")[0].rstrip(".")
