"""The predicted duration of a reference, from the speed of runs on file or else from the device's peak."""

from dataclasses import dataclass

from harness.cost_model.flops import executed_flops
from harness.hardware.peak_flops import peak_flops
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.records.store import read_record
from harness.runner.plan import Plan
from harness.util.errors import UserError

ASSUMED_MFU = 0.4  # the share of the device's peak that large models reach, for devices that have timed nothing yet

TRAININGS = 2  # by a reference: its own, and one that differs from it in rounding


@dataclass(frozen=True)
class Speed:
    """The operations that one device runs in a second; on a CPU, those of the whole machine, which its ranks share."""

    flops_per_second: float
    source: str  # what it is known from, such as the id of a run


@dataclass(frozen=True)
class Cost:
    """The predicted duration of a run."""

    seconds: float
    source: str

    def __str__(self) -> str:
        return f"{self.seconds:,.0f} s at the speed of {self.source}"


def predict_cost(plan: Plan) -> Cost | None:
    """Return how long a reference will train; None where nothing tells the speed of this machine."""
    speed = measured_speed(plan) or assumed_speed(plan)
    if speed is None:
        return None
    device = plan.machine.device
    flops = executed_flops(plan.config, plan.layout, device, plan.widths.recomputes_last_projection)
    per_device = flops / (plan.layout.world_size if device == "cuda" else 1)
    return Cost(TRAININGS * plan.config.train.total_steps * per_device / speed.flops_per_second, speed.source)


def measured_speed(plan: Plan) -> Speed | None:
    """Return the highest speed that a run or a reference of the comparison reached with the same model and tokens."""
    folders = (plan.comparison, ComparisonFolder(plan.comparison.references))
    speeds: list[Speed] = []
    for folder in (run for comparison in folders for run in comparison.recorded_runs(f"*-{plan.config.model.name}-*")):
        try:
            record = read_record(folder.path)
        except UserError:
            continue
        speeds += [] if (speed := speed_of(record, plan)) is None else [speed]
    return max(speeds, key=lambda speed: speed.flops_per_second, default=None)


def speed_of(record: Record, plan: Plan) -> Speed | None:
    """Return the speed of a recorded run; None if it tells nothing about the plan's."""
    row, config = record.row, plan.config
    alike = {
        "status": "ok",
        "measured_on": plan.machine.device_name,
        "model": config.model.name,
        "precision": config.precision.name,
        "seq_len": config.train.seq_len,
    }
    flops, seconds = row.get("executed_flops"), row.get("step_seconds")
    if any(row.get(key) != value for key, value in alike.items()) or not flops or not seconds:
        return None
    devices = row["world_size"] if plan.machine.device == "cuda" else 1
    return Speed(flops / seconds / devices, record.run_id)


def assumed_speed(plan: Plan) -> Speed | None:
    """Return the speed of large models on the machine's device; None where its peak is not known, as on a CPU."""
    peak = peak_flops(plan.machine.device_name, plan.config.precision.compute)
    return None if peak is None else Speed(ASSUMED_MFU * peak, f"{ASSUMED_MFU:.0%} of a device's peak")
