"""The folders of configuration files: conf/ and sweeps/ of the current folder, then those of the package."""

from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel carries conf/ and sweeps/ inside the package, in presets/; in a clone they are beside it.
PRESETS = _PACKAGE / "presets" if (_PACKAGE / "presets").is_dir() else _PACKAGE.parent
PACKAGED_CONF = PRESETS / "conf"


def user_conf() -> Path | None:
    """Return conf/ of the current folder, unless there is none or it is the packaged one."""
    folder = Path.cwd() / "conf"
    return folder if folder.is_dir() and folder.resolve() != PACKAGED_CONF else None


def user_sweeps() -> Path | None:
    """Return sweeps/ of the current folder, unless there is none or it is the packaged one."""
    folder = Path.cwd() / "sweeps"
    return folder if folder.is_dir() and folder.resolve() != PRESETS / "sweeps" else None


def conf_folders() -> list[Path]:
    """Return the folders that hold configuration groups, the first taking precedence."""
    user = user_conf()
    return [PACKAGED_CONF] if user is None else [user, PACKAGED_CONF]


def sweeps_folders() -> list[Path]:
    """Return the folders that hold named sweeps, the first taking precedence."""
    user = user_sweeps()
    return [PRESETS / "sweeps"] if user is None else [user, PRESETS / "sweeps"]


def files_in(folders: Iterable[Path], group: str) -> dict[str, Path]:
    """Return the YAML file of every name in a configuration group, in the order of names."""
    paths: dict[str, Path] = {}
    for folder in folders:
        for path in (folder / group).glob("*.yaml"):
            paths.setdefault(path.stem, path)
    return dict(sorted(paths.items()))


def names_in(folders: Iterable[Path], group: str) -> list[str]:
    """Return the names that a configuration group has."""
    return list(files_in(folders, group))


def first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the top of a YAML file, without `# @package` lines."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):
            lines.append(line.removeprefix("#").strip())
    return " ".join(lines).partition(". ")[0].rstrip(".")
