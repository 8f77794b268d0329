"""What a rank really holds of the model's state, as the proof of its layout and as bytes."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from harness.engines import BUCKET, GATHERED, STAGING, Engine, Kind, Piece
from harness.measure.memory import element_bytes, storage_bytes


class Holding(NamedTuple):
    """One piece without its values: `box` is the (start, stop) held along each dimension of the whole `shape`."""

    name: str
    slot: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    dtype: str


def held_bytes(engine: Engine, kind: Kind) -> int:
    """Bytes of one kind on this rank now: distinct storages, padding included; of views into buckets their own."""
    return _bytes(engine.pieces(kind))


def placed_bytes(engine: Engine, kind: Kind) -> dict[str, int]:
    """The same by the kind of device they lie on, cpu or cuda; copies on top of the state itself are left out."""
    by_device: dict[str, list[Piece]] = defaultdict(list)
    for piece in engine.pieces(kind):
        if piece.slot not in (GATHERED, STAGING):
            by_device[piece.local.device.type].append(piece)
    return {device: _bytes(pieces) for device, pieces in by_device.items()}


def _bytes(pieces: Iterable[Piece]) -> int:
    in_buckets: list[Tensor] = []
    own: list[Tensor] = []
    for piece in pieces:
        (in_buckets if piece.slot == BUCKET else own).append(piece.local)
    return storage_bytes(own) + element_bytes(in_buckets)


def holdings(engine: Engine, kind: Kind) -> list[Holding]:
    """What this rank holds of one kind now."""
    return [
        Holding(p.name, p.slot, tuple(p.shape), p.box, str(p.local.dtype).removeprefix("torch."))
        for p in engine.pieces(kind)
    ]
