"""DeepSpeed as the loop sees it: steps, what a rank holds, and an orderly end."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from harness.engines.base import Batch, StepResult
from harness.engines.deepspeed import state
from harness.engines.deepspeed.shards import ParamSlices
from harness.layout.layout import Layout
from harness.layout.state_widths import StateKind
from harness.models.loss import loss_of
from harness.probe import Probe
from harness.tensors.shard import STAGING, Shard


class DeepSpeedTrainEngine:
    """An Engine over deepspeed.DeepSpeedEngine."""

    devices = 1

    def __init__(self, engine: Any, names: ParamSlices, layout: Layout, probe: Probe, loss_chunks: int) -> None:
        self.model: torch.nn.Module = engine.module
        self.host_state = state.host_state_kinds(engine.optimizer)
        self._engine = engine
        self._names = names
        self._probe = probe
        self._loss_chunks = loss_chunks
        self._ready = False  # whether gradients are reduced, and only they are asked for
        # Stage 1 may hold whole gradients until it reduces them once a step. Called apart, the reduction begins where
        # a phase of backward has ended, so that whole gradients can be seen.
        self._reduces_apart = layout.zero_stage == 1 and not engine.zero_overlap_comm()
        engine.enable_backward_allreduce = not self._reduces_apart

    @property
    def skipped_steps(self) -> int:
        return int(self._engine.skipped_steps)

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """See Engine.step. Raises FloatingPointError where DeepSpeed leaves a step out for gradients that overflow."""
        accumulation = self._engine.gradient_accumulation_steps()
        if len(micro_batches) != accumulation:
            raise ValueError(f"{len(micro_batches)} micro-batches, built for {accumulation}: DeepSpeed counts them")
        losses = []
        for index, batch in enumerate(micro_batches):
            if index:
                self._engine.step()  # counts the micro-batch before this one and updates nothing
            with self._probe.phase("forward"):
                loss = loss_of(self._engine, batch.inputs, batch.targets, self._loss_chunks)
                losses.append(loss.detach())
            with self._probe.phase("backward"):
                self._engine.backward(loss)
                del loss  # and with it what is left of the graph
        if self._reduces_apart:
            with self._probe.phase("reduce"):
                self._engine.allreduce_gradients()
        self._ready = True
        self._probe.gradients_ready(self)
        self._ready = False
        with self._probe.phase("optimizer"):
            self._engine.step()
            if not self._engine.was_step_applied():
                raise FloatingPointError("DeepSpeed left out a step: the gradients are not finite")
            return StepResult(torch.stack(losses).mean(), self._engine.get_global_grad_norm())

    def local_shards(self, kind: StateKind) -> Iterable[Shard]:
        """What this rank holds now; at gradients_ready the gradients alone.

        Beside the pieces that are the parameters or gradients there may be copies held on top: slot "gathered", a
        parameter whole on a stage-3 rank; slot "staging", a gradient already reduced or added up, but not yet freed.
        """
        found = state.local_shards(kind, self._engine.optimizer, self._names)
        return (piece for piece in found if not (self._ready and piece.state_name == STAGING))

    def named_buffers(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        """The reduction buckets, of which the second may wait for its turn, and what passes to and from the host."""
        yield from (("communication", "reduction buckets", bucket) for bucket in state.reduction_buckets(self._engine.optimizer))
        yield from (
            ("communication", "offload buffers", buffer) for buffer in state.offload_buffers(self._engine.optimizer)
        )

    def close(self) -> None:
        from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched

        self._engine.destroy()
        torch.nn.functional.linear = getattr(Patched, "linear_bk", torch.nn.functional.linear)
