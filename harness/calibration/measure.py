"""The parent of a calibration: it starts the ranks of this machine as a run's are started, and reads what they saw."""

import importlib
import json
import tempfile
from pathlib import Path

from harness.calibration.points import RESULT_FILE, SPEC_FILE, Measurements
from harness.config.from_dict import from_dict
from harness.config.schema import Device
from harness.launcher.launch import launch
from harness.launcher.rank_environment import threads_per_rank
from harness.util.errors import UserError
from harness.util.files import atomic_write_json

TIME_LIMIT_SECONDS = 900.0


def rank_entry(run_dir: str) -> None:
    """Measure as one rank. The parent does not import what measures."""
    importlib.import_module("harness.calibration.rank").main(run_dir)


def measure_machine(device: Device, ranks: int, dtype: str, quick: bool) -> Measurements:
    """Return what so many ranks of this machine measure. Raises UserError if a rank fails."""
    with tempfile.TemporaryDirectory(prefix="harness-calibrate-") as folder:
        run_dir = Path(folder)
        spec = {"device": device, "dtype": dtype, "quick": quick, "threads": threads_per_rank(ranks)}
        atomic_write_json(run_dir / SPEC_FILE, spec)
        outcome = launch(rank_entry, run_dir, ranks, device=device, timeout_seconds=TIME_LIMIT_SECONDS)
        if outcome.status == "interrupted":
            raise KeyboardInterrupt
        if outcome.status != "ok":
            raise UserError(f"harness calibrate could not measure: {outcome.reason}")
        measurements: Measurements = from_dict(Measurements, json.loads((run_dir / RESULT_FILE).read_text()))
        return measurements
