"""Real text as bytes, memory-mapped; every rank's batches follow from (seed, step, data rank)."""

import functools
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.config.schema import DataConfig
from harness.util.errors import UserError

_INSTALLED = ("site-packages", "dist-packages")  # what pip put beside the standard library


@dataclass(frozen=True)
class Corpus:
    """Where the tokens are; fingerprint tells two corpora apart and is part of a run's identity."""

    path: str | None  # a file of one byte a token; None: synthetic
    fingerprint: str


def prepare_corpus(data: DataConfig, seq_len: int) -> Corpus:
    """Finds or makes the token file. Raises UserError if it holds less than one sequence."""
    if data.kind == "synthetic":
        return Corpus(None, "synthetic")
    path = token_file(data.path, Path(data.cache).expanduser())
    if path.stat().st_size <= seq_len + 1:
        raise UserError(
            f"data.path={data.path} holds {path.stat().st_size} bytes, less than a sequence of"
            f" train.seq_len={seq_len}: name more text"
        )
    return Corpus(str(path), fingerprint(path))


@functools.cache
def token_file(given: str | None, cache: Path) -> Path:
    """One file of tokens, found or made once: all runs of a command train on the same."""
    if given is None:
        stdlib = Path(sysconfig.get_path("stdlib"))
        sources = [path for path in list_files(stdlib, _INSTALLED) if path.suffix == ".py"]
        return concatenate_files(sources, stdlib, cache)
    path = Path(given).expanduser().resolve()
    return concatenate_files(list_files(path), path, cache) if path.is_dir() else path


def list_files(root: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Every file below a folder, without hidden ones and without folders of the names left out."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in left_out and not name.startswith(".")]
        found += [Path(folder, file) for file in files if not file.startswith(".")]
    return found


def concatenate_files(files: Iterable[Path], root: Path, cache: Path) -> Path:
    """One file of all the files' bytes in the order of their names, made once, and again if that was damaged."""
    ordered = sorted(files, key=lambda p: p.relative_to(root).as_posix())
    listing = "\n".join(f"{p.relative_to(root).as_posix()} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in ordered)
    key = hashlib.sha256(f"{root}\n{listing}".encode()).hexdigest()[:16]
    try:
        for path in cache.glob(f"corpus-{key}-*.bin"):
            if path.stem.endswith(f"-{fingerprint(path)}"):  # else a full disk or a power cut left less of it
                return path
        cache.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=cache)
        with os.fdopen(handle, "wb") as out:
            for file in ordered:
                out.write(file.read_bytes())
        target = cache / f"corpus-{key}-{fingerprint(Path(partial))}.bin"
        Path(partial).replace(target)
    except OSError as error:
        raise UserError(f"data.cache={cache} cannot be written ({error.strerror}): name another folder") from None
    return target


def fingerprint(path: Path) -> str:
    """A digest of the file's size and of 256 blocks spread over it: quick for a file of any size."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(256):
            file.seek(size * block // 256)
            digest.update(file.read(4096))
    return digest.hexdigest()[:16]
