"""The narrow waist: what an engine must offer so that the one loop can drive, measure and prove it.

An engine is one module (or package) in this folder, found by its name. It has
    refusals(config, layout, machine)          -> Iterator[str]  why it cannot honour this run; imports nothing heavy
    widths(config, layout)                     -> Widths         bytes an element it really allocates, for the planner
    environment(layout, machine, cache)        -> dict           what ranks need set, built by the parent if need be
    build(config, layout, mesh, device, probe) -> Engine         on a rank, with the process group up
"""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from harness.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config import RunConfig
    from harness.layout import Layout
    from harness.machine import Machine
    from harness.measure.probe import Probe

Kind = Literal["parameters", "gradients", "optimizer"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
BUCKET, GATHERED, STAGING = "bucket", "gathered", "staging"


class Batch(NamedTuple):
    """One micro-batch on this rank: token ids, both int64 of shape (micro_batch, seq_len)."""

    inputs: "Tensor"
    targets: "Tensor"


class StepResult(NamedTuple):
    """What one step reports; tensors are left on the device so that nothing waits for them.

    loss: mean over the step's tokens of this rank's data, also where another rank computed it.
    grad_norm: the global gradient norm before clipping.
    """

    loss: "Tensor"
    grad_norm: "Tensor | float"


class Piece(NamedTuple):
    """The part of one named tensor that this rank really holds.

    shape is that of the whole tensor and box the (start, stop) this rank holds along each dimension. A piece cut
    from the flattened tensor has shape (numel,) and a box of one pair. `slot` tells an optimizer's tensors apart
    (master, exp_avg, exp_avg_sq).
    """

    name: str
    local: "Tensor"
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    slot: str = ""


@dataclass(frozen=True)
class Widths:
    """Bytes an element that an engine allocates for model state at the width named, before any sharding.

    optimizer counts masters kept beside the parameters; fp32 parameters that are their own masters do not count.
    gathered is the width of a parameter made whole for compute; gathers, how often stage 3 does so a micro-batch.
    buffer_bytes are set aside for communication whatever the model. whole_second_forward: a checkpointed layer runs
    again to its very end, where torch stops before the last projection. Where strategy.offload takes gradients,
    `gradients` is what stays on the device; host_gradients lie on the host, an element of this rank's shard, and beside
    them host_buffer_bytes.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    gathers: float = 2  # for forward and again for backward
    buffer_bytes: int = 0
    whole_second_forward: bool = False
    layer_sums: int = 4  # of hidden states over tensor-parallel ranks, in a layer's forward and backward
    host_gradients: int = 0
    host_buffer_bytes: int = 0


class Engine(Protocol):
    """A model under one layout, as the loop sees it."""

    model: "nn.Module"  # the plain model inside whatever wraps it
    devices: int  # that this process drives
    on_host: tuple[Kind, ...]  # kinds that what was built keeps on the host, whatever was asked for

    @property
    def skipped_steps(self) -> int:
        """Steps left out so far because a gradient overflowed, where the loss is scaled."""
        ...

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Every micro-batch of one step: forward, backward, clip, optimizer.

        Wraps its parts in probe.phase(one of its PHASES) and calls probe.gradients_ready(self)
        once, after the last backward, when gradients are reduced and averaged over the global batch but not clipped.
        """
        ...

    def pieces(self, kind: Kind) -> Iterable[Piece]:
        """What this rank holds of a kind at this moment, named as the plain model's parameters are.

        Their distinct storages are all the memory of that kind, padding included.
        """
        ...

    def buffers(self) -> "Iterable[tuple[str, str, Tensor]]":
        """What this rank holds now beside its pieces: a role of harness.measure.blocks, a word on it, the tensor.

        What passes through a collective is seen there and need not be named.
        """
        ...

    def close(self) -> None: ...


class EngineModule(Protocol):
    def refusals(self, config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]: ...

    def widths(self, config: "RunConfig", layout: "Layout") -> Widths: ...

    def environment(self, layout: "Layout", machine: "Machine", cache: Path) -> dict[str, str]: ...

    def build(
        self, config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe"
    ) -> Engine: ...


def names() -> list[str]:
    """The engines there are: every module of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> EngineModule:
    """The engine of that name.

    Raises UserError if there is none.
    """
    if name not in names():
        raise UserError(f"strategy.engine={name} is not known: choose {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")  # type: ignore[return-value]
