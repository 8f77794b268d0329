"""Checkpoints that lack a part of the state from which training goes on, and ranks that end while they save."""

import os
import signal
from typing import Any

from tests.support.plant import replaces

TORCH, WORKER = "harness.engines.torch", "harness.worker.checkpoint"


@replaces(f"{TORCH}.loss_scaler.LossScaler.load_state")
def loss_scale_not_loaded(*_: Any) -> None:
    """Go on with the initial loss scale."""


@replaces(f"{WORKER}.read_position")
def position_not_loaded(ordinary: Any, *arguments: Any) -> int:
    """Go on with the first batch, as a loader does that was made anew."""
    ordinary(*arguments)
    return 0


@replaces("torch.set_rng_state")
def random_numbers_not_loaded(*_: Any) -> None:
    """Go on with the random numbers of a new process."""


@replaces(f"{TORCH}.checkpoint.training_state")
def second_moments_left_out(ordinary: Any, *arguments: Any) -> Any:
    """Leave the second moments out of what is saved and loaded."""
    return {name: value for name, value in ordinary(*arguments).items() if not name.endswith(".exp_avg_sq")}


@replaces("harness.engines.deepspeed.checkpoint.DeepSpeedCheckpoint.load")
def moments_not_loaded(ordinary: Any, self: Any, folder: Any) -> None:
    """Let DeepSpeed load the weights alone, and masters from them."""
    self.engine.load_checkpoint(str(folder), "checkpoint", load_optimizer_states=False)


@replaces(f"{WORKER}.write_position", of_rank=1)
def killed_while_saving(*_: Any) -> None:
    """Kill rank 1 while the others save, as if from outside."""
    os.kill(os.getpid(), signal.SIGKILL)
