"""Communication that is left out, repeated or not counted."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.engines.torch import (
    context_parallel,
    ddp,
    fsdp,
    pipeline_parallel,
    tensor_parallel,
)
from harness.measure.collective_rules import CollectiveCall
from harness.measure.communication import CommunicationCounter
from harness.worker import main as worker_main


def unsynchronized(run_dir: str) -> None:
    """Never exchange the gradients of replicas."""
    micro_batch = ddp.ReplicatedParams.sync_context
    ddp.ReplicatedParams.sync_context = lambda self, last: micro_batch(self, last=False)  # type: ignore[assignment]
    worker_main.main(run_dir)


def uncounted(run_dir: str) -> None:
    """Make the counter miss one kind of operation."""
    count = CommunicationCounter._count

    def spoiled(self: Any, call: CollectiveCall) -> None:
        if "reduce_scatter" not in call.operator:
            count(self, call)

    CommunicationCounter._count = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def own_keys_alone(run_dir: str) -> None:
    """Gather nothing for attention, so that a token attends only to its own rank's tokens."""
    context_parallel.apply_context_parallel = lambda model, group, spans: None
    worker_main.main(run_dir)


def replicas_apart(run_dir: str) -> None:
    """Never average gradients over the replicas of hybrid sharding."""
    alone = DeviceMesh._concatenate
    fsdp.hsdp_mesh = lambda mesh, layout: alone([mesh["pp"], mesh["dp_shard"]])
    worker_main.main(run_dir)


def rows_not_summed(run_dir: str) -> None:
    """Pass on a row-parallel layer's output without its all-reduce."""
    redistribute = DTensor.redistribute

    def spoiled(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.placements[0].is_partial() and self.ndim == 3:
            return DTensor.from_local(self.to_local(), self.device_mesh, keywords["placements"], run_check=False)
        return redistribute(self, *arguments, **keywords)

    DTensor.redistribute = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def boundary_sent_twice(run_dir: str) -> None:
    """Send every activation to the next stage a second time."""
    send_ops = pipeline_parallel.PipelineStage.get_fwd_send_ops
    receive_ops = pipeline_parallel.PipelineStage.get_fwd_recv_ops
    pipeline_parallel.PipelineStage.get_fwd_send_ops = lambda self, chunk: 2 * send_ops(self, chunk)  # type: ignore[method-assign]
    pipeline_parallel.PipelineStage.get_fwd_recv_ops = lambda self, chunk: 2 * receive_ops(self, chunk)  # type: ignore[method-assign]
    worker_main.main(run_dir)


def sequence_whole(run_dir: str) -> None:
    """Leave out sequence parallelism, so that the same sums are sent as all-reduces."""
    apply = tensor_parallel.apply_tensor_parallel
    tensor_parallel.apply_tensor_parallel = lambda model, mesh, sequence_parallel: apply(model, mesh, False)
    worker_main.main(run_dir)


def autotp_rows_not_summed(run_dir: str) -> None:
    """Leave out the sum over the ranks in DeepSpeed's row-parallel layers."""
    from deepspeed.module_inject import layers

    layers.RowParallel.forward = staticmethod(lambda ctx, group, input, inference: input)
    worker_main.main(run_dir)
