"""harness calibrate: this machine's kernels and links, measured into a cluster file for `harness plan`."""

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.util.text import UserError

if TYPE_CHECKING:
    from harness.calibration.fit import CurveError
    from harness.hardware.machine import Machine

FOLDER = Path("conf") / "cluster"


def main(options: Namespace) -> None:
    """Measure, fit, print and write. Raises UserError for a mistake in the options, or for ranks that fail."""
    from harness.calibration.cluster import cluster_path, default_name
    from harness.config.schema import ClusterConfig
    from harness.runner.resolve import detect_machine

    machine = detect_machine(ClusterConfig("local", device=options.device))
    most = machine.devices if machine.device == "cuda" else machine.cores
    ranks = options.ranks if options.ranks is not None else machine.ranks_per_node
    if not 1 <= ranks <= max(most, machine.ranks_per_node):
        raise UserError(f"--ranks={ranks} is not a number of ranks of this machine: choose 1 to {most}")
    problem = machine.device_problem(ranks)
    if problem:
        raise UserError(problem)
    name = options.name or default_name(machine.device_name, ranks)
    path = cluster_path(FOLDER, name, options.overwrite)
    measure_into(path, name, machine, ranks, options.quick)


def measure_into(path: Path, name: str, machine: "Machine", ranks: int, quick: bool) -> None:
    """Measure the machine and write its file."""
    from harness.calibration.cluster import (
        assumptions,
        calibrated_hardware,
        fitted_to,
        write_cluster,
    )
    from harness.calibration.fit import curve_errors, fit_rates
    from harness.calibration.points import measure_machine
    from harness.hardware.machine import described_devices
    from harness.runner.resolve import computes_bf16

    dtype = "bfloat16" if computes_bf16(machine.device, machine.compute_capability) else "float32"
    measured = measure_machine(machine.device, ranks, dtype, quick)
    rates, datasheet = fit_rates(measured), described_devices().get(machine.device_name)
    hardware = calibrated_hardware(machine, measured, rates, datasheet)
    errors = curve_errors(measured, hardware)
    hardware = dataclasses.replace(hardware, fitted_to=fitted_to(measured, errors), notes=assumptions(rates, datasheet))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_cluster(path, name, ranks, hardware)
    print(*table(errors), sep="\n")
    print(f"launching an operator takes the host {1e6 * rates.launch_seconds:.1f} µs")
    if rates.overlap_slowdown is not None:
        print(f"a collective slows down the kernels beside it by {rates.overlap_slowdown:.0%} of its own time")
    print(hardware.notes)
    print(f"{path}: harness plan cluster={name}")


def table(errors: "Sequence[CurveError]") -> list[str]:
    """Return what was measured and how well the fitted curves reproduce it, as a table."""
    lines = [
        ("measured", "points", "sizes", "best rate", "median error", "largest error"),
        *((e.name, str(e.points), e.sizes, e.best, f"{e.median_error:.0%}", f"{e.largest_error:.0%}") for e in errors),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
