"""The seconds between which nine of ten measured steps lie: the same step on a faster and on a slower machine.

Predictions fail where kernels, the host or links are not what they were taken for. So each end of an interval is a
prediction itself, with all rates, all the host's delays and all links changed by factors. A step that is bound by the
host or exposes its communication has a wide interval, and one that computes has a narrow one.
"""

import dataclasses
from typing import Literal, NamedTuple

from harness.config.hardware import HardwareConfig
from harness.config.stack import StackTiming

TIE = 0.03  # a difference of step time that is below the error of predictions for devices that were measured


class Factors(NamedTuple):
    """By how much longer everything of a kind takes: a device's kernels, the host's launches, messages over links."""

    kernels: float
    host: float
    links: float


# Whether steps of the stack on the device were measured, or of each with another one, or none on the device, or none of
# the kind of model.
Basis = Literal["together", "apart", "datasheet", "mixture"]

# The factors that hold nine of ten published steps of the sources that parameters were fitted to ("together"), and of
# those that are left out of the fit ("apart"): tests/benchmarks/left_out.py. Between A100 and H100 the shares of the
# peak differ by a factor of 1.2 in products and 1.8 in attention ("datasheet"). No parameter was fitted to a mixture of
# experts ("mixture").
ENDS: dict[Basis, tuple[Factors, Factors]] = {
    "together": (Factors(0.87, 0.8, 0.75), Factors(1.15, 1.4, 1.7)),
    "apart": (Factors(0.87, 0.8, 0.7), Factors(1.15, 2.0, 2.2)),
    "datasheet": (Factors(0.65, 0.7, 0.6), Factors(1.45, 2.0, 2.5)),
    "mixture": (Factors(0.65, 0.7, 0.6), Factors(1.45, 2.0, 2.5)),
}


def basis_of(cluster: str, hardware: HardwareConfig, timing: StackTiming, experts: int) -> Basis:
    """Return what measurements stand behind predictions of a stack on the hardware of a cluster file.

    `experts` are those of a layer of the model, 0 for a dense one.
    """
    if experts:
        return "mixture"
    if hardware.datasheet_only:
        return "datasheet"
    return "together" if cluster in timing.measured_on else "apart"


def changed_machine(
    hardware: HardwareConfig, timing: StackTiming, factors: Factors
) -> tuple[HardwareConfig, StackTiming]:
    """Return a machine and a stack on which everything takes so much longer."""
    old, (kernels, host, links) = hardware.fitted, factors
    fitted = dataclasses.replace(
        old,
        matmul_efficiency=old.matmul_efficiency / kernels,
        attention_efficiency=old.attention_efficiency / kernels,
        cudnn_attention_efficiency=old.cudnn_attention_efficiency / kernels,
        memory_efficiency=old.memory_efficiency / kernels,
        kernel_seconds=old.kernel_seconds * kernels,
        launch_seconds=old.launch_seconds * host,
        intra_node_efficiency=old.intra_node_efficiency / links,
        inter_node_efficiency=old.inter_node_efficiency / links,
        intra_node_latency=old.intra_node_latency * links,
        inter_node_latency=old.inter_node_latency * links,
    )
    slower = dataclasses.replace(
        timing,
        layer_seconds=timing.layer_seconds * host,
        micro_batch_seconds=timing.micro_batch_seconds * host,
        collective_launch_seconds=timing.collective_launch_seconds * host,
        collective_seconds_per_rank=timing.collective_seconds_per_rank * host,
        pipelined_collective_seconds_per_rank=timing.pipelined_collective_seconds_per_rank * host,
        shard_slice_seconds=timing.shard_slice_seconds * host,
        step_seconds=timing.step_seconds * host,
        inter_node_step_seconds=timing.inter_node_step_seconds * links,
    )
    return dataclasses.replace(hardware, fitted=fitted), slower
