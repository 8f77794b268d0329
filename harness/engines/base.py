"""The interface of an engine, through which the one training loop drives, measures and proves it.

An engine is one module (or package) in this folder, found by its name. It has three functions:
    unsupported(config, layout, machine)       -> Iterator[str]  reasons why it cannot train this run; imports no torch
    state_widths(config, layout)               -> StateWidths    bytes per element it really allocates, for the planner
    build(config, layout, mesh, device, probe) -> Engine         on a rank, once the process group is initialized
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from harness.layout.state_widths import StateKind, StateWidths
from harness.util.text import UserError

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
    """One micro-batch on this rank: token ids and their targets, both int64 of shape (micro_batch, seq_len)."""

    inputs: "Tensor"
    targets: "Tensor"


class StepResult(NamedTuple):
    """The loss and the gradient norm of one step; tensors stay on the device so that nothing waits for them.

    `loss` is the mean over the step's tokens of this rank's data, even where another rank computed it. `grad_norm` is
    the global gradient norm before clipping, and `squares` the sums of squares that it is made of: one for each of
    local_shards("gradients") when gradients are ready, in this order; None where they would cost too much.
    """

    loss: "Tensor"
    grad_norm: "Tensor | float"
    squares: "Tensor | None"


class Checkpoint(Protocol):
    """The files of a run's ranks from which a new engine of the same layout goes on: what the optimizer has, too.

    Every method but `own_files` and `loss_scaling` is called by all ranks together.
    """

    def save(self, folder: Path, is_async: bool) -> "Callable[[], float] | None":
        """Write the files into a folder. Return None when they are complete.

        An asynchronous save returns when training may go on, with a function that waits for the rest and returns the
        moment of time.perf_counter() at which the files were complete.
        """

    def load(self, folder: Path) -> None:
        """Replace all state of a new engine by what the files have."""

    def own_files(self, folder: Path) -> "Iterable[Path]":
        """Yield the files that this rank wrote."""

    def loss_scaling(self) -> Mapping[str, float]:
        """Return the state of the loss scale by names, which decides how the next steps are scaled."""


class Engine(Protocol):
    """A model under one layout, as the training loop sees it."""

    model: "nn.Module"  # the plain model inside all wrappers
    devices: int  # the number of devices this process drives
    host_state: tuple[StateKind, ...]  # the kinds of state really kept on the host, whatever the configuration says

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint of this engine's state."""

    @property
    def skipped_steps(self) -> int:
        """Return how many steps were skipped so far because a gradient overflowed under loss scaling."""

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Run one step: forward and backward of every micro-batch, clipping, optimizer.

        The step wraps its parts in probe.phase(one of harness.probe.PHASES) and calls probe.gradients_ready(self) once,
        after the last backward, when gradients are reduced and averaged over the global batch but not yet clipped.
        """

    def local_shards(self, kind: StateKind) -> "Iterable[Shard]":
        """Yield the shards of one kind of state that this rank holds now, named as the plain model's parameters.

        Their distinct storages make up all the memory of that kind, padding included.
        """

    def named_buffers(self) -> "Iterable[tuple[str, str, Tensor]]":
        """Yield (role, label, tensor) for every buffer that this rank holds now beside its shards.

        The role is one of harness.records.rank_report.MEMORY_ROLES. Tensors that pass through a collective are observed
        there and need not be named.
        """

    def close(self) -> None:
        """Release what the engine holds beyond this process's memory, and undo its changes to libraries."""


class EngineModule(Protocol):
    """The three functions of an engine's module."""

    def unsupported(self, config: "RunConfig", layout: "Layout", machine: "Machine") -> Iterator[str]:
        """Yield every reason why the engine cannot train this run, each as one line that names the remedy."""

    def state_widths(self, config: "RunConfig", layout: "Layout") -> StateWidths:
        """Return the bytes per element that the engine allocates for this run."""

    def build(
        self, config: "RunConfig", layout: "Layout", mesh: "DeviceMesh", device: "torch.device", probe: "Probe"
    ) -> Engine:
        """Build the engine on this rank, whose process group is already initialized."""


def engine_names() -> list[str]:
    """Return the names of all engines: every module of this folder but this one."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.name != "base")


def device_count(config: "RunConfig", layout: "Layout", machine: "Machine") -> int:
    """Return the number of devices that a run uses: one for each rank, but several for nn.DataParallel's only rank.

    These are as many as other strategies would have ranks.
    """
    return config.world_size or machine.ranks_per_node if drives_several_devices(layout) else layout.world_size


def drives_several_devices(layout: "Layout") -> bool:
    """Return whether the layout's only rank drives several devices itself, as nn.DataParallel does."""
    return layout.engine == "nn_data_parallel"


def load_engine(name: str) -> EngineModule:
    """Return the module of the engine called `name`; raise UserError if there is none."""
    if name not in engine_names():
        raise UserError(f"strategy.engine={name} is not known: choose {', '.join(engine_names())}")
    return importlib.import_module(f"harness.engines.{name}")  # type: ignore[return-value]


def fully_sharded_preset(name: str) -> str:
    """Return the strategy preset by which an engine divides all state, for remedies of runs that do not fit.

    It is FULLY_SHARDED_PRESET of the engine's module, and that of the torch engine where a module names none.
    """
    return getattr(load_engine(name), "FULLY_SHARDED_PRESET", "fsdp_full_shard")


def unsupported_elsewhere(
    engine: EngineModule, config: "RunConfig", layout: "Layout", machine: "Machine"
) -> Iterator[str]:
    """Yield every reason why an engine cannot train this run on another machine than the one at hand.

    An engine whose own reasons include what is installed here has `layout_unsupported` for those that hold anywhere.
    """
    anywhere = getattr(engine, "layout_unsupported", None)
    yield from engine.unsupported(config, layout, machine) if anywhere is None else anywhere(config, layout)


def option_problems(
    options: Mapping[str, Any], flags: Sequence[str], sizes: Mapping[str, int], subject: str
) -> Iterator[str]:
    """Yield a line for each of strategy.options that the library would ignore, misread or not take.

    `flags` are the options that are true or false, `sizes` those that are whole numbers with the least of each.
    """
    for key, value in sorted(options.items()):
        setting = f"strategy.options.{key}={value}"
        if key in flags:
            if not isinstance(value, bool):
                yield f"{setting} is neither true nor false: choose one, or leave it out"
        elif key in sizes:
            is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
            if not is_whole or value < sizes[key]:
                yield f"{setting} is not a whole number of {sizes[key]} or more: choose one, or leave it out"
        else:
            yield f"{setting} is not supported by {subject}: choose among {', '.join(sorted({*flags, *sizes}))}"
