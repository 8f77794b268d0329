"""What a rank really holds of the model's state, as the proof of its layout and as bytes."""

from typing import NamedTuple

from harness.engines import Engine, Kind
from harness.measure.memory import storage_bytes


class Holding(NamedTuple):
    """One piece without its values: `box` is the (start, stop) held along each dimension of the whole `shape`."""

    name: str
    slot: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]


def held_bytes(engine: Engine, kind: Kind) -> int:
    """Bytes of the distinct storages of one kind on this rank now, padding included."""
    return storage_bytes(piece.local for piece in engine.pieces(kind))


def holdings(engine: Engine, kind: Kind) -> list[Holding]:
    """What this rank holds of one kind now."""
    return [Holding(p.name, p.slot, tuple(p.shape), p.box) for p in engine.pieces(kind)]
