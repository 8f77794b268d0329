"""Hugging Face Accelerate around the same model: what its wrapper costs. Only where it does what it is asked.

The layout chooses what Accelerator.prepare makes: data_parallel=ddp DistributedDataParallel, fsdp fully_shard (its
FSDP2), none with a zero_stage a DeepSpeed engine. Precision and micro-batches stay the loop's, as in every engine: no
autocast, no accumulation of its own. What Accelerate made is looked at before the first step, and raises if it is not
what was asked for.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.base import Engine
from harness.engines.torch.compatibility import DDP_OPTIONS
from harness.layout.state_widths import StateWidths

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config.schema import RunConfig
    from harness.engines.base import EngineModule
    from harness.hardware.machine import Machine
    from harness.layout.layout import Layout
    from harness.probe import Probe


def unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Why Accelerate cannot honour this run, one line each."""
    chosen = f"strategy.engine=accelerate with strategy={config.strategy.name}"
    for axis in ("tp", "cp", "pp"):
        if getattr(layout, axis) > 1:
            yield f"strategy.{axis}={getattr(layout, axis)} is not supported by strategy.engine=accelerate: choose 1"
    if layout.offload != "none":
        yield f"strategy.offload={layout.offload} is not supported by strategy.engine=accelerate: choose none"
    if layout.data_parallel == "ddp":
        yield from ddp_unsupported(config, layout)
    elif layout.data_parallel == "fsdp":
        yield from fsdp_unsupported(config, layout, machine)
    elif layout.zero_stage > 0:
        yield from deepspeed_unsupported(config, layout, machine)
    else:
        yield f"{chosen}: Accelerate wraps data parallelism; choose strategy=ddp, a fsdp_* or a zero*"


def ddp_unsupported(config: "RunConfig", layout: "Layout") -> Iterator[str]:
    """Reasons against DistributedDataParallel through Accelerate."""
    if layout.zero_stage > 0:
        yield f"strategy.zero_stage={layout.zero_stage} is not Accelerate's of ddp: choose 0, or strategy=zero1"
    if layout.dp_shard > 1:
        yield f"strategy.dp_shard={layout.dp_shard} shards nothing under strategy.data_parallel=ddp: choose 1"
    for key in sorted(config.strategy.options.keys() - set(DDP_OPTIONS)):
        yield f"strategy.options.{key} is not a setting of DistributedDataParallel: choose {', '.join(DDP_OPTIONS)}"


def fsdp_unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Reasons against fully_shard through Accelerate's plugin."""
    chosen = f"strategy.engine=accelerate with strategy={config.strategy.name}"
    if machine.device == "cpu":
        yield f"{chosen}: Accelerate silently drops sharding on CPU and would train plain DDP; choose strategy=ddp"
    if layout.zero_stage < 2:
        yield f"{chosen}: strategy.zero_stage={layout.zero_stage} is not a mode of its FSDP2; choose 2 or 3"
    if layout.dp_shard == 1:
        yield f"{chosen}: strategy.dp_shard=1 shards nothing, which Accelerate refuses; choose 2 or more"
    if config.strategy.options:
        yield f"strategy.options={config.strategy.options} are for strategy.data_parallel=ddp: choose {{}}"
    if config.model.tie_word_embeddings:
        yield f"{chosen}: model.tie_word_embeddings=true shares a weight between two of its groups; choose false"
    if config.model.asked is not None:
        yield f"{chosen}: its groups are proven for this project's models, not model={config.model.name}; choose tiny"


def deepspeed_unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Reasons against DeepSpeed through Accelerate's plugin: DeepSpeed's own, and what the way to it leaves out."""
    from harness.engines.deepspeed.compatibility import unsupported as deepspeed_refusals
    from harness.engines.deepspeed.widths import reduces_to_owner_rank

    yield from deepspeed_refusals(config, layout, machine)
    if importlib.util.find_spec("transformers") is None:
        yield "strategy.engine=accelerate runs DeepSpeed by way of transformers: pip install 'training-harness[hf]'"
    if layout.zero_stage == 1 and config.precision.is_mixed and reduces_to_owner_rank(config):
        yield (
            f"precision={config.precision.name} with strategy.zero_stage=1: Accelerate leaves DeepSpeed its"
            " BF16_Optimizer, which all-reduces whatever strategy.options say: choose strategy=zero1_defaults or zero2"
        )
    if machine.device == "cpu" and machine.devices:
        yield (
            "strategy.engine=accelerate takes a GPU for DeepSpeed wherever it sees one: choose cluster.device=cuda, or"
            " CUDA_VISIBLE_DEVICES= in the environment"
        )


def backing_engine(layout: "Layout") -> "EngineModule":
    """The engine whose library does the work."""
    from harness.engines.base import load_engine

    return load_engine("deepspeed" if layout.data_parallel == "none" else "torch")


def rank_environment(layout: "Layout", machine: "Machine", cache: Path) -> dict[str, str]:
    return backing_engine(layout).rank_environment(layout, machine, cache)


def state_widths(config: "RunConfig", layout: "Layout") -> StateWidths:
    return backing_engine(layout).state_widths(config, layout)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    from harness.engines.accelerate import ddp, deepspeed, fsdp

    kinds = {"ddp": ddp.build, "fsdp": fsdp.build, "none": deepspeed.build}
    return kinds[layout.data_parallel](config, layout, mesh, device, probe)
