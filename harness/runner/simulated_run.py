"""The process of a simulated run, which plays its ranks one after another."""

from pathlib import Path

from harness.launcher.launch import launch
from harness.launcher.outcome import LaunchOutcome
from harness.runner.context import RunContext
from harness.runner.plan import Plan
from harness.simulator.entry import simulator_entry
from harness.simulator.native_guard import build_device_guard, needs_device_guard


def device_guard(plan: Plan, cache: Path) -> str | None:
    """Return the path of the library that stands in for a GPU's driver; None if this simulation needs none.

    Raises UserError or RuntimeError if it cannot be built.
    """
    return str(build_device_guard(cache)) if plan.machine.device == "cuda" and needs_device_guard() else None


def run_simulator(plan: Plan, context: RunContext) -> LaunchOutcome:
    """Run the simulator's process to its end, watched as the ranks of other runs are."""
    return launch(
        simulator_entry,
        plan.folder.path,
        1,
        device="cpu",
        timeout_seconds=plan.command.timeout_seconds,
        hang_seconds=plan.command.hang_seconds,
        on_tick=lambda: context.on_progress(plan.folder.path),
    )
