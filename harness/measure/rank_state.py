"""What a rank really holds of the model's state, as the proof of its layout and as bytes."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from harness.layout.state_widths import StateKind
from harness.probe import ShardSource
from harness.tensors.shard import BUCKET, GATHERED, STAGING, Shard
from harness.tensors.storage import element_bytes, storage_bytes


class HeldShard(NamedTuple):
    """One piece without its values: `box` is the (start, stop) held along each dimension of the whole `shape`."""

    name: str
    slot: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    dtype: str


def held_bytes(engine: ShardSource, kind: StateKind) -> int:
    """Bytes of one kind on this rank now: distinct storages, padding included; of views into buckets their own."""
    return _bytes(engine.local_shards(kind))


def bytes_by_device(engine: ShardSource, kind: StateKind) -> dict[str, int]:
    """The same by the kind of device they lie on, cpu or cuda; copies on top of the state itself are left out."""
    by_device: dict[str, list[Shard]] = defaultdict(list)
    for piece in engine.local_shards(kind):
        if piece.state_name not in (GATHERED, STAGING):
            by_device[piece.local.device.type].append(piece)
    return {device: _bytes(pieces) for device, pieces in by_device.items()}


def _bytes(pieces: Iterable[Shard]) -> int:
    in_buckets: list[Tensor] = []
    own: list[Tensor] = []
    for piece in pieces:
        (in_buckets if piece.state_name == BUCKET else own).append(piece.local)
    return storage_bytes(own) + element_bytes(in_buckets)


def held_shards(engine: ShardSource, kind: StateKind) -> list[HeldShard]:
    """What this rank holds of one kind now."""
    return [
        HeldShard(p.name, p.state_name, tuple(p.shape), p.box, str(p.local.dtype).removeprefix("torch."))
        for p in engine.local_shards(kind)
    ]
