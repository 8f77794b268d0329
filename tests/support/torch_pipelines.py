"""Ranks whose pipeline is torch's own, which knows of fully_shard, as torchtitan's are."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from harness.worker import main as worker_main
from tests.support.plant import plant


def shown(_: Any, part: Any) -> Any:
    """Show a stage to torch as the FSDPModule that it is."""
    return part


def left_to_torch(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """Let torch choose when gradients are reduced."""
    return nullcontext()


def collected_by_torch(*_: Any) -> None:
    """Leave gradients of a backward for weights alone where torch's pipeline puts them."""


def pipelined_by_torch(run_dir: str) -> None:
    """Run a rank whose whole gradients torch reduces after a stage's last backward."""
    plant(shown, "harness.engines.torch.fsdp.HiddenFSDPModule")
    plant(left_to_torch, "harness.engines.torch.fsdp.FSDPParams.sync_context")
    plant(collected_by_torch, "harness.engines.torch.fsdp.FSDPParams.collect_grads")
    worker_main.main(run_dir)
