"""Whether a layout fits, without a machine and presets: what is offered keeps strategy and precision."""

import dataclasses
from collections.abc import Sequence

from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.fits import Choices, Room, Variant, memory_problem
from harness.cost_model.memory import estimate_memory
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths


def capacity_problem(
    config: RunConfig,
    layout: Layout,
    widths: StateWidths,
    *,
    device: Device,
    models: Sequence[ModelConfig],
    available_bytes: int,
    ranks_on_host: int,
    host_available_bytes: int | None = None,
) -> str | None:
    """Return why a run does not fit; more ranks divide the model state further."""

    def plan(changed: RunConfig, world_size: int | None) -> Variant | None:
        factor = (world_size or layout.world_size) // layout.world_size
        wider = dataclasses.replace(layout, dp_shard=layout.dp_shard * factor)
        divides = factor == 1 or (layout.zero_stage > 0 and layout.dp_shard > 1)
        if not divides or any(incompatibilities(changed, wider)):
            return None
        return Variant(wider, estimate_memory(changed, wider, widths, device), room)

    budget = config.cluster.memory_budget_bytes
    room = Room(available_bytes, ranks_on_host, device == "cpu", budget, host_available_bytes)
    memory = estimate_memory(config, layout, widths, device)
    process_bytes = 0 if room.device_holds(memory) else memory.process_bytes
    return memory_problem(config, layout, memory, room, Choices(plan, process_bytes, models))
