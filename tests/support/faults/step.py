"""Steps that run other operations, kernels or schedules than configured, and memory that is not logged."""

from typing import Any

import torch

from harness.config.schema import CheckpointingConfig
from harness.engines.torch import pipeline_parallel
from harness.models import activation_checkpoint
from harness.worker import main as worker_main
from tests.support.faults.plant import changed, replaces

BUILD = "harness.models.build"


@replaces(f"{BUILD}.apply_checkpointing")
def never_recomputed(*_: Any) -> None:
    """Leave out checkpointing."""


@replaces(f"{BUILD}.apply_checkpointing")
def every_layer_recomputed(ordinary: Any, model: Any, checkpointing: Any, probe: Any) -> None:
    """Checkpoint every layer, whatever is configured."""
    ordinary(model, CheckpointingConfig("full"), probe)


def products_not_kept(run_dir: str) -> None:
    """Make selective checkpointing keep attention alone, so that every projection runs again."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    activation_checkpoint.SAVED_OPS = frozenset((attention,))
    worker_main.main(run_dir)


@replaces("harness.config.schema.CheckpointingConfig.saves_product")
def every_product_kept(*_: Any) -> bool:
    """Make selective checkpointing keep the products that are to run again."""
    return True


@replaces(f"{BUILD}.apply_loss_chunks")
def parts_of_the_loss_kept(ordinary: Any, model: Any, *arguments: Any) -> None:
    """Keep every chunk's logits while the loss goes through its tokens in chunks."""
    ordinary(model, *arguments)
    del model.lm_head.chunk_loss


@replaces("harness.models.decoder.Attention.__init__", of_rank=1)
def eager_on_one_rank(ordinary: Any, self: Any, *arguments: Any) -> None:
    """Compose rank 1's attention of plain operators."""
    ordinary(self, *arguments)
    self.eager = True


@replaces("torch.optim.AdamW")
def other_kernel_of_the_optimizer(ordinary: Any, parameters: Any, **keywords: Any) -> Any:
    """Use the fused optimizer, whatever is configured."""
    return ordinary(parameters, **(keywords | {"fused": True, "foreach": False}))


@replaces(f"{BUILD}.apply_compile")
def never_compiled(*_: Any) -> None:
    """Leave the layers uncompiled."""


@replaces("harness.records.heartbeat.HeartbeatWriter.__call__")
def compiled_again(ordinary: Any, self: Any, phase: str, *arguments: Any) -> None:
    """Throw away the compiled code in the first timed step."""
    ordinary(self, phase, *arguments)
    if phase == "timed":
        torch.compiler.reset()


def other_schedule(run_dir: str) -> None:
    """Run GPipe in place of 1F1B, which trains the same but keeps every micro-batch."""
    pipeline_parallel.SINGLE_STAGE_SCHEDULES["1f1b"] = pipeline_parallel.ScheduleGPipe
    worker_main.main(run_dir)


STAGE = "harness.engines.torch.pipeline_parallel.PipelineStage"


@replaces(f"{STAGE}.backward_one_chunk", f"{STAGE}.backward_weight_one_chunk")
def weights_not_put_off(ordinary: Any, self: Any, chunk: int, *others: Any) -> None:
    """Compute the weights' gradients in zero bubble's backward for inputs as well."""
    if ordinary.__name__ == "backward_one_chunk":
        loss, _, last_backward = others
        ordinary(self, chunk, loss, True, last_backward)


@replaces("harness.models.decoder.Block.forward")
def layer_twice(ordinary: Any, *arguments: Any, **keywords: Any) -> Any:
    """Run every layer a second time in forward for nothing; losses and gradients are right."""
    return twice(ordinary, *arguments, **keywords)


@replaces("harness.models.hf_library.build_hf_model")
def layer_of_library_twice(ordinary: Any, *arguments: Any) -> Any:
    """Run every layer of a library's model a second time in forward, for nothing."""
    built = ordinary(*arguments)
    for block in built.layers_by_index().values():
        block.forward = changed(twice, block.forward)
    return built


def twice(forward: Any, *arguments: Any, **keywords: Any) -> Any:
    with torch.no_grad():
        forward(*arguments, **keywords)
    return forward(*arguments, **keywords)


@replaces("harness.measure.allocation_logger.CpuAllocationLog.end")
def block_unlogged(ordinary: Any, self: Any) -> Any:
    """Leave one of the blocks alive at the peak out of the memory log."""
    log = ordinary(self)
    log.bytes[int(log.bytes[: self.initial_count].argmax())] = 1
    return log
