"""The seconds of quantized gathers and exchanges of DeepSpeed's stage 3 (ZeRO++, arXiv 2306.10209). No torch."""

from harness.config.hardware import HardwareConfig
from harness.config.schema import PrecisionConfig
from harness.cost_model.node_groups import RankGroup
from harness.cost_model.timing.collectives import all_to_all_seconds
from harness.cost_model.zero_plus_plus import FP16_BYTES, GRADIENT_BYTES, WEIGHT_BYTES, exchange_buffer_width

MESSAGES = 2  # of each tensor: its integers and its scales


def dequantize_seconds(parameters: float, precision: PrecisionConfig, hardware: HardwareConfig) -> float:
    """Return the seconds in which parameters of 8 bits become fp16, and these another dtype of compute."""
    casts = precision.compute != "float16"
    moved = WEIGHT_BYTES + FP16_BYTES + casts * (FP16_BYTES + precision.compute_bytes)
    return parameters * moved / (hardware.memory_bandwidth * hardware.fitted.memory_efficiency)


def exchange_seconds(gradients: float, tensors: int, group: RankGroup, devices: int, hardware: HardwareConfig) -> float:
    """Return the seconds in which so many gradients are exchanged among the devices of a node, then among nodes.

    Kernels write and read each buffer of the exchange.
    """
    moved, nodes = 2 * gradients * exchange_buffer_width(group.ranks, devices), group.ranks // devices
    hops = (gradients, RankGroup(devices, 1)), (gradients / devices, RankGroup(nodes, nodes))
    sent = sum(all_to_all_seconds(GRADIENT_BYTES * size, own, hardware) for size, own in hops)
    latency = sum(all_to_all_seconds(0.0, own, hardware) for _, own in hops)
    kernels = moved / (hardware.memory_bandwidth * hardware.fitted.memory_efficiency)
    return sent + (MESSAGES * tensors - 1) * latency + kernels
