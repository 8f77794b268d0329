"""The file of tokens that runs train on: real text, one byte per token."""

import functools
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.config.schema import DataConfig
from harness.util.text import UserError

_INSTALLED = ("site-packages", "dist-packages")  # folders beside the standard library that pip fills


@dataclass(frozen=True)
class Corpus:
    """A source of tokens. The fingerprint distinguishes two corpora and is part of a run's identity."""

    path: str | None  # a file of one byte per token; None for synthetic data
    fingerprint: str


def prepare_corpus(data: DataConfig, seq_len: int) -> Corpus:
    """Find or create the token file. Raise UserError if it holds less than one sequence."""
    if data.kind == "synthetic":
        return Corpus(None, "synthetic")
    path = token_file(data.path, Path(data.cache).expanduser())
    if path.stat().st_size <= seq_len + 1:
        raise UserError(
            f"data.path={data.path} holds {path.stat().st_size} bytes, less than one sequence of"
            f" train.seq_len={seq_len}: choose a longer text or a smaller train.seq_len"
        )
    return Corpus(str(path), fingerprint(path))


@functools.cache
def token_file(data_path: str | None, cache: Path) -> Path:
    """Return the file of tokens, found or created once per process so that all runs of a command train on the same.

    A folder's files are concatenated; None stands for the source code of Python's standard library.
    """
    if data_path is None:
        stdlib = Path(sysconfig.get_path("stdlib"))
        sources = [path for path in list_files(stdlib, _INSTALLED) if path.suffix == ".py"]
        return concatenate_files(sources, stdlib, cache)
    path = Path(data_path).expanduser().resolve()
    return concatenate_files(list_files(path), path, cache) if path.is_dir() else path


def list_files(root: Path, excluded_folders: Collection[str] = ()) -> list[Path]:
    """Return every file below a folder, except hidden ones and those in folders of the excluded names."""
    paths = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in excluded_folders and not name.startswith(".")]
        paths += [Path(folder, file) for file in files if not file.startswith(".")]
    return paths


def concatenate_files(files: Iterable[Path], root: Path, cache: Path) -> Path:
    """Return a file with the bytes of all files in the order of their names.

    It is created in the cache once, and again if it was damaged. Raise UserError if the cache cannot be written.
    """
    ordered = sorted(files, key=lambda p: p.relative_to(root).as_posix())
    listing = "\n".join(f"{p.relative_to(root).as_posix()} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in ordered)
    key = hashlib.sha256(f"{root}\n{listing}".encode()).hexdigest()[:16]
    try:
        for path in cache.glob(f"corpus-{key}-*.bin"):
            if path.stem.endswith(f"-{fingerprint(path)}"):  # otherwise a full disk or a power cut truncated it
                return path
        cache.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=cache)
        with os.fdopen(handle, "wb") as out:
            for file in ordered:
                out.write(file.read_bytes())
        target = cache / f"corpus-{key}-{fingerprint(Path(partial))}.bin"
        Path(partial).replace(target)
    except OSError as error:
        raise UserError(f"data.cache={cache} cannot be written ({error.strerror}): choose another folder") from None
    return target


def fingerprint(path: Path) -> str:
    """Return a digest of the file's size and of 256 blocks spread over it, which is quick for a file of any size."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(256):
            file.seek(size * block // 256)
            digest.update(file.read(4096))
    return digest.hexdigest()[:16]
