"""Checkpoints by DeepSpeed: files of the model's weights, and one of each rank's masters and moments."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.engines.deepspeed.initialize import suppress_stdout

TAG = "checkpoint"  # the name of DeepSpeed's folder within a checkpoint's


class DeepSpeedCheckpoint:
    """A Checkpoint by save_checkpoint and load_checkpoint; the weights are in one file, in stage 3 in one of each rank.

    DeepSpeed writes its steps, its loss scale and the numbers of skipped steps by itself. Accelerate's own functions
    only delegate to these.
    """

    def __init__(self, engine: Any) -> None:
        """Take an engine of DeepSpeed."""
        self.engine = engine

    def save(self, folder: Path, is_async: bool) -> None:
        """Write the files; there is no asynchronous way."""
        with suppress_stdout():
            self.engine.save_checkpoint(str(folder), TAG)

    def load(self, folder: Path) -> None:
        """Read the files; raise RuntimeError if DeepSpeed finds none."""
        with suppress_stdout():
            path, _ = self.engine.load_checkpoint(str(folder), TAG)
        if path is None:
            raise RuntimeError(f"DeepSpeed has loaded nothing from {folder}")

    def own_files(self, folder: Path) -> Iterable[Path]:
        """Yield the files that this rank wrote, by DeepSpeed's own names of them."""
        if self.engine.save_non_zero_checkpoint:
            yield Path(self.engine._get_ckpt_name(str(folder), TAG))
        if self.engine.save_zero_checkpoint:
            yield Path(self.engine._get_zero_ckpt_name(str(folder), TAG))

    def loss_scaling(self) -> Mapping[str, float]:
        """Return the state of DeepSpeed's scaler; see Checkpoint.loss_scaling."""
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: getattr(scaler, name) for name in names if hasattr(scaler, name)}
