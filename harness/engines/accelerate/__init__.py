"""The engine of Hugging Face Accelerate around the same model; it shows what Accelerate's wrapper costs.

The layout chooses what Accelerator.prepare builds: DistributedDataParallel for data_parallel=ddp, fully_shard (its
FSDP2) for fsdp, a DeepSpeed engine for none with a zero_stage. Precision and micro-batches are not
Accelerate's task here, so its autocast and its gradient accumulation stay off. The result is compared with the
configured layout before the first step; a RuntimeError names the difference.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.config.strategy import MODEL_AXES
from harness.engines.base import Engine, load_engine, option_problems
from harness.engines.torch.compatibility import DDP_FLAGS, DDP_SIZES
from harness.hardware.nvml import driver_version
from harness.layout.model_profile import model_profile
from harness.layout.state_widths import StateWidths

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config.schema import RunConfig
    from harness.hardware.machine import Machine
    from harness.layout.layout import Layout
    from harness.probe import Probe


def unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Yield every reason why Accelerate cannot train this run."""
    subject = f"strategy.engine=accelerate with strategy={config.strategy.name}"
    if machine.device == "cuda" and needs_slower_nccl(machine, driver_version()):
        yield (
            f"strategy.engine=accelerate rejects several {machine.device_name} before driver 550.40.07: update it, or"
            " type export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1"
        )
    for axis in (*MODEL_AXES, "ep", "secondary_shards"):
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
        yield f"{subject} has no data parallelism to wrap: choose strategy=ddp"


def needs_slower_nccl(machine: "Machine", driver: str | None) -> bool:
    """Return whether Accelerate would raise NotImplementedError, and want NCCL's fast transports to be switched off.

    It does so for several GeForce of the 40 series under an old driver (PartialState in Accelerate's state.py, which
    asks check_cuda_p2p_ib_support in utils/environment.py), because peer-to-peer copies failed there.
    """
    numbers = tuple(int(part) for part in (driver or "").split(".") if part.isdigit())
    is_old = bool(numbers) and numbers < (550, 40, 7)
    is_affected = machine.devices > 1 and any("RTX 40" in name for name in machine.device_names)
    return is_affected and is_old and not {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"} <= os.environ.keys()


def ddp_unsupported(config: "RunConfig", layout: "Layout") -> Iterator[str]:
    """Yield every reason why DistributedDataParallel cannot train this run through Accelerate."""
    if layout.zero_stage > 0:
        yield f"strategy.zero_stage={layout.zero_stage} is not a mode of Accelerate's ddp: choose 0, or strategy=zero1"
    if layout.dp_shard > 1:
        yield f"strategy.dp_shard={layout.dp_shard} shards nothing under strategy.data_parallel=ddp: choose 1"
    yield from option_problems(config.strategy.options, DDP_FLAGS, DDP_SIZES, "DistributedDataParallel")


def fsdp_unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Yield every reason why fully_shard cannot train this run through Accelerate's plugin."""
    subject = f"strategy.engine=accelerate with strategy={config.strategy.name}"
    if machine.device == "cpu":
        yield f"{subject} would not shard on a CPU: choose strategy=ddp"
    if layout.zero_stage < 2:
        yield f"strategy.zero_stage={layout.zero_stage} is not a mode of Accelerate's FSDP2: choose 2 or 3"
    if layout.dp_shard == 1:
        yield "strategy.dp_shard=1 shards nothing, which Accelerate rejects: choose 2 or more"
    if config.strategy.options:
        yield f"strategy.options={config.strategy.options} apply to strategy.data_parallel=ddp only: choose {{}}"
    if config.model.tie_word_embeddings:
        yield "model.tie_word_embeddings=true shares a weight between two groups of Accelerate's FSDP2: choose false"
    if not model_profile(config.model).is_project_decoder:
        yield f"model={config.model.name} was not tried with Accelerate's FSDP2: choose model=tiny"


def deepspeed_unsupported(config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
    """Yield every reason why DeepSpeed cannot train this run, by itself or through Accelerate's plugin."""
    from harness.engines.deepspeed.compatibility import unsupported as unsupported_by_deepspeed
    from harness.engines.deepspeed.widths import reduces_to_owner_rank

    yield from unsupported_by_deepspeed(config, layout, machine)
    if importlib.util.find_spec("transformers") is None:
        yield "strategy.engine=accelerate runs DeepSpeed through transformers: pip install 'training-harness[hf]'"
    if layout.zero_stage == 1 and config.precision.is_mixed and reduces_to_owner_rank(config):
        yield (
            f"precision={config.precision.name} with strategy.zero_stage=1 always all-reduces through Accelerate:"
            " choose strategy=zero1_defaults, or strategy=zero2"
        )
    if machine.device == "cpu" and machine.devices:
        yield (
            "strategy.engine=accelerate lets DeepSpeed use every GPU that it sees: choose cluster.device=cuda, or type"
            " export CUDA_VISIBLE_DEVICES="
        )


def state_widths(config: "RunConfig", layout: "Layout") -> StateWidths:
    """Return the widths of the engine of the library that Accelerate wraps for this layout."""
    return load_engine("deepspeed" if layout.data_parallel == "none" else "torch").state_widths(config, layout)


def build(config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe") -> Engine:
    """Build the engine for this layout, whose model is wrapped by Accelerator.prepare."""
    from harness.engines.accelerate import ddp, deepspeed, fsdp

    builders = {"ddp": ddp.build, "fsdp": fsdp.build, "none": deepspeed.build}
    return builders[layout.data_parallel](config, layout, mesh, device, probe)
