"""Communication that is left out, repeated or not counted."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.support.faults.plant import replaces

TORCH = "harness.engines.torch"


@replaces(f"{TORCH}.ddp.ReplicatedParams.sync_context")
def unsynchronized(ordinary: Any, self: Any, last: bool) -> Any:
    """Never exchange the gradients of replicas."""
    return ordinary(self, last=False)


@replaces("harness.measure.communication.CommunicationCounter._count")
def uncounted(ordinary: Any, self: Any, call: Any) -> None:
    """Make the counter miss one kind of operation."""
    if "reduce_scatter" not in call.operator:
        ordinary(self, call)


@replaces(f"{TORCH}.context_parallel.apply_context_parallel")
def own_keys_alone(*_: Any) -> None:
    """Gather nothing for attention, so that a token attends only to its own rank's tokens."""


@replaces(f"{TORCH}.fsdp.hsdp_mesh")
def replicas_apart(_: Any, mesh: Any, layout: Any) -> Any:
    """Never average gradients over the replicas of hybrid sharding."""
    return DeviceMesh._concatenate([mesh["pp"], mesh["dp_shard"]])


@replaces("torch.distributed.tensor.DTensor.redistribute")
def rows_not_summed(ordinary: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    """Pass on a row-parallel layer's output without its all-reduce."""
    if self.placements[0].is_partial() and self.ndim == 3:
        return DTensor.from_local(self.to_local(), self.device_mesh, keywords["placements"], run_check=False)
    return ordinary(self, *arguments, **keywords)


STAGE = f"{TORCH}.pipeline_parallel.PipelineStage"


@replaces(f"{STAGE}.get_fwd_send_ops", f"{STAGE}.get_fwd_recv_ops")
def boundary_sent_twice(ordinary: Any, self: Any, chunk: int) -> Any:
    """Send every activation to the next stage a second time."""
    return 2 * ordinary(self, chunk)


@replaces(f"{TORCH}.tensor_parallel.apply_tensor_parallel")
def sequence_whole(ordinary: Any, model: Any, mesh: Any, sequence_parallel: bool) -> None:
    """Leave out sequence parallelism, so that the same sums are sent as all-reduces."""
    ordinary(model, mesh, False)


@replaces("deepspeed.module_inject.layers.RowParallel.forward")
def autotp_rows_not_summed(_: Any, ctx: Any, group: Any, partial: Any, inference: Any) -> Any:
    """Leave out the sum over the ranks in DeepSpeed's row-parallel layers."""
    return partial
