"""Runs that the torch engine cannot train, and what to choose in their place."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.engines.base import option_problems

if TYPE_CHECKING:
    from harness.config.schema import RunConfig
    from harness.hardware.machine import Machine
    from harness.layout.layout import Layout


# Arguments of DistributedDataParallel that change how it works and not what it trains.
DDP_FLAGS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
DDP_SIZES = {"bucket_cap_mb": 1}


def unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Yield every reason why the torch engine cannot train this run."""
    stage, wrapper = layout.zero_stage, layout.data_parallel
    if wrapper == "none" and layout.cp_enabled:
        yield f"strategy.cp={layout.cp} needs strategy.data_parallel to average gradients: choose ddp or fsdp"
    if wrapper == "ddp" and layout.splits_backward:
        yield (
            f"strategy.data_parallel=ddp reduces gradients before strategy.schedule={layout.schedule} computes them:"
            " choose strategy.data_parallel=fsdp, or strategy.schedule=1f1b"
        )
    if wrapper == "fsdp" and stage == 3 and layout.splits_backward:
        yield (
            f"strategy.zero_stage=3 frees parameters that strategy.schedule={layout.schedule} still needs: choose"
            " strategy.zero_stage=2, or strategy.schedule=1f1b"
        )
    if wrapper == "none" and layout.dp_enabled:
        yield f"strategy.data_parallel=none trains on one rank, not {layout.dp}: choose ddp or fsdp"
    if wrapper == "none" and stage > 0:
        yield f"strategy.zero_stage={stage} needs strategy.data_parallel=fsdp: choose fsdp, or zero_stage 0"
    if wrapper == "ddp" and stage > 1:
        yield f"strategy.zero_stage={stage} is not a mode of strategy.data_parallel=ddp: choose data_parallel=fsdp"
    if layout.partitions_by_parameter and layout.ep_enabled:
        yield (
            f"ZeroRedundancyOptimizer cannot divide experts by strategy.ep={layout.ep}: choose strategy=fsdp_ep, or"
            " strategy=ep"
        )
    if layout.partitions_by_parameter and config.precision.is_mixed:
        yield (
            f"ZeroRedundancyOptimizer does not divide the master weights of precision={config.precision.name}: choose"
            " strategy=zero1, or precision=fp32"
        )
    if wrapper == "ddp" and stage == 0 and layout.dp_shard > 1:
        yield f"strategy.dp_shard={layout.dp_shard} shards nothing under strategy.data_parallel=ddp: choose 1"
    if wrapper == "fsdp" and stage == 1:
        yield "strategy.zero_stage=1 is not a mode of fully_shard: choose 2 or 3, or strategy=zero1"
    if wrapper == "fsdp" and stage == 0 and layout.dp_shard > 1:
        yield f"strategy.dp_shard={layout.dp_shard} shards parameters, which strategy.zero_stage=0 does not: choose 1"
    if layout.tp_enabled and wrapper == "ddp":
        yield f"strategy.data_parallel=ddp cannot wrap a model that strategy.tp={layout.tp} shards: choose none or fsdp"
    if layout.offload != "none" and wrapper != "fsdp":
        yield (
            f"strategy.offload={layout.offload} is not supported by strategy.data_parallel={wrapper}: choose none, or"
            " strategy=zero_offload"
        )
    elif layout.offload == "optimizer":
        yield (
            "strategy.offload=optimizer is not a policy of fully_shard: choose strategy.offload=parameters, or"
            " strategy=zero_offload"
        )
    if not layout.vocabulary_parallel:
        yield "strategy.vocabulary_parallel=false is not supported by strategy.engine=torch: choose true"
    if wrapper == "ddp":
        yield from option_problems(config.strategy.options, DDP_FLAGS, DDP_SIZES, "DistributedDataParallel")
    elif config.strategy.options:
        yield f"strategy.options={config.strategy.options} apply to strategy.data_parallel=ddp only: choose {{}}"
