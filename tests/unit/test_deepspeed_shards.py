"""The shards of DeepSpeed's buffers, which a profiled step asks for very often."""

import torch

from harness.engines.deepspeed import state
from harness.engines.deepspeed.shards import ParamSlice


def test_shards_of_a_gradient_are_cached_for_each_buffer() -> None:
    parameter, flat = torch.zeros(3, 4), torch.zeros(20)
    owned = state.OwnedSlice(parameter, 12, 6, 12, 0, 0)  # the second of two ranks' parts
    slices = {id(parameter): ParamSlice.whole("weight", (3, 4))}
    cache: state.ShardCache = {}
    buffer, other = flat.narrow(0, 2, 8), flat.narrow(0, 10, 8)
    first, again, another = (state.cached_shards(cache, owned, slices, each) for each in (buffer, buffer, other))
    assert first is again and another is not first
    for shards, offset in ((first, 2), (another, 10)):
        (shard,) = shards
        assert (shard.box, shard.local.storage_offset(), shard.local.numel()) == (((6, 12),), offset, 6)
