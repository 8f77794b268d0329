"""The memory that a rank needs to communicate during a whole step, beside model state. Imports no torch."""

from collections.abc import Sequence

from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.layout.partition import Stage, local_numel
from harness.layout.state_widths import StateWidths

# The sizes of DDP's buckets, by default.
FIRST_BUCKET_BYTES = 2**20
BUCKET_MEBIBYTES = 25


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


def last_bucket_elements(config: RunConfig, layout: Layout, stage: Stage) -> float:
    """Return the elements of the larger one of the two buckets that DDP reduces last.

    DDP fills buckets in the order in which gradients are computed, and closes each once it has reached its limit
    (torch.nn.parallel.distributed, _DEFAULT_FIRST_BUCKET_BYTES and bucket_cap_mb).
    """
    options, limit, buckets = config.strategy.ddp_options, FIRST_BUCKET_BYTES, [0.0]
    for size in reversed(local_numel(config.model, layout, stage).values()):
        if buckets[-1] * config.precision.compute_bytes >= limit:
            limit = int(options.get("bucket_cap_mb", BUCKET_MEBIBYTES)) * 2**20
            buckets.append(0)
        buckets[-1] += size
    return max(buckets[-2:])


def keeps_grad_buffers(config: RunConfig, layout: Layout) -> bool:
    """Return whether the memory of gradients is still allocated when a step begins."""
    if layout.data_parallel == "ddp":
        return config.strategy.gradient_as_bucket_view and not config.precision.is_mixed
    return layout.data_parallel != "fsdp" and layout.dp_enabled


def gloo_gather_peak(config: RunConfig, layout: Layout, widths: StateWidths, parameters: int) -> dict[str, int]:
    """Return a rank's bytes while DeepSpeed's stages 1 and 2 gather the new parameters, which gloo does in a flat copy.

    The reduction buckets are freed by then, and so are the gradients, but for those of BF16_Optimizer.
    """
    if not layout.uses_deepspeed_zero or layout.zero_stage == 3:
        return {}
    copy = config.precision.compute_bytes * parameters if layout.dp_shard > 1 else 0
    if layout.zero_stage == 1 and widths.gradients > config.precision.accumulate_bytes:
        return {"gradients": widths.gradients * parameters, "buffers": copy}
    return {"buffers": copy - widths.buffer_bytes}
