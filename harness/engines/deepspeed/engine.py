"""The Engine over a DeepSpeed engine: its steps, the shards a rank holds, and its shutdown."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from harness.engines.base import Batch, StepResult
from harness.engines.deepspeed import state
from harness.engines.deepspeed.checkpoint import DeepSpeedCheckpoint
from harness.engines.deepspeed.shards import ParamSlices
from harness.layout.layout import Layout
from harness.layout.state_widths import StateKind
from harness.models.decoder import loss_of
from harness.probe import Probe
from harness.tensors.fp32_sums import sums_of_squares
from harness.tensors.shard import STAGING, Shard


class DeepSpeedTrainEngine:
    """An Engine over deepspeed.DeepSpeedEngine."""

    devices = 1

    def __init__(self, engine: Any, param_slices: ParamSlices, layout: Layout, probe: Probe, loss_chunks: int) -> None:
        self.model: torch.nn.Module = engine.module
        self.host_state = state.host_state_kinds(engine.optimizer)
        self._engine = engine
        self._param_slices = param_slices
        self._probe = probe
        self._loss_chunks = loss_chunks
        self._shard_cache: state.ShardCache = {}
        self._gradients_are_ready = False  # True only while probe.gradients_ready runs
        # Stage 1 may hold whole gradients until it reduces them once a step. That reduction is a separate call after
        # the phase of backward has ended, so that whole gradients can be measured before it.
        self._reduces_after_backward = layout.zero_stage == 1 and not engine.zero_overlap_comm()
        engine.enable_backward_allreduce = not self._reduces_after_backward

    @property
    def checkpoint(self) -> DeepSpeedCheckpoint:
        """Return this engine's checkpoint."""
        return DeepSpeedCheckpoint(self._engine)

    @property
    def skipped_steps(self) -> int:
        """Return how many steps DeepSpeed has skipped so far."""
        return int(self._engine.skipped_steps)

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Run one step; see Engine.step.

        Raise FloatingPointError where DeepSpeed skips the step although no loss scale is to be adapted.
        """
        accumulation = self._engine.gradient_accumulation_steps()
        if len(micro_batches) != accumulation:
            raise ValueError(f"DeepSpeed was built for {accumulation} micro-batches a step, not {len(micro_batches)}")
        losses = []
        for index, batch in enumerate(micro_batches):
            if index:
                self._engine.step()  # counts the previous micro-batch and updates nothing
            with self._probe.phase("forward"):
                loss = loss_of(self._engine, batch.inputs, batch.targets, self._loss_chunks)
                losses.append(loss.detach())
            with self._probe.phase("backward"):
                self._engine.backward(loss)
                del loss  # frees what is left of the graph
        if self._reduces_after_backward:
            with self._probe.phase("reduce"):
                self._engine.allreduce_gradients()
        self._gradients_are_ready = True
        self._probe.gradients_ready(self)
        with self._probe.phase("norm"):
            squares = self._gradient_squares()
        self._gradients_are_ready = False
        with self._probe.phase("optimizer"):
            self._engine.step()
            if not self._engine.was_step_applied() and not self._engine.fp16_enabled():
                raise FloatingPointError("DeepSpeed skipped a step: the gradients are not finite")
            return StepResult(torch.stack(losses).mean(), self._engine.get_global_grad_norm(), squares)

    @torch.no_grad()
    def _gradient_squares(self) -> torch.Tensor | None:
        """Return the sum of squares of each gradient's shard; None where they lie on the host, and would take long."""
        if "gradients" in self.host_state:
            return None
        return sums_of_squares(shard.local for shard in self.local_shards("gradients"))

    def local_shards(self, kind: StateKind) -> Iterable[Shard]:
        """Yield the shards of one kind of state that this rank holds now, and the copies that it holds beside them.

        The copies' state_name is "gathered" for a parameter that is unsharded on a stage-3 rank, and "staging" for a
        gradient that is already reduced or accumulated but not yet freed; at gradients_ready the latter are left out.
        """
        optimizer, ready = self._engine.optimizer, self._gradients_are_ready
        shards = state.local_shards(kind, self.model, optimizer, self._param_slices, self._shard_cache)
        shards = (shard for shard in shards if not (ready and shard.state_name == STAGING))
        if not (ready and kind == "gradients" and self._engine.fp16_enabled()):
            return shards
        return (shard._replace(local=shard.local.float() / optimizer.loss_scale) for shard in shards)

    def named_buffers(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        """Yield the reduction buckets, even an unused one, and the buffers for copies between device and host."""
        optimizer = self._engine.optimizer
        yield from (("communication", "reduction buckets", bucket) for bucket in state.reduction_buckets(optimizer))
        yield from (("communication", "offload buffers", buffer) for buffer in state.offload_buffers(optimizer))

    def close(self) -> None:
        """Destroy the DeepSpeed engine and restore torch's own linear function."""
        from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched

        self._shard_cache.clear()
        self._engine.destroy()
        forget_modules()
        torch.nn.functional.linear = getattr(Patched, "linear_bk", torch.nn.functional.linear)


def forget_modules() -> None:
    """Clear DeepSpeed's lists of modules that outlive an engine: in stage 3 they keep all of its memory allocated.

    They are a stack of modules, and a cache that functools keeps behind DeepSpeed's wrapper for profiling.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    FWD_MODULE_STACK.clear()
    wrapped = getattr(Coordinator, f"_{Coordinator.__name__}__params_to_release")
    inspect.getclosurevars(wrapped).nonlocals["func"].cache_clear()
