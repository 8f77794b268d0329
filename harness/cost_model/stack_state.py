"""The model state of a rank under another implementation, and the memory of a step's moments. Imports no torch."""

from dataclasses import dataclass

from harness.config.schema import RunConfig
from harness.config.stack_memory import StackMemory
from harness.cost_model.stack_parameters import RankParts
from harness.layout.layout import Layout


@dataclass(frozen=True)
class Moment:
    """The bytes of a moment in forward or backward, without what depends on model state."""

    activations: int = 0
    loss: int = 0
    temporaries: int = 0
    remaining_layers: int = 0  # the layers of this pass whose backward has not run
    in_backward: bool = False


@dataclass(frozen=True)
class StackState:
    """The model state of one rank, at rest and in the moments of a step."""

    parameters: int
    optimizer: int
    main_gradients: int  # a buffer that lives from step to step
    gradients: int  # of all parameters, where there is no such buffer, or beside it
    at_rest: int  # gradients and buffers that are allocated between steps
    buckets: int  # that live from step to step
    layers: int
    unit_gathered: int  # of one layer's parameters as they are gathered for use
    root_gathered: int  # of all others
    gathered_units: int  # how many layers are gathered at once; all of them under ZeRO stage 2
    unit_gradient: int  # of one layer's gradients before they are reduced
    root_gradient: int
    optimizer_temporaries: int

    def at(self, moment: Moment, accumulates: bool) -> dict[str, int]:
        """Return the bytes of all parts but resident ones at a moment of the last micro-batch of a step."""
        left = moment.remaining_layers / self.layers if self.layers else 0.0  # a stage may have the head alone
        # Between forward and backward, layers that are gathered for each use are freed.
        units = self.gathered_units if moment.in_backward or self.gathered_units == self.layers else 0
        gathered = self.root_gathered + self.unit_gathered * min(units, self.layers)
        reduced = 0
        if self.unit_gathered and moment.in_backward:
            reduced = self.unit_gradient if moment.remaining_layers else self.root_gradient
        share = 1 - left if moment.in_backward and not accumulates else float(accumulates)
        if self.main_gradients:  # gradients of a backward are added to the buffer at its end
            share = 1 - left if moment.in_backward else 0.0
        return {
            "gradients": self.main_gradients + round(self.gradients * share),
            "buffers": self.buckets + gathered + reduced,
            "activations": moment.activations,
            "loss": moment.loss,
            "temporaries": moment.temporaries,
        }

    def in_optimizer_step(self) -> dict[str, int]:
        """Return the bytes of all parts but resident ones in the optimizer's step, where activations are gone."""
        gradients = self.main_gradients or self.gradients
        temporaries = self.optimizer_temporaries
        return {
            "gradients": gradients,
            "buffers": self.buckets,
            "activations": 0,
            "loss": 0,
            "temporaries": temporaries,
        }


def model_state(config: RunConfig, layout: Layout, memory: StackMemory, parts: RankParts) -> StackState:
    """Return a rank's model state: widths from the precision, shards from ZeRO's stage (arXiv 1910.02054)."""
    precision, count = config.precision, parts.parameters
    compute, master, states = precision.compute_bytes, precision.master_bytes, config.optimizer.state_bytes(precision)
    shards = layout.dp_shard * (layout.cp if layout.zero_stage else 1)
    layers = sum(parts.chunks)
    if memory.kind == "flat_units":
        is_sharded = layout.data_parallel == "fsdp" and layout.zero_stage > 0 and shards > 1
        degree = shards if is_sharded else 1
        gathers = is_sharded or precision.is_mixed
        whole = layout.zero_stage == 2 or not is_sharded
        gradients = -(-master * count // degree)
        return StackState(
            parameters=-(-master * count // degree),
            optimizer=-(-states * count // degree),
            main_gradients=0,
            gradients=gradients,
            at_rest=gradients if memory.keeps_gradients_at_rest and is_sharded else 0,
            buckets=0,
            layers=layers,
            unit_gathered=compute * parts.unit if gathers else 0,
            root_gathered=compute * parts.root if gathers else 0,
            gathered_units=layers if whole else 1 + memory.prefetched_units,
            unit_gradient=compute * parts.unit,
            root_gradient=compute * parts.root,
            optimizer_temporaries=-(-memory.optimizer_copies * master * count // degree),
        )
    degree = shards if layout.zero_stage >= 1 else 1
    optimizer = states + master * precision.is_mixed
    replicated = layout.dp > 1 and layout.zero_stage == 0
    main = precision.accumulate_bytes * count if memory.keeps_main_gradients else 0
    buckets = memory.reduce_bucket_bytes * count if replicated else 0
    return StackState(
        parameters=compute * count,
        optimizer=-(-optimizer * count // degree),
        main_gradients=main,
        gradients=compute * count if memory.holds_backward_gradients or not main else 0,
        at_rest=main + buckets,
        buckets=buckets,
        layers=layers,
        unit_gathered=0,
        root_gathered=0,
        gathered_units=0,
        unit_gradient=0,
        root_gradient=0,
        optimizer_temporaries=-(-memory.optimizer_copies * master * count // degree),
    )
