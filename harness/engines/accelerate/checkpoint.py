"""Checkpoints by Accelerate around DDP: files of the whole model and of the optimizer, all by the first process."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from harness.engines.torch.data_parallel import DataParallel, master_params
from harness.engines.torch.loss_scaler import LossScaler


class AcceleratedCheckpoint:
    """A Checkpoint by save_state and load_state, with masters and loss scale as a custom object, which they ask for."""

    def __init__(self, accelerator: Accelerator, parallel: DataParallel, _: object, loss_scaler: LossScaler) -> None:
        """Take the engine's parts; Accelerate has its optimizers already."""
        self.accelerator = accelerator
        self.parallel = parallel
        self.loss_scaler = loss_scaler

    def save(self, folder: Path, is_async: bool) -> None:
        """Write the files; there is no asynchronous way."""
        self.register()
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        """Read the files."""
        self.register()
        self.accelerator.load_state(str(folder))

    def own_files(self, folder: Path) -> Iterable[Path]:
        """Yield the files that this process wrote: random states, and for the first process all that is not of one."""
        rank = self.accelerator.process_index
        yield folder / f"random_states_{rank}.pkl"
        if rank == 0:
            yield from (path for path in folder.iterdir() if not path.name.startswith(("random_states", "position")))

    def loss_scaling(self) -> Mapping[str, float]:
        """Return the state of the loss scale; see Checkpoint.loss_scaling."""
        return self.loss_scaler.state()

    def register(self) -> None:
        """Hand masters and loss scale to Accelerate, once."""
        if not self.accelerator._custom_objects:
            self.accelerator.register_for_checkpointing(MastersAndScale(self.parallel, self.loss_scaler))


class MastersAndScale:
    """What the engine has beside the model and the optimizer, by the interface that Accelerate requires."""

    def __init__(self, parallel: DataParallel, loss_scaler: LossScaler) -> None:
        masters = master_params(parallel).items()
        self.masters = {name: master for name, master in masters if master is not parallel.parameters[name]}
        self.loss_scaler = loss_scaler

    def state_dict(self) -> dict[str, Any]:
        """Return masters by names, and the state of the loss scale."""
        masters = {name: master.detach() for name, master in self.masters.items()}
        return {"masters": masters, "loss_scaler": self.loss_scaler.state()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the values of such a state."""
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
        self.loss_scaler.load_state(state["loss_scaler"])
