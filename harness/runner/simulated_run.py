"""The processes of simulated and virtual runs, which run some ranks of a world one after another."""

import dataclasses
from pathlib import Path

from harness.launcher.launch import launch
from harness.launcher.outcome import LaunchOutcome
from harness.runner.context import RunContext
from harness.runner.plan import Plan
from harness.runner.simulation import simulated_ranks
from harness.simulator.process import build_device_guard, simulator_entry, virtual_entry


def chosen_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the ranks that simulate.rank names; none if every rank is a process."""
    return () if plan.config.launch == "processes" else simulated_ranks(plan.config, plan.layout, plan.machine)


def device_guard(plan: Plan, cache: Path) -> str | None:
    """Return the path of the library that stands in for a GPU's driver; None for a CPU.

    Raises UserError or RuntimeError if it cannot be built.
    """
    return str(build_device_guard(cache)) if plan.machine.device == "cuda" else None


def run_simulator(plan: Plan, context: RunContext) -> LaunchOutcome:
    """Run the simulator's process to its end or its time limit. It waits for no other rank, so that it cannot hang."""
    return launch(
        simulator_entry,
        plan.folder.path,
        1,
        device="cpu",
        timeout_seconds=plan.command.timeout_seconds,
        on_tick=lambda: context.on_progress(plan.folder.path),
    )


def run_virtual_ranks(plan: Plan, context: RunContext) -> LaunchOutcome:
    """Run the virtual ranks to their end, each in a process of its own, until one fails."""
    outcome, seconds = LaunchOutcome("ok", "", (), 0.0), 0.0
    for _ in chosen_ranks(plan):
        outcome = launch(
            virtual_entry,
            plan.folder.path,
            1,
            device=plan.machine.device,
            timeout_seconds=plan.command.timeout_seconds - seconds,
            hang_seconds=plan.command.hang_seconds,
            on_tick=lambda: context.on_progress(plan.folder.path),
        )
        seconds += outcome.seconds
        if outcome.status != "ok":
            break
    return dataclasses.replace(outcome, seconds=seconds)
