"""Checkpoints of the torch engine by torch.distributed.checkpoint: each rank writes shards, replicas one copy."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from harness.engines.torch.data_parallel import DataParallel, master_params
from harness.engines.torch.loss_scaler import LossScaler

Optimizers = Sequence[torch.optim.Optimizer]


class DistributedCheckpoint:
    """A Checkpoint of one file a rank, and one of metadata; a tensor that several ranks have whole is in one of them.

    Metadata are exchanged by gloo, because writing in the background needs a group that NCCL does not have.
    """

    def __init__(self, parallel: DataParallel, optimizers: Optimizers, loss_scaler: LossScaler) -> None:
        self.parallel = parallel
        self.optimizers = optimizers
        self.loss_scaler = loss_scaler

    def save(self, folder: Path, is_async: bool) -> Callable[[], float] | None:
        """Write shards; asynchronously, copy them to the host and let a thread write them. See Checkpoint.save."""
        state, group = training_state(self.parallel, self.optimizers, self.loss_scaler), dist.new_group(backend="gloo")
        if not is_async:
            save(state, checkpoint_id=folder, process_group=group)
            return None
        written = async_save(state, checkpoint_id=folder, process_group=group)
        assert isinstance(written, Future)
        ended: Future[float] = Future()
        written.add_done_callback(lambda _: ended.set_result(time.perf_counter()))

        def wait() -> float:
            written.result()
            return ended.result()

        return wait

    def load(self, folder: Path) -> None:
        """Read this rank's shards into the tensors that it has, and the loss scale."""
        create_moments(self.parallel, self.optimizers)
        state = training_state(self.parallel, self.optimizers, self.loss_scaler)
        load(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        self.loss_scaler.load_state(state["loss_scaler"])

    def own_files(self, folder: Path) -> Iterable[Path]:
        """Yield the file of this rank's shards; see FileSystemWriter."""
        return folder.glob(f"__{dist.get_rank()}_*")

    def loss_scaling(self) -> Mapping[str, float]:
        """Return the state of the loss scale; see Checkpoint.loss_scaling."""
        return self.loss_scaler.state()


def training_state(parallel: DataParallel, optimizers: Optimizers, loss_scaler: LossScaler) -> dict[str, Any]:
    """Return the tensors of a rank that training changes by their names, and the state of the loss scale.

    Parameters have their plain names in all layouts. Masters and states of the optimizer have the parameter's name.
    """
    state: dict[str, Any] = {f"model.{name}": parameter.detach() for name, parameter in parallel.parameters.items()}
    names: dict[Tensor, str] = {}
    for name, master in master_params(parallel).items():
        names[master] = name
        if master is not parallel.parameters[name]:
            state[f"master.{name}"] = master.detach()
    for optimizer in optimizers:
        for parameter, moments in getattr(optimizer, "optim", optimizer).state.items():
            tensors = {key: value for key, value in moments.items() if isinstance(value, Tensor)}
            state |= {f"optimizer.{names[parameter]}.{key}": value for key, value in tensors.items()}
    return state | {"loss_scaler": loss_scaler.state()}


def create_moments(parallel: DataParallel, optimizers: Optimizers) -> None:
    """Let the optimizers create the states that they create in their first step, as what is loaded replaces them.

    torch's own function for loading does so too (get_optimizer_state_dict). This updates the parameters.
    """
    masters = master_params(parallel).values()
    for master in masters:
        master.grad = torch.zeros_like(master)
    for optimizer in optimizers:
        optimizer.step()
    for master in masters:
        master.grad = None
