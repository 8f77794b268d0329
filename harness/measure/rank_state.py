"""The model state that a rank really holds, as evidence of its layout and in bytes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from harness.engines.base import Engine
from harness.layout.state_widths import StateKind
from harness.probe import ShardSource
from harness.records.tensor_shards import StateShard
from harness.tensors.shard import BUCKET, GATHERED, STAGING, Shard
from harness.tensors.storage import element_bytes, storage_bytes


def state_bytes(engine: ShardSource, kind: StateKind) -> int:
    """Return the bytes of one kind of state that this rank holds now.

    Distinct storages count whole, padding included; views into buckets count by their own elements.
    """
    return shard_bytes(engine.local_shards(kind))


def bytes_by_device(engine: ShardSource, kind: StateKind) -> dict[str, int]:
    """Return the bytes of one kind of state on cpu and on cuda, without gathered parameters and staging buffers."""
    by_device: dict[str, list[Shard]] = defaultdict(list)
    for shard in engine.local_shards(kind):
        if shard.state_name not in (GATHERED, STAGING):
            by_device[shard.local.device.type].append(shard)
    return {device: shard_bytes(shards) for device, shards in by_device.items()}


def shard_bytes(shards: Iterable[Shard]) -> int:
    """Return the bytes of shards: distinct storages whole, views into buckets by their own elements."""
    bucket_views: list[Tensor] = []
    own: list[Tensor] = []
    for shard in shards:
        (bucket_views if shard.state_name == BUCKET else own).append(shard.local)
    return storage_bytes(own) + element_bytes(bucket_views)


def state_shards(engine: ShardSource, kind: StateKind) -> list[StateShard]:
    """Return the shards of one kind of state that this rank holds now."""
    return [
        StateShard(p.name, p.state_name, tuple(p.shape), p.box, str(p.local.dtype).removeprefix("torch."))
        for p in engine.local_shards(kind)
    ]


def state_fields(engine: Engine, gradient_bytes_by_device: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a rank's report on the state that it holds now; gradients are those of a step before."""
    return {
        "parameter_bytes": state_bytes(engine, "parameters"),
        "optimizer_bytes": state_bytes(engine, "optimizer"),
        "host_state": sorted(engine.host_state),
        "state_bytes_by_device": {
            "parameters": bytes_by_device(engine, "parameters"),
            "gradients": gradient_bytes_by_device,
            "optimizer": bytes_by_device(engine, "optimizer"),
        },
        "parameter_shards": state_shards(engine, "parameters"),
        "optimizer_shards": state_shards(engine, "optimizer"),
    }
