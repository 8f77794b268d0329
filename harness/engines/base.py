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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from harness.layout.state_widths import StateKind, StateWidths
from harness.util.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from harness.config.schema import RunConfig
    from harness.hardware.machine import Machine
    from harness.layout.layout import Layout
    from harness.probe import Probe
    from harness.tensors.shard import Shard


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


class Engine(Protocol):
    """A model under one layout, as the loop sees it."""

    model: "nn.Module"  # the plain model inside whatever wraps it
    devices: int  # that this process drives
    host_state: tuple[StateKind, ...]  # kinds that what was built keeps on the host, whatever was asked for

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

    def local_shards(self, kind: StateKind) -> "Iterable[Shard]":
        """What this rank holds of a kind at this moment, named as the plain model's parameters are.

        Their distinct storages are all the memory of that kind, padding included.
        """
        ...

    def named_buffers(self) -> "Iterable[tuple[str, str, Tensor]]":
        """What this rank holds now beside its pieces: a role of harness.measure.blocks, a word on it, the tensor.

        What passes through a collective is seen there and need not be named.
        """
        ...

    def close(self) -> None: ...


class EngineModule(Protocol):
    def unsupported(self, config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]: ...

    def state_widths(self, config: "RunConfig", layout: "Layout") -> StateWidths: ...

    def rank_environment(self, layout: "Layout", machine: "Machine", cache: Path) -> dict[str, str]: ...

    def build(
        self, config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe"
    ) -> Engine: ...


def engine_names() -> list[str]:
    """The engines there are: every module of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.name != "base")


def load_engine(name: str) -> EngineModule:
    """The engine of that name.

    Raises UserError if there is none.
    """
    if name not in engine_names():
        raise UserError(f"strategy.engine={name} is not known: choose {', '.join(engine_names())}")
    return importlib.import_module(f"harness.engines.{name}")  # type: ignore[return-value]
