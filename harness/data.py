"""Real text as bytes, memory-mapped; every rank's batches follow from (seed, step, data rank)."""

import functools
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.config import DataConfig, RunConfig
from harness.errors import UserError
from harness.layout import Layout

if TYPE_CHECKING:
    import torch

    from harness.engines import Batch

_INSTALLED = ("site-packages", "dist-packages")  # what pip put beside the standard library


@dataclass(frozen=True)
class Corpus:
    """Where the tokens are; fingerprint tells two corpora apart and is part of a run's identity."""

    path: str | None  # a file of one byte a token; None: synthetic
    fingerprint: str


def prepare(data: DataConfig, seq_len: int) -> Corpus:
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
        sources = [path for path in files_under(stdlib, _INSTALLED) if path.suffix == ".py"]
        return concatenated(sources, stdlib, cache)
    path = Path(given).expanduser().resolve()
    return concatenated(files_under(path), path, cache) if path.is_dir() else path


def files_under(root: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Every file below a folder, without hidden ones and without folders of the names left out."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in left_out and not name.startswith(".")]
        found += [Path(folder, file) for file in files if not file.startswith(".")]
    return found


def concatenated(files: Iterable[Path], root: Path, cache: Path) -> Path:
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


class Batches:
    """The global batch of every step, and this rank's part of it: of some sequences all, or spans of each."""

    def __init__(self, corpus: Corpus, config: RunConfig, layout: Layout, rank: int, device: "torch.device") -> None:
        self.tokens = None if corpus.path is None else np.memmap(corpus.path, dtype=np.uint8, mode="r")
        self.config = config
        self.device = device
        self.accumulation = layout.accumulation(config.train)
        share = config.train.global_batch // layout.dp
        first = layout.data_rank(rank) * share
        self.sequences = range(first, first + share)
        self.spans = layout.spans(rank, config.train.seq_len)

    def sequence(self, step: int, index: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Token ids, shape (seq_len + 1,), of one sequence of the global batch."""
        train = self.config.train
        random = np.random.default_rng((train.seed, step, index))
        length = train.seq_len + 1
        if self.tokens is None:
            return random.integers(0, self.config.model.vocab_size, length)
        start = random.integers(0, len(self.tokens) - length)
        return self.tokens[start : start + length].astype(np.int64)

    def __call__(self, step: int) -> "list[Batch]":
        """This rank's micro-batches of a step, in order, on its device."""
        import torch

        from harness.engines import Batch

        rows = np.stack([self.sequence(step, index) for index in self.sequences])
        tokens = torch.from_numpy(rows)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        inputs, targets = (
            torch.cat([side[:, start:stop] for start, stop in self.spans], dim=1) if len(self.spans) > 1 else side
            for side in (tokens[:, :-1], tokens[:, 1:])
        )
        size = self.config.train.micro_batch
        return [Batch(*parts) for parts in zip(torch.split(inputs, size), torch.split(targets, size), strict=True)]
