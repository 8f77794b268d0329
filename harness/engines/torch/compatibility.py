"""What the torch engine cannot honour, one line each."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.config.schema import RunConfig
    from harness.hardware.machine import Machine
    from harness.layout.layout import Layout


# DistributedDataParallel's arguments that change how it works and not what it trains.
DDP_OPTIONS = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


def unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    stage, means = layout.zero_stage, layout.data_parallel
    if means == "none" and layout.cp > 1:
        yield f"strategy.cp={layout.cp} needs strategy.data_parallel to average gradients: choose ddp or fsdp"
    if means == "ddp" and layout.pp > 1 and layout.schedule == "zero_bubble":
        yield (
            "strategy.data_parallel=ddp averages gradients before the second half of strategy.schedule=zero_bubble's"
            " backwards has made them: choose fsdp with zero_stage 0 or 2, or another schedule"
        )
    if means == "fsdp" and stage == 3 and layout.pp > 1 and layout.schedule == "zero_bubble":
        yield (
            "strategy.zero_stage=3 lets go of parameters that the second half of strategy.schedule=zero_bubble's"
            " backwards needs: choose 0 or 2, or another schedule"
        )
    if means == "none" and layout.dp > 1:
        yield f"strategy.data_parallel=none trains on one rank, not {layout.dp}: choose ddp or fsdp"
    if means == "none" and stage > 0:
        yield f"strategy.zero_stage={stage} needs strategy.data_parallel=fsdp: choose it, or zero_stage 0"
    if means == "ddp" and stage > 1:
        yield f"strategy.zero_stage={stage} is not DistributedDataParallel's: choose strategy.data_parallel=fsdp"
    if layout.partitions_by_parameter and config.precision.is_mixed:
        yield (
            f"precision={config.precision.name} has masters, of which ZeroRedundancyOptimizer keeps all on every rank:"
            " choose strategy=zero1, or precision=fp32"
        )
    if means == "ddp" and stage == 0 and layout.dp_shard > 1:
        yield f"strategy.dp_shard={layout.dp_shard} shards nothing under strategy.data_parallel=ddp: choose 1"
    if means == "fsdp" and stage == 1:
        yield "strategy.zero_stage=1 is not a mode of fully_shard: choose 0, 2 or 3, or strategy=zero1 or zero1_torch"
    if means == "fsdp" and stage == 0 and layout.dp_shard > 1:
        yield f"strategy.dp_shard={layout.dp_shard} shards parameters, not what strategy.zero_stage=0 says: choose 1"
    if layout.tp > 1 and means == "ddp":
        yield f"strategy.data_parallel=ddp cannot wrap what strategy.tp={layout.tp} cuts: choose none or fsdp"
    if layout.offload != "none" and means != "fsdp":
        yield (
            f"strategy.offload={layout.offload} is not part of strategy.data_parallel={means}: choose none, or"
            " strategy=fsdp_full_shard or zero_offload"
        )
    elif layout.offload == "optimizer":
        yield (
            "strategy.offload=optimizer is not a policy of fully_shard, whose optimizer steps where the parameters lie:"
            " choose parameters, or strategy=zero_offload"
        )
    if not layout.vocabulary_parallel:
        yield "strategy.vocabulary_parallel=false is not supported by strategy.engine=torch: choose true"
    for key in sorted(config.strategy.options.keys() - set(DDP_OPTIONS)) if means == "ddp" else ():
        yield f"strategy.options.{key} is not a setting of DistributedDataParallel: choose {', '.join(DDP_OPTIONS)}"
    if means != "ddp" and config.strategy.options:
        yield f"strategy.options={config.strategy.options} are for strategy.data_parallel=ddp: choose {{}}"
