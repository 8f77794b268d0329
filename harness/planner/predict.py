"""The prediction of one configuration on a cluster: memory, time and bytes, and its row. Imports no torch."""

from dataclasses import dataclass
from functools import cached_property

from harness.config.schema import RunConfig
from harness.config.stack import StackConfig
from harness.cost_model.communication import expected_bytes
from harness.cost_model.flops import model_flops
from harness.cost_model.memory import MemoryEstimate, estimate_memory
from harness.cost_model.stack_memory import predict_memory
from harness.cost_model.timing.step_time import StepTime, estimate_step_time
from harness.hardware.peak_flops import peak_flops
from harness.layout.layout import Layout
from harness.layout.parameters import parameter_count
from harness.layout.state_widths import StateWidths
from harness.planner.cluster import PlannedCluster, engine_module
from harness.records.schema import Cell, Row

LAYOUT_KEYS = ("dp_replicate", "dp_shard", "tp", "cp", "pp")

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one configuration on a cluster; each part is worked out when it is needed."""

    config: RunConfig
    layout: Layout
    cluster: PlannedCluster
    stack: StackConfig

    @cached_property
    def widths(self) -> StateWidths:
        """The bytes per element that the engine allocates."""
        return engine_module(self.layout.engine).state_widths(self.config, self.layout)

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The memory of the rank with the highest peak."""
        if self.stack.memory.kind == "harness":
            return estimate_memory(self.config, self.layout, self.widths, self.cluster.device)
        return predict_memory(self.config, self.layout, self.stack, self.widths)

    @cached_property
    def time(self) -> StepTime:
        """The time of a step and its parts."""
        return estimate_step_time(
            self.config,
            self.layout,
            self.cluster.hardware,
            self.stack.timing,
            self.widths,
            self.cluster.gpus_per_node,
        )

    @property
    def step_seconds(self) -> float:
        """The seconds of a step."""
        return self.time.step_seconds

    @property
    def needed_bytes(self) -> int:
        """The bytes that a device must have: of tensors, and outside torch's allocator."""
        return self.memory.peak_bytes + self.memory.process_bytes

    @property
    def available_bytes(self) -> int:
        """The bytes that a device has for a rank: all of it, or what cluster.memory_budget leaves."""
        budget = self.config.cluster.memory_budget_bytes
        own = self.cluster.memory_bytes
        return own if budget is None else min(own, budget + self.memory.process_bytes)

    @property
    def fits(self) -> bool:
        """Whether the rank with the highest peak fits a device."""
        return self.needed_bytes <= self.available_bytes

    @property
    def tokens_per_step(self) -> int:
        """The tokens that the whole world trains on in a step."""
        return self.config.train.global_batch * self.config.train.seq_len

    @property
    def tokens_per_second(self) -> float:
        """The tokens that the whole world trains on per second."""
        return self.tokens_per_step / self.step_seconds

    @property
    def device_peak_flops(self) -> float | None:
        """The dense peak of one device in the dtype of compute; None if it is unknown."""
        hardware = self.cluster.hardware
        return hardware.peak_flops or peak_flops(hardware.device_name, self.config.precision.compute)

    @property
    def mfu(self) -> float | None:
        """The model's operations over the peak of all devices (arXiv 2204.02311, appendix B)."""
        peak = self.device_peak_flops
        if peak is None:
            return None
        return model_flops(self.config) / (self.step_seconds * peak * self.layout.world_size)

    @property
    def cost_per_billion_tokens(self) -> float | None:
        """The price of training on a billion tokens, in the currency of the cluster's price; None without a price."""
        price = self.cluster.hardware.price_per_device_hour
        if price is None:
            return None
        return price * self.layout.world_size / SECONDS_PER_HOUR * 1e9 / self.tokens_per_second

    @cached_property
    def sent_bytes(self) -> dict[str, float]:
        """The bytes that the rank with most of them sends in a step, by axes and operation."""
        per_stage = self.layout.world_size // self.layout.pp
        ranks = (pp_rank * per_stage for pp_rank in range(self.layout.pp))
        sent = (expected_bytes(self.config, self.layout, self.widths, rank) for rank in ranks)
        return max(sent, key=lambda volumes: sum(volumes.values()))

    def label(self) -> str:
        """Return the layout in a few words: `fsdp zero 3, dp_shard 8 x tp 4, selective, micro-batch 2`."""
        layout = self.layout
        degrees = [f"{axis} {size}" for axis in LAYOUT_KEYS if (size := getattr(layout, axis)) > 1]
        kind = layout.data_parallel if layout.data_parallel != "none" else layout.engine
        words = [f"{kind} zero {layout.zero_stage}" if layout.zero_stage else kind, " x ".join(degrees) or "one rank"]
        if layout.sequence_parallel:
            words[1] += " with sequence parallelism"
        if layout.pp_enabled:
            virtual = f" of {layout.virtual_stages} stages a rank" if layout.virtual_stages > 1 else ""
            words.append(f"{layout.schedule}{virtual}")
        checkpointing = self.config.checkpointing
        words.append(
            f"checkpointing {checkpointing.name}" + (f" {checkpointing.every}" if checkpointing.every > 1 else "")
        )
        return ", ".join([*words, f"micro-batch {self.config.train.micro_batch}"])

    def row(self) -> Row:
        """Return the row of the prediction, with the columns of runs.csv; nothing of it was measured."""
        config, layout, memory, time = self.config, self.layout, self.memory, self.time
        cells: dict[str, Cell] = {"status": None, "launch": "planned", "measured_on": None}
        cells |= {"model": config.model.name, "parameters": parameter_count(config.model)}
        cells |= {"strategy": config.strategy.name, "engine": layout.engine, "data_parallel": layout.data_parallel}
        cells |= {"checkpointing": config.checkpointing.name, "precision": config.precision.name}
        cells |= {"world_size": layout.world_size} | {key: getattr(layout, key) for key in LAYOUT_KEYS}
        cells |= {"zero_stage": layout.zero_stage, "offload": layout.offload}
        cells |= {"sequence_parallel": layout.sequence_parallel if layout.tp_enabled else None}
        cells |= {"schedule": layout.schedule if layout.pp_enabled else None}
        cells |= {"virtual_stages": layout.virtual_stages if layout.pp_enabled else None}
        cells |= {"micro_batch": config.train.micro_batch, "grad_accumulation": time.micro_batches}
        cells |= {"global_batch": config.train.global_batch, "seq_len": config.train.seq_len}
        cells |= {"predicted_step_seconds": time.step_seconds, "tokens_per_second": self.tokens_per_second}
        cells |= {"tokens_per_second_per_device": self.tokens_per_second / layout.world_size, "mfu": self.mfu}
        cells |= {"predicted_peak_bytes": memory.peak_bytes, "parameter_bytes": memory.parameter_bytes}
        cells |= {"gradient_bytes": memory.gradient_bytes, "optimizer_bytes": memory.optimizer_bytes}
        cells |= {"activation_bytes": memory.activation_bytes}
        cells |= {f"at_peak_{name}_bytes": size for name, size in memory.at_peak.items()}
        cells |= {"communication_bytes": round(sum(self.sent_bytes.values()))}
        exposed = time.exposed_communication_seconds
        cells |= {"compute_seconds": time.compute_seconds, "exposed_communication_seconds": sum(exposed.values())}
        cells |= {f"exposed_{axis.replace('+', '_')}_seconds": seconds for axis, seconds in exposed.items()}
        cells |= {"bubble_seconds": time.bubble_seconds, "optimizer_seconds": time.optimizer_seconds}
        cells |= {"other_seconds": time.other_seconds, "fits": self.fits, "cluster": self.cluster.name}
        cells |= {"stack": self.stack.name, "datasheet_only": self.cluster.hardware.datasheet_only}
        return cells | {"cost_per_billion_tokens": self.cost_per_billion_tokens}
