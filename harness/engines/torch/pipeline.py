"""Pipeline parallelism by torch.distributed.pipelining: each rank holds its stages and passes activations on."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils.checkpoint import GraphExecGroup

from harness.config import RunConfig
from harness.engines import Batch
from harness.engines.torch.data_parallel import DataParallel
from harness.layout import Layout
from harness.measure.probe import Probe
from harness.model import Decoder
from harness.placement import Stage

# GPipe: arXiv 1811.06965. 1F1B and its interleaved form: arXiv 2104.04473. Zero bubble (ZB1P): arXiv 2401.10241.
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPED = {"interleaved_1f1b": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


class Pipeline:
    """Forward and backward of a step's micro-batches in the order of a schedule."""

    def __init__(
        self,
        parts: Sequence[Decoder],
        stages: Sequence[Stage],
        config: RunConfig,
        layout: Layout,
        group: ProcessGroup,
        device: torch.device,
        parallel: DataParallel,
        probe: Probe,
    ) -> None:
        self.count = layout.accumulation(config.train)
        self.holds_embedding, self.holds_head = stages[0].holds_embedding, stages[-1].holds_head
        torch.distributed.barrier(group)  # NCCL's communicator is there before sends and receives meet in one batch
        made = [
            HeardStage(part, stage, config, device, group, parallel, probe)
            for part, stage in zip(parts, stages, strict=True)
        ]
        # The last stage computes its loss itself, so that logits live no longer than in other layouts.
        share = partial(share_of_loss, self.count)
        self.schedule: Any
        if layout.schedule in SINGLE:
            self.schedule = SINGLE[layout.schedule](made[0], self.count, loss_fn=share, scale_grads=False)
        else:
            self.schedule = LOOPED[layout.schedule](list(made), self.count, loss_fn=share, scale_grads=False)

    def __call__(self, micro_batches: Sequence[Batch]) -> Tensor | None:
        """The mean loss, detached, where the last stage is; None elsewhere."""
        inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        losses: list[Tensor] = []
        arguments = (inputs,) if self.holds_embedding else ()
        ends = {"target": targets, "targets": targets, "losses": losses} if self.holds_head else {}
        self.schedule.step(*arguments, **ends, return_outputs=False)
        return torch.stack(losses).detach().sum() if losses else None


def share_of_loss(count: int, loss: Tensor, targets: Tensor) -> Tensor:
    """A micro-batch's part of the step's mean."""
    return loss / count


class HeardStage(PipelineStage):
    """A stage whose passes the probe hears, and whose weight gradients reach those that train them."""

    def __init__(
        self,
        part: Decoder,
        stage: Stage,
        config: RunConfig,
        device: torch.device,
        group: ProcessGroup,
        parallel: DataParallel,
        probe: Probe,
    ) -> None:
        size = (config.train.micro_batch, config.train.seq_len)
        tokens = torch.empty(size, dtype=torch.int64, device="meta")
        width = getattr(torch, config.precision.compute)
        hidden = torch.empty((*size, config.model.hidden_size), dtype=width, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        super().__init__(
            part,
            stage.index,
            stage.count,
            device,
            input_args=tokens if stage.holds_embedding else hidden,  # given, so that none are sent to find them out
            output_args=loss if stage.holds_head else hidden,
            group=group,
        )
        self.parallel = parallel
        self.probe = probe

    def forward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        with self.probe.phase("forward"):
            return super().forward_one_chunk(*arguments, **keywords)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.probe.phase("backward" if full_backward else "backward_input"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        # One group: torch makes the gradients weight by weight, and would run a checkpointed forward again for each.
        with self.probe.phase("backward_weight"), GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.parallel.collect()  # torch puts these gradients on the parameters past every hook
