"""The prediction of one configuration on a cluster: memory, time and bytes. Imports no torch."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from harness.config.schema import RunConfig
from harness.config.stack import StackConfig, StackMemory
from harness.config.strategy import AXES, DEGREES
from harness.cost_model.communication import expected_bytes
from harness.cost_model.dp_communication import gathered_bytes
from harness.cost_model.fits import FitVerdict, Room, fit_verdict, say
from harness.cost_model.flops import model_flops
from harness.cost_model.memory import PROCESS_BYTES, MemoryEstimate, estimate_memory
from harness.cost_model.micro_batch_shape import micro_batch_shape
from harness.cost_model.node_groups import group_of, leaving_share, secondary_group
from harness.cost_model.pipeline import bubble_ratio
from harness.cost_model.ring import ring_fraction
from harness.cost_model.stack_memory import RankMemory, own_memory, predict_highest_rank, reduces_at_end
from harness.cost_model.timing.interval import ENDS, Basis, Factors, basis_of, changed_machine
from harness.cost_model.timing.kernels import device_peak_flops, rank_hardware
from harness.cost_model.timing.step_time import StepTime, estimate_step_time
from harness.cost_model.zero_plus_plus import exchanged_bytes
from harness.hardware.machine import DescribedCluster
from harness.layout.compatibility import trains_packed
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import whole_model
from harness.layout.state_widths import StateWidths
from harness.util.text import parse_bytes

SECONDS_PER_HOUR = 3600

# Pinned over requested bytes at most: torch rounds requests up to powers of two (c10/core/CachingHostAllocator.h of
# torch 2.11 and 2.13). On an H100's host 600 MiB took 1,024 (results/first_gpu).
MOST_PINNED = 2


class Replay(NamedTuple):
    """How the fullest rank ended on a simulated device, by a model of torch's allocator."""

    is_enough: bool  # whether the device had enough memory
    reserved_bytes: int | None  # None where it had not
    run_id: str


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one configuration on a cluster; each part is worked out when it is needed."""

    config: RunConfig
    layout: Layout
    cluster: DescribedCluster
    stack: StackConfig
    state_widths: Callable[[RunConfig, Layout], StateWidths]  # of the layout's engine
    replay: Replay | None = None  # None where nothing was simulated
    not_simulated: str = ""  # why nothing was, where the plan leaves open if it fits and a simulation was wanted

    @cached_property
    def widths(self) -> StateWidths:
        """The bytes per element that the engine allocates, and how often the stack sends them."""
        at_end = reduces_at_end(self.layout, self.stack)
        repeats = self.stack.timing.repeats_in_micro_batches and self.layout.data_parallel == "fsdp" and not at_end
        widths = self.state_widths(self.config, self.layout)
        return dataclasses.replace(widths, repeats_in_micro_batches=repeats, reduces_at_end=at_end)

    @property
    def is_of_library(self) -> bool:
        """Whether the model is one of the transformers library."""
        return not model_profile(self.config.model).is_project_decoder

    @property
    def has_traced_layers(self) -> bool:
        """Whether its activations are those of a trace; of a library's model others are those of the nearest family."""
        shape = micro_batch_shape(self.config, self.layout, self.cluster.device)
        return shape.tp == 1 and shape.traced_layer("none") is not None

    @property
    def planned_alone(self) -> str:
        """The choice that this project's engines do not train; empty where they train all of it."""
        adapter, precision = self.config.model.adapter, self.config.precision
        choices = {
            f"stack={self.stack.name}": self.stack.name != "harness",
            f"adapter={adapter.name}": adapter.is_quantized and not trains_packed(self.config, self.layout),
            f"precision.recipe={precision.recipe}": precision.is_planned_only,
        }
        return next((choice for choice, is_planned in choices.items() if is_planned), "")

    @property
    def is_runnable(self) -> bool:
        """Whether this project's engines train it."""
        return not self.planned_alone

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is that of this project's engines, which a stack of the same library shares."""
        return self.stack.memory.kind == "harness"

    @cached_property
    def peak(self) -> RankMemory:
        """The memory of the rank with the highest peak, and what torch's allocator reserves for it."""
        config, layout, device = self.config, self.layout, self.cluster.device
        if self.has_own_memory:
            estimate = estimate_memory(config, layout, self.widths, device)
            return own_memory(self.stack.memory, estimate, layout, self.widths, device)
        return predict_highest_rank(config, layout, self.stack, self.cluster.hardware.compute_capability)

    @property
    def memory(self) -> MemoryEstimate:
        """The memory of that rank."""
        return self.peak.estimate

    @cached_property
    def verdict(self) -> FitVerdict:
        """Whether the highest rank fits a device, by the errors on file or a simulation, and its host's memory."""
        verdict = fit_verdict(self.peak, self.available_bytes, self.judged_stack)
        if self.replay is not None:
            verdict = dataclasses.replace(verdict, fits="likely" if self.replay.is_enough else "no")
        if not self.room.host_holds(self.memory):
            return dataclasses.replace(verdict, fits="no")
        most = dataclasses.replace(self.memory, host_bytes=MOST_PINNED * self.memory.host_bytes)
        is_tight = verdict.fits == "likely" and not self.room.host_holds(most)
        return dataclasses.replace(verdict, fits="tight") if is_tight else verdict

    @property
    def is_open(self) -> bool:
        """Whether the plan leaves open if it fits a GPU, whose allocator a simulation plays."""
        return self.verdict.fits == "tight" and self.cluster.device == "cuda"

    @property
    def judged_stack(self) -> StackMemory:
        """The stack with the errors on file for this model: none for a library's, and none with 4-bit weights."""
        memory, model = self.stack.memory, self.config.model
        own = memory.mixtures_over_predicted if model.num_experts else memory.measured_over_predicted
        is_unmeasured = self.is_of_library or model.adapter.is_quantized
        return dataclasses.replace(memory, measured_over_predicted=None if is_unmeasured else own)

    @cached_property
    def time(self) -> StepTime:
        """The time of a step and its parts."""
        return self._time_with(Factors(1.0, 1.0, 1.0))

    @cached_property
    def step_parts(self) -> dict[str, float]:
        """The seconds of a step by the columns of its parts, which add up to it."""
        time = self.time
        forward = time.micro_batches * time.forward_seconds
        return {
            "forward_seconds": forward,
            "backward_seconds": time.compute_seconds - forward,
            "optimizer_seconds": time.optimizer_seconds,
            "exposed_communication_seconds": sum(time.exposed_communication_seconds.values()),
            "exposed_copy_seconds": time.copy_seconds,
            "idle_seconds": time.bubble_seconds,
            "other_seconds": time.other_seconds,
        }

    @cached_property
    def parts_of_step(self) -> dict[str, float]:
        """The seconds of a step by what they are spent on, in the order of a table's columns."""
        time = self.time
        exposed = {f"exposed {axis}": time.exposed_communication_seconds.get(axis, 0.0) for axis in reversed(AXES)}
        parts = {"compute": time.compute_seconds} | exposed | {"copies": time.copy_seconds}
        return parts | {"bubble": time.bubble_seconds, "optimizer": time.optimizer_seconds, "rest": time.other_seconds}

    @property
    def bubble_ratio(self) -> float:
        """The idle share of a pipeline by the formula of its schedule."""
        return bubble_ratio(self.layout, self.time.micro_batches)

    @property
    def step_seconds(self) -> float:
        """The seconds of a step."""
        return self.time.step_seconds

    @cached_property
    def step_interval(self) -> tuple[float, float]:
        """The seconds between which nine of ten measured steps lie, by the errors on file."""
        low, high = (self._time_with(factors).step_seconds for factors in ENDS[self.basis])
        return low, high

    @property
    def basis(self) -> Basis:
        """What measurements stand behind the time."""
        experts = self.config.model.num_experts
        return basis_of(self.cluster.name, self.cluster.hardware, self.stack.timing, experts)

    def _time_with(self, factors: Factors) -> StepTime:
        hardware, timing = changed_machine(self.cluster.hardware, self.stack.timing, factors)
        devices = self.cluster.gpus_per_node
        return estimate_step_time(self.config, self.layout, hardware, timing, self.widths, devices)

    @property
    def needed_bytes(self) -> int:
        """The bytes that a device must have: of tensors, and outside torch's allocator."""
        return self.memory.needed_bytes

    @property
    def reserved_bytes(self) -> int:
        """The bytes that torch's allocator reserves, by the simulation if there was one."""
        return (self.replay and self.replay.reserved_bytes) or self.peak.reserved_bytes

    @property
    def device_bytes(self) -> int:
        """The bytes that a device must have: what torch cannot give back, and what is outside its allocator."""
        served = (self.replay and self.replay.reserved_bytes) or self.peak.served_bytes
        return served + self.memory.process_bytes

    @property
    def available_bytes(self) -> int:
        """The bytes that a device has for a rank: all of it, or what cluster.memory_budget leaves."""
        own, budget = self.cluster.memory_bytes, self.config.cluster.memory_budget_bytes
        return own if budget is None else min(own, budget + PROCESS_BYTES[self.cluster.device])

    @property
    def tensor_bytes(self) -> int:
        """The bytes of them that are for torch's allocator."""
        return self.available_bytes - self.memory.process_bytes

    @property
    def host_available_bytes(self) -> int | None:
        """The bytes of its host's memory that each rank of a node may take; None if they are not known."""
        memory, ranks = self.cluster.hardware.host_memory, min(self.cluster.gpus_per_node, self.layout.world_size)
        return None if memory is None else parse_bytes(memory) // ranks

    @cached_property
    def room(self) -> Room:
        """The memory of a device and a rank's part of its host's, of which plans count no processes."""
        host, budget = self.host_available_bytes, self.config.cluster.memory_budget_bytes
        host_bytes = None if host is None else host + PROCESS_BYTES["cpu"]
        return Room(self.cluster.memory_bytes, budget_bytes=budget, host_bytes=host_bytes)

    @property
    def fits(self) -> bool:
        """Whether the predicted peak itself fits a device and its host, or its simulation; `verdict` has how sure."""
        return self.replay.is_enough if self.replay is not None else self.room.holds(self.memory)

    @property
    def tokens_per_second(self) -> float:
        """The tokens that the whole world trains on per second."""
        return self.config.train.global_batch * self.config.train.seq_len / self.step_seconds

    @property
    def device_peak_flops(self) -> float | None:
        """The dense peak of one device, or a rank's share of a CPU, in the dtype of compute; None if it is unknown."""
        hardware = rank_hardware(self.cluster.hardware, min(self.cluster.gpus_per_node, self.layout.world_size))
        return device_peak_flops(hardware, self.config.precision.compute)

    @property
    def model_flops(self) -> int:
        """The operations that the model requires in a step, whatever is recomputed."""
        return model_flops(self.config)

    @property
    def mfu(self) -> float | None:
        """The model's operations over the peak of all devices (arXiv 2204.02311, appendix B)."""
        peak = self.device_peak_flops
        return peak and self.model_flops / (self.step_seconds * peak * self.layout.world_size)

    @property
    def cost_per_billion_tokens(self) -> float | None:
        """The price of training on a billion tokens, in the currency of the cluster's price; None without a price."""
        price = self.cluster.hardware.price_per_device_hour
        return price and price * self.layout.world_size / SECONDS_PER_HOUR * 1e9 / self.tokens_per_second

    @cached_property
    def sent_bytes(self) -> dict[str, float]:
        """The bytes that the rank with most of them sends in a step, by axes and operation."""
        ranks = range(0, self.layout.world_size, self.layout.world_size // self.layout.pp)
        sent = (expected_bytes(self.config, self.layout, self.widths, rank, is_sent=True) for rank in ranks)
        return max(sent, key=lambda volumes: sum(volumes.values()))

    @property
    def secondary_bytes(self) -> float:
        """The bytes of them by which a rank gathers secondary shards, whose ranks are neighbors."""
        _, among_few = gathered_bytes(self.config, self.layout, self.widths, whole_model(self.config.model))
        return ring_fraction(self.layout.secondary_shards) * among_few

    @cached_property
    def between_nodes_bytes(self) -> float:
        """The bytes of them that leave the node, as the mean of its devices."""
        layout, devices, leaving = self.layout, self.cluster.gpus_per_node, 0.0
        for name, size in self.sent_bytes.items():
            axes, operation = name.split()
            share = leaving_share(operation, group_of(layout, tuple(axes.split("+")), devices))
            if self.widths.exchange_devices and operation == "all_to_all":
                hops = exchanged_bytes([(1, 1)], layout.dp_shard, devices)
                share = hops[1] / sum(hops)
            leaving += share * size
        if layout.secondary_shards > 1:
            groups = secondary_group(layout, devices), group_of(layout, layout.sharding_axes, devices)
            few, all_ranks = (leaving_share("gather", group) for group in groups)
            leaving += (few - all_ranks) * self.secondary_bytes
        return leaving

    @property
    def within_nodes_bytes(self) -> float:
        """The bytes of them that stay within the node."""
        return sum(self.sent_bytes.values()) - self.between_nodes_bytes

    def label(self) -> str:
        """Return the layout in a few words: `fsdp zero 3, dp_shard 8 x tp 4, selective, micro-batch 2`."""
        degrees = [f"{axis} {size}" for axis in DEGREES if axis != "ep" and (size := getattr(self.layout, axis)) > 1]
        return say("label", config=self.config, layout=self.layout, degrees=degrees)
