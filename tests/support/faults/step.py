"""Steps that run other operations, kernels or schedules than configured, and memory that is not logged."""

from typing import Any

import torch

import harness.models.activation_checkpoint
import harness.models.build
import harness.models.decoder
import harness.models.init_weights
from harness.config.schema import CheckpointingConfig
from harness.engines.torch import (
    pipeline_parallel,
)
from harness.measure.allocation_logger import CpuAllocationLog
from harness.records.heartbeat import HeartbeatWriter
from harness.worker import main as worker_main
from tests.support.faults.rank import rank


def never_recomputed(run_dir: str) -> None:
    """Leave out checkpointing."""
    harness.models.build.apply_checkpointing = lambda model, checkpointing, probe: None
    worker_main.main(run_dir)


def every_layer_recomputed(run_dir: str) -> None:
    """Checkpoint every layer, whatever is configured."""
    apply = harness.models.build.apply_checkpointing
    full = CheckpointingConfig("full")
    harness.models.build.apply_checkpointing = lambda model, checkpointing, probe: apply(model, full, probe)
    worker_main.main(run_dir)


def products_not_kept(run_dir: str) -> None:
    """Make selective checkpointing keep attention alone, so that every projection runs again."""
    aten = torch.ops.aten
    harness.models.activation_checkpoint.SAVED_OPS = frozenset(
        (aten._scaled_dot_product_flash_attention_for_cpu.default,)
    )
    worker_main.main(run_dir)


def every_product_kept(run_dir: str) -> None:
    """Make selective checkpointing keep the products that are to run again."""
    CheckpointingConfig.saves_product = lambda self, number: True  # type: ignore[method-assign]
    worker_main.main(run_dir)


def parts_of_the_loss_kept(run_dir: str) -> None:
    """Keep every chunk's logits while the loss goes through its tokens in chunks."""
    apply = harness.models.build.apply_loss_chunks

    def spoiled(model: Any, chunks: int, probe: Any) -> None:
        apply(model, chunks, probe)
        del model.lm_head.chunk_loss

    harness.models.build.apply_loss_chunks = spoiled
    worker_main.main(run_dir)


def eager_on_one_rank(run_dir: str) -> None:
    """Compose rank 1's attention of plain operators."""
    build = harness.models.decoder.Attention.__init__

    def spoiled(self: Any, *arguments: Any) -> None:
        build(self, *arguments)
        self.eager = rank() == 1

    harness.models.decoder.Attention.__init__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def other_kernel_of_the_optimizer(run_dir: str) -> None:
    """Use the fused optimizer, whatever is configured."""
    adamw = torch.optim.AdamW
    torch.optim.AdamW = lambda parameters, **keywords: adamw(
        parameters, **(keywords | {"fused": True, "foreach": False})
    )  # type: ignore[assignment,misc]
    worker_main.main(run_dir)


def never_compiled(run_dir: str) -> None:
    """Leave the layers uncompiled."""
    harness.models.build.apply_compile = lambda model: None
    worker_main.main(run_dir)


def compiled_again(run_dir: str) -> None:
    """Throw away the compiled code in the first timed step."""

    def spoiled(self: Any, phase: str, step: int = 0) -> None:
        beat(self, phase, step)
        if phase == "timed":
            torch.compiler.reset()

    beat = HeartbeatWriter.__call__
    HeartbeatWriter.__call__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def other_schedule(run_dir: str) -> None:
    """Run GPipe in place of 1F1B, which trains the same but keeps every micro-batch."""
    pipeline_parallel.SINGLE_STAGE_SCHEDULES["1f1b"] = pipeline_parallel.ScheduleGPipe
    worker_main.main(run_dir)


def weights_not_put_off(run_dir: str) -> None:
    """Compute the weights' gradients in zero bubble's backward for inputs as well."""
    backward = pipeline_parallel.PipelineStage.backward_one_chunk

    def spoiled(self: Any, chunk: int, loss: Any = None, full: bool = True, last_backward: bool = False) -> None:
        backward(self, chunk, loss, True, last_backward)

    pipeline_parallel.PipelineStage.backward_one_chunk = spoiled  # type: ignore[method-assign]
    pipeline_parallel.PipelineStage.backward_weight_one_chunk = lambda self, chunk, last_backward=False: None  # type: ignore[method-assign]
    worker_main.main(run_dir)


def layer_twice(run_dir: str) -> None:
    """Run every layer a second time in forward for nothing; losses and gradients are right."""
    forward = harness.models.decoder.Block.forward

    def spoiled(self: Any, *arguments: Any) -> Any:
        with torch.no_grad():
            forward(self, *arguments)
        return forward(self, *arguments)

    harness.models.decoder.Block.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def layer_of_library_twice(run_dir: str) -> None:
    """Run every layer of a library's model a second time in forward, for nothing."""
    from harness.models import hf_library

    build = hf_library.build_hf_model

    def spoiled(*arguments: Any) -> Any:
        built = build(*arguments)
        for block in built.layers_by_index().values():
            block.forward = twice(block.forward)
        return built

    hf_library.build_hf_model = spoiled
    worker_main.main(run_dir)


def twice(forward: Any) -> Any:
    def spoiled(*arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            forward(*arguments, **keywords)
        return forward(*arguments, **keywords)

    return spoiled


def block_unlogged(run_dir: str) -> None:
    """Leave one of the blocks alive at the peak out of the memory log."""
    end = CpuAllocationLog.end

    def spoiled(self: Any) -> Any:
        log = end(self)
        missing = int(log.bytes[: self.initial_count].argmax())
        log.bytes[missing] = 1
        return log

    CpuAllocationLog.end = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)
