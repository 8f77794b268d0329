"""The memory that a rank needs to communicate, beside model state. Imports no torch."""

from collections.abc import Sequence
from functools import lru_cache

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.deepspeed_buffers import stage_2_buffers, stage_3_buffers
from harness.cost_model.deepspeed_memory import holds_gradients_twice
from harness.cost_model.fully_shard_memory import fully_shard_buffers
from harness.cost_model.stage_activations import observed_layers
from harness.cost_model.transient_buffers import (
    ONLY_PASS,
    Pass,
    TransientBuffers,
    group_sizes,
    without_data_parallelism,
)
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_numel
from harness.layout.state_widths import StateWidths

# The sizes of DDP's buckets, by default.
FIRST_BUCKET_BYTES = 2**20
BUCKET_MEBIBYTES = 25

# The workspaces of cuBLAS, which torch takes from its own allocator on CUDA, by torch's CublasHandlePool.cpp
# (parseChosenWorkspaceSize): ":4096:2:16:8" on devices before compute capability 9, where the plan of the stack harness
# is 48 MiB too high, and 32 MiB on later ones. CUBLAS_WORKSPACE_CONFIG changes it, and cuBLASLt has the same workspace
# unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0. There is one for each handle and stream (setWorkspaceForHandle), and a
# thread has a handle of its own: that of forward, and the one in which autograd runs backward. Products run in the
# default stream alone.
CUBLAS_WORKSPACE_BYTES = (8 * 2**20 + 128 * 2**10, 32 * 2**20)
WORKSPACE_BYTES = 2 * CUBLAS_WORKSPACE_BYTES[1]  # allocated from a rank's first products to its end


def buffer_tensors(config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage]) -> dict[str, int]:
    """Return the bytes of the buffers that a rank with these stages keeps through a step, by name."""
    buffers: dict[str, int] = {"engine": widths.buffer_bytes}
    if layout.data_parallel == "ddp":
        # DDP's buckets are as large as the model in its own width. As bucket views fp32 gradients lie in them; in mixed
        # precision the buckets exist beside the fp32 gradients.
        copies = int(config.precision.is_mixed) + int(not config.strategy.gradient_as_bucket_view)
        total = sum(sum(local_numel(config.model, layout, stage).values()) for stage in stages)
        buffers["ddp_buckets"] = round(copies * total * config.precision.compute_bytes)
    return buffers


def rebuilds_buckets(config: RunConfig, layout: Layout) -> bool:
    """Return whether DDP allocates its buckets anew in a timed step.

    It does so once, before the first forward of the second step (torch.nn.parallel.distributed, _pre_forward).
    """
    return layout.data_parallel == "ddp" and config.train.warmup_steps == 1


def old_bucket_bytes(config: RunConfig, layout: Layout, stage: Stage) -> int:
    """Return the bytes of a stage's first buckets if they still exist beside those that a timed step allocates.

    In mixed precision the engine refers to the buckets that it reduced last until it reduces the first one anew.
    """
    if not (rebuilds_buckets(config, layout) and config.precision.is_mixed):
        return 0
    return round(sum(local_numel(config.model, layout, stage).values()) * config.precision.compute_bytes)


def ddp_buffers(config: RunConfig, layout: Layout, stage: Stage, moment: Pass) -> TransientBuffers:
    """Return the old buckets, which DDP's last backward of a step frees once it has filled the first new one."""
    old = old_bucket_bytes(config, layout, stage)
    if not old:
        return TransientBuffers()
    groups = group_sizes(config.model, layout, stage)
    head = 0 if config.model.tie_word_embeddings else groups.head
    limit = FIRST_BUCKET_BYTES / config.precision.compute_bytes

    def left(layers: int) -> int:
        """Return the bytes of old buckets when backward has left so many layers."""
        return 0 if moment.is_last and head + layers * groups.layer >= limit else old

    indices = observed_layers(stage.layers)
    return TransientBuffers(
        forward=old,
        loss=old,
        head=old,
        head_reduction=0 if moment.is_last else old,
        entered=tuple(map(left, indices)),
        layers=tuple(left(following + 1) for following in indices),
        end=0 if moment.is_last else old,
    )


def last_bucket_elements(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """Return the elements of the larger one of the two buckets that DDP reduces last.

    DDP fills buckets in the order in which gradients are computed, and closes each once it has reached its limit
    (torch.nn.parallel.distributed, _DEFAULT_FIRST_BUCKET_BYTES and bucket_cap_mb).
    """
    cap = int(config.strategy.ddp_options.get("bucket_cap_mb", BUCKET_MEBIBYTES)) * 2**20
    return _last_bucket_elements(
        config.model, without_data_parallelism(layout), stage, config.precision.compute_bytes, cap
    )


@lru_cache(maxsize=1024)
def _last_bucket_elements(model: ModelConfig, layout: Layout, stage: Stage, width: int, cap: int) -> float:
    limit, buckets = FIRST_BUCKET_BYTES, [0.0]
    for size in reversed(list(local_numel(model, layout, stage).values())):
        if buckets[-1] * width >= limit:
            limit = cap
            buckets.append(0)
        buckets[-1] += size
    return max(buckets[-2:])


def gradients_at_start(
    config: RunConfig, layout: Layout, widths: StateWidths, sums: Sequence[int], device: Device
) -> list[int]:
    """Return how many bytes of each stage's gradients exist when a step begins; `sums` is those between micro-batches.

    DeepSpeed's BF16_Optimizer has its fp32 sums alone until a backward computes others (engine.py, _take_model_step),
    and its stages 1 and 2 under offload have none on the device (stage_1_and_2.py, step).
    """
    if device == "cuda" and layout.uses_deepspeed_zero and layout.zero_stage < 3 and layout.offload != "none":
        return [0] * len(sums)
    if holds_gradients_twice(config, layout, widths):
        return [size * config.precision.accumulate_bytes // widths.gradients for size in sums]
    return [size * keeps_grad_buffers(config, layout, widths) for size in sums]


def keeps_grad_buffers(config: RunConfig, layout: Layout, widths: StateWidths) -> bool:
    """Return whether the memory of gradients is still allocated when a step begins.

    DeepSpeed's stages 1 and 2 free it after the optimizer's step, but for BF16_Optimizer and the host's part.
    """
    if layout.uses_deepspeed_zero and layout.zero_stage < 3 and layout.offload == "none":
        return holds_gradients_twice(config, layout, widths)
    if layout.uses_deepspeed_zero and layout.zero_stage == 3:
        return True
    if layout.data_parallel == "ddp":
        return config.strategy.gradient_as_bucket_view and not config.precision.is_mixed
    return layout.data_parallel != "fsdp" and layout.dp_enabled


def transient_buffers(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths | None,
    stage: Stage,
    device: Device,
    moment: Pass = ONLY_PASS,
) -> TransientBuffers:
    """Return the buffers of one of a rank's stages; none without widths or if only optimizer state is sharded."""
    if widths is None:
        return TransientBuffers()
    if layout.uses_deepspeed_zero:
        if layout.zero_stage == 3:
            return stage_3_buffers(config, widths, layout, stage, device)
        return stage_2_buffers(config, widths, layout, stage, device) if layout.zero_stage == 2 else TransientBuffers()
    if layout.data_parallel == "ddp":
        return ddp_buffers(config, layout, stage, moment)
    if layout.data_parallel != "fsdp":
        return TransientBuffers()
    return fully_shard_buffers(config, layout, widths, stage, device, moment)
