"""Pipeline parallelism by torch.distributed.pipelining: each rank holds stages and sends activations to the next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.utils.checkpoint import GraphExecGroup

from harness.config.schema import RunConfig
from harness.engines.base import Batch
from harness.engines.torch.data_parallel import DataParallel
from harness.engines.torch.grad_norm import local_part
from harness.engines.torch.loss_scaler import LossScaler
from harness.layout.layout import Layout
from harness.layout.partition import Stage
from harness.probe import Probe

# GPipe: arXiv 1811.06965. 1F1B and its interleaved form: arXiv 2104.04473. Zero bubble (ZB1P, ZB-V): arXiv 2401.10241.
# DualPipe: arXiv 2412.19437; torch runs its forwards and backwards one after another, where its paper overlaps them.
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Pipeline:
    """A MicroBatchRunner that runs forward and backward in the order of a pipeline schedule."""

    def __init__(
        self,
        stages: Sequence[Stage],
        config: RunConfig,
        layout: Layout,
        group: ProcessGroup,
        device: torch.device,
        parallel: DataParallel,
        probe: Probe,
        loss_scaler: LossScaler,
    ) -> None:
        self.loss_scaler = loss_scaler
        self.num_micro_batches = layout.grad_accumulation_steps(config.train)
        self.holds_embedding, self.holds_head = stages[0].holds_embedding, stages[-1].holds_head
        # A collective creates NCCL's communicator before sends and receives share a batch; with a device NCCL runs it.
        torch.distributed.barrier(group, device_ids=[device.index] if device.type == "cuda" else None)
        shape = stage_io_shape(config, layout)
        pipeline_stages = [
            ProbedPipelineStage(index, stage, config, shape, device, group, parallel, probe)
            for index, stage in enumerate(stages)
        ]
        schedule = SCHEDULES[layout.schedule]
        own = pipeline_stages if issubclass(schedule, PipelineScheduleMulti) else pipeline_stages[0]
        # The last stage computes its loss itself, so that logits live no longer than in other layouts.
        self.schedule = schedule(own, self.num_micro_batches, loss_fn=self.scale_loss, scale_grads=False)

    def __call__(self, micro_batches: Sequence[Batch]) -> Tensor | None:
        """Return the mean loss, detached, on the last stage's rank and None elsewhere."""
        inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        losses: list[Tensor] = []
        arguments = (inputs,) if self.holds_embedding else ()
        keywords = {"target": targets, "targets": targets, "losses": losses} if self.holds_head else {}
        self.schedule.step(*arguments, **keywords, return_outputs=False)
        return torch.stack(losses).detach().sum() / self.loss_scaler.factor if losses else None

    def scale_loss(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's share of the step's mean loss, scaled; the schedule passes `targets`, unused here."""
        return loss * (self.loss_scaler.factor / self.num_micro_batches)


@dataclass(frozen=True)
class TiedTable:
    """The table that the first stage of a pipeline has as embedding and the last as head, each with its own copy."""

    master: nn.Parameter
    group: ProcessGroup  # of the pipeline
    device: torch.device  # of the group's messages

    @property
    def is_copy(self) -> bool:
        """Whether the other end's table counts in a sum over parameters, and not this one."""
        return self.group.rank() > 0

    def sum_gradients(self) -> None:
        """Add the gradient of the other end's table, from its other use, to this one's in place, and so there.

        Both ends then make the same update. A sum of two is the same in either order, to the bit.
        """
        assert self.master.grad is not None
        local = local_part(self.master.grad)
        if not local.numel():  # as large on the other end
            return
        local += self.exchange(local.to(self.device)).to(local.device)

    def exchange(self, sent: Tensor) -> Tensor:
        """Send a tensor to the other end, and return what that sends."""
        peer = dist.get_global_rank(self.group, 0 if self.is_copy else self.group.size() - 1)
        received = torch.empty_like(sent)
        messages = [(dist.isend, sent), (dist.irecv, received)]
        for work in dist.batch_isend_irecv([dist.P2POp(way, part, peer, self.group) for way, part in messages]):
            work.wait()
        return received


def stage_io_shape(config: RunConfig, layout: Layout) -> tuple[int, int, int]:
    """Return the shape (batch, seq, hidden) of the hidden states between stages, with this rank's part of seq."""
    train = config.train
    local_seq_len = train.seq_len // layout.cp // (layout.tp if layout.sequence_parallel else 1)
    return train.micro_batch, local_seq_len, config.model.hidden_size


class ProbedPipelineStage(PipelineStage):
    """A stage that announces its passes to the probe, and collects weight gradients for which torch runs no hook."""

    def __init__(
        self,
        local_index: int,
        stage: Stage,
        config: RunConfig,
        shape: tuple[int, int, int],
        device: torch.device,
        group: ProcessGroup,
        parallel: DataParallel,
        probe: Probe,
    ) -> None:
        tokens = torch.empty(shape[:2], dtype=torch.int64, device="meta")
        width = getattr(torch, config.precision.compute)
        hidden = torch.empty(shape, dtype=width, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        super().__init__(
            parallel.modules[local_index],
            stage.index,
            stage.count,
            device,
            # The first step would send tensors to infer the shapes if they were not given here.
            input_args=tokens if stage.holds_embedding else hidden,
            output_args=loss if stage.holds_head else hidden,
            group=group,
        )
        self.local_index = local_index  # its index among the stages of this rank
        self.parallel = parallel
        self.probe = probe

    def forward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        """Run torch's forward of one micro-batch as a phase."""
        with self.probe.phase("forward"):
            return super().forward_one_chunk(*arguments, **keywords)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run torch's backward of one micro-batch, or its first half, as a phase."""
        phase = self.probe.phase("backward" if full_backward else "backward_input")
        with phase, self.parallel.sync_context(last_backward, self.local_index):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second half of torch's backward, the gradients of weights, as a phase."""
        # torch computes these gradients weight by weight. A checkpointed forward would be recomputed for each of them
        # if they were not in one GraphExecGroup.
        sync = self.parallel.sync_context(last_backward, self.local_index)
        with self.probe.phase("backward_weight"), sync, GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.parallel.collect_grads(self.local_index)  # torch assigns these gradients without running hooks
