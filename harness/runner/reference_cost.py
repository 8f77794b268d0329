"""How long a run trains: by the speed of recorded runs, else by the plan of its step, else by its device's peak."""

from harness.config.schema import Device
from harness.cost_model.flops import executed_flops
from harness.hardware.machine import assumed_peak
from harness.records.run_folder import ComparisonFolder
from harness.records.store import readable_records
from harness.runner.plan import RunPlan

ASSUMED_MFU = 0.4  # the share of the device's peak that large models reach, for devices that have timed nothing yet
TRAININGS = 2  # by a reference: its own, and one that differs from it in rounding

# What a run takes beside its training: the start of its ranks, the profiled step and the trace. Assumed for GPUs.
OTHER_SECONDS: dict[Device, float] = {"cpu": 5.0, "cuda": 45.0}

Speed = tuple[float, str]  # the operations that a device runs in a second, 0 if they are unknown, and what tells them

Cost = tuple[float, str]  # the seconds of all trainings of a run, 0 if they are unknown, and whose speed tells them


def devices_used(plan: RunPlan) -> int:
    """Return the number of devices that a run uses; on a CPU the machine is one device, whose cores ranks share."""
    return plan.layout.world_size if plan.machine.device == "cuda" else 1


def training_steps(plan: RunPlan) -> int:
    """Return the number of steps of all trainings of a run."""
    return plan.config.train.total_steps * (TRAININGS if plan.folder.is_reference else 1)


def device_flops(plan: RunPlan) -> float:
    """Return the operations that each device runs in all trainings of a run."""
    return (
        training_steps(plan)
        * executed_flops(plan.config, plan.layout, plan.machine.device, plan.widths.recomputes_last_projection)
        / devices_used(plan)
    )


def predict_cost(plan: RunPlan, measured: Speed) -> Cost:
    """Return how long a run trains, by what measured_speed() says of its model, else by what is known of its device."""
    flops, source = measured
    if not flops and plan.prediction is not None:
        return training_steps(plan) * plan.prediction.step_seconds, f"the plan for {plan.machine.device_name}"
    if not flops:
        peak, device = assumed_peak(plan.machine, plan.config.precision.compute)
        flops, source = ASSUMED_MFU * (peak or 0.0), f"{ASSUMED_MFU:.0%} of the peak of {device}"
    return (device_flops(plan) / flops, source) if flops else (0.0, "")


def measured_speed(plan: RunPlan) -> Speed:
    """Return the highest speed of a run or a reference of the comparison that trained the same model and tokens.

    On a CPU it is that of the whole machine, which ranks share.
    """
    alike = {
        "status": "ok",
        "measured_on": plan.machine.device_name,
        "model": plan.config.model.name,
        "precision": plan.config.precision.name,
        "seq_len": plan.config.train.seq_len,
    }
    folders = (plan.comparison, ComparisonFolder(plan.comparison.references))
    rows = (r.row for folder in folders for r in readable_records(folder, f"*-{plan.config.model.name}-*"))
    same = (row for row in rows if all(row.get(key) == value for key, value in alike.items()))
    speeds = (
        (flops / seconds / (row["world_size"] if plan.machine.device == "cuda" else 1), row["run_id"])
        for row in same
        if (flops := row.get("executed_flops")) and (seconds := row.get("step_seconds"))
    )
    return max(speeds, default=(0.0, ""))
