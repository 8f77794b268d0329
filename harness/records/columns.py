"""The registry of columns: name, type, unit, title, meaning and use of every column of runs.csv, in its order.

Reports, tables and the reference page docs/reference/columns.md take a column's facts from here. A row may have columns
of its own beyond these, such as at_peak_gradient_bytes: names that end in _bytes are whole numbers of bytes.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from harness.records.schema import Row

Aggregate = Literal["", "maximum", "median", "sum"]  # over ranks or repeats; "" where it is the same for all

Better = Literal["", "higher", "lower"]

Group = Literal[
    "run", "model", "layout", "batch", "options", "outcome", "training", "time", "throughput", "memory", "bytes"
]

GROUP_TITLES: dict[Group, str] = {
    "run": "Run",
    "model": "Model",
    "layout": "Strategy and layout",
    "batch": "Batch",
    "options": "Options",
    "outcome": "Outcome of runs that did not end ok",
    "training": "Training",
    "time": "Time",
    "throughput": "Throughput",
    "memory": "Memory",
    "bytes": "Communication",
}


@dataclass(frozen=True)
class Column:
    """One column of runs.csv."""

    name: str
    type: type
    unit: str
    title: str
    aggregate: Aggregate
    better: Better
    group: Group
    help: str
    short_title: str = ""  # for labels and narrow tables; empty where the title is short enough

    @property
    def label(self) -> str:
        """The short title, or the title if there is none."""
        return self.short_title or self.title


def _text(name: str, group: Group, title: str, help: str) -> Column:
    return Column(name, str, "", title, "", "", group, help)


def _count(
    name: str,
    group: Group,
    title: str,
    help: str,
    aggregate: Aggregate = "",
    better: Better = "",
    short_title: str = "",
) -> Column:
    return Column(name, int, "", title, aggregate, better, group, help, short_title)


def _bool(name: str, group: Group, title: str, help: str) -> Column:
    return Column(name, bool, "", title, "", "", group, help)


def _bytes(name: str, title: str, help: str, group: Group = "memory", better: Better = "lower") -> Column:
    return Column(name, int, "bytes", title, "maximum", better, group, help)


def _seconds(name: str, title: str, help: str, better: Better = "lower") -> Column:
    return Column(name, float, "seconds", title, "median", better, "time", help)


def _float(
    name: str, group: Group, unit: str, title: str, help: str, aggregate: Aggregate = "", better: Better = ""
) -> Column:
    return Column(name, float, unit, title, aggregate, better, group, help)


COLUMNS: tuple[Column, ...] = (
    _text("run_id", "run", "run", "The name of the run and of its folder; it ends with a hash of the configuration."),
    _text("name", "run", "comparison", "The name of the comparison, which is the name of its folder."),
    _text("status", "run", "status", "How the run ended: ok, oom, refused, timeout, error or interrupted."),
    _text("reason", "run", "reason", "Why the run is not ok; empty for a run that is."),
    _text("model", "model", "model", "The name of the model."),
    _count(
        "parameters",
        "model",
        "model parameters",
        "The number of parameters of the whole model.",
        short_title="parameters",
    ),
    _text("strategy", "layout", "strategy", "The name of the strategy, a file in conf/strategy."),
    _text("engine", "layout", "engine", "The engine that trains: torch, deepspeed, accelerate or nn_data_parallel."),
    _text("checkpointing", "options", "checkpointing", "The kind of activation checkpointing."),
    _text("precision", "options", "precision", "The precision: fp32, bf16_mixed, fp16_mixed or bf16."),
    _count("world_size", "layout", "ranks", "The number of ranks."),
    _count("dp_replicate", "layout", "dp_replicate", "The number of replicas of the sharded data-parallel group."),
    _count("dp_shard", "layout", "dp_shard", "The number of ranks that shard the state within a replica."),
    _count("tp", "layout", "tp", "The degree of tensor parallelism."),
    _count("cp", "layout", "cp", "The degree of context parallelism."),
    _count("pp", "layout", "pp", "The number of pipeline ranks."),
    _count(
        "zero_stage",
        "layout",
        "ZeRO",
        "What the sharded data-parallel axis divides: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.",
    ),
    _count("micro_batch", "batch", "micro-batch", "The sequences in one micro-batch of a data-parallel rank."),
    _count("grad_accumulation", "batch", "accumulation", "The micro-batches that a data-parallel rank runs per step."),
    _count(
        "global_batch", "batch", "global batch", "The sequences in one step of the whole world.", short_title="batch"
    ),
    _count("seq_len", "batch", "sequence length", "The tokens in one sequence.", short_title="seq_len"),
    _float(
        "tokens_per_second",
        "throughput",
        "tokens per second",
        "tokens per second",
        "The tokens that the whole world trains on per second, at the median step.",
        "median",
        "higher",
    ),
    _float(
        "tokens_per_second_per_device",
        "throughput",
        "tokens per second",
        "tokens per second and device",
        "The tokens per second over the number of devices.",
        "median",
        "higher",
    ),
    _seconds("step_seconds", "step time", "The median over timed steps of the whole step on its slowest rank."),
    _float(
        "mfu",
        "throughput",
        "fraction",
        "MFU",
        "The model's operations over the dense peak of all devices (arXiv 2204.02311, appendix B); empty where the peak"
        " is unknown, as on a CPU.",
        "median",
        "higher",
    ),
    _bytes(
        "peak_allocated_bytes",
        "peak memory",
        "The most bytes of tensors on any rank's device during the timed steps.",
    ),
    _bytes(
        "peak_reserved_bytes",
        "peak reserved",
        "The most bytes that torch's caching allocator took from any GPU; empty on a CPU.",
    ),
    _bytes("parameter_bytes", "parameters", "The bytes of parameters that a rank holds between steps."),
    _bytes(
        "gradient_bytes",
        "gradients",
        "The most bytes of gradients that a rank holds during a step; communication buckets are not counted.",
    ),
    _bytes(
        "optimizer_bytes",
        "optimizer state",
        "The bytes of optimizer state that a rank holds between steps, including fp32 master weights that are kept"
        " beside the parameters.",
    ),
    _bytes("activation_bytes", "activations", "The most bytes that a rank's device holds for backward during a step."),
    _bytes(
        "communication_bytes",
        "bytes sent",
        "The bytes that one rank must send in a step under ring algorithms; the record has them by operation and axis.",
        "bytes",
    ),
    _float("loss_first", "training", "", "first loss", "The mean loss of the first step."),
    _float("loss_last", "training", "", "last loss", "The mean loss of the last step."),
    _float(
        "loss_deviation",
        "training",
        "relative",
        "loss deviation",
        "The largest relative difference of any step's loss from the reference; empty with dropout.",
        "maximum",
        "lower",
    ),
    _float(
        "grad_deviation",
        "training",
        "relative",
        "gradient deviation",
        "The largest relative difference from the reference of the gradient norm at any step, or of any parameter's"
        " gradient at the first and last step; empty with dropout.",
        "maximum",
        "lower",
    ),
    _bytes(
        "predicted_peak_bytes",
        "predicted peak",
        "The peak memory that the cost model predicts, on a CPU with the copies that gloo makes in collectives; its"
        " error is that against `peak_allocated_bytes`, which gloo's threads raise where they free copies late. Empty"
        " for compiled layers.",
    ),
    _seconds("predicted_step_seconds", "predicted step time", "The step time that the cost model predicts."),
    _text("measured_on", "run", "device", "The device that the run was measured on, such as cpu or NVIDIA H200."),
    _text("launch", "run", "launch", "How ranks were launched, by the configuration's key of this name."),
    _bytes(
        "peak_requested_bytes",
        "peak requested",
        "The most bytes that tensors of a rank requested at once, without the rounding of a GPU's allocator.",
    ),
    _bytes(
        "peak_active_bytes",
        "peak active",
        "The most bytes in blocks of a GPU that were allocated, or freed and awaited by another stream; empty on a"
        " CPU.",
    ),
    _bytes(
        "peak_without_backend_bytes",
        "peak without the backend's copies",
        "The peak memory of a run on a CPU without the copies that gloo makes in collectives: how many exist at once"
        " depends on timing, and NCCL makes none; empty on a GPU.",
    ),
    _count("repeat", "run", "repeat", "Which repeat of the same configuration this run is, starting at 0."),
    _text("started_at", "run", "started", "When the run started, in ISO 8601 and UTC."),
    _float("duration_seconds", "run", "seconds", "duration", "The duration of the whole run, from start to end."),
    _float(
        "update_deviation",
        "training",
        "relative",
        "update deviation",
        "The largest relative difference from the reference of the norm of any matrix's first update; empty with"
        " dropout.",
        "maximum",
        "lower",
    ),
    _float(
        "loss_floor",
        "training",
        "relative",
        "loss floor",
        "The loss deviation of the reference's second training, which differs from its first in rounding only.",
        "maximum",
    ),
    _float(
        "grad_floor",
        "training",
        "relative",
        "gradient floor",
        "The gradient deviation of the reference's second training, which differs from its first in rounding only.",
        "maximum",
    ),
    _float(
        "update_floor",
        "training",
        "relative",
        "update floor",
        "The update deviation of the reference's second training, which differs from its first in rounding only.",
        "maximum",
    ),
    _count(
        "proven_steps",
        "training",
        "steps proven",
        "The number of steps from the first on that were compared with the reference; rounding alone may move later"
        " ones by more than a hundredth, so that they prove nothing.",
    ),
    _text(
        "reference",
        "training",
        "reference",
        "What the run was compared with, and how far back that reaches, or why it was compared with nothing.",
    ),
    _count(
        "reference_layers",
        "training",
        "layers compared",
        "The layers of the single process that the comparison goes back to; fewer than the model's where no single"
        " process fits.",
    ),
    _float(
        "reference_seconds",
        "training",
        "seconds",
        "duration of the reference",
        "The duration of the reference's run, and of those that prove its layout with fewer layers.",
    ),
    _count("peak_rank", "memory", "fullest rank", "The rank that has the highest peak_allocated_bytes."),
    _text(
        "stale_reason",
        "run",
        "stale",
        "Which versions of packages or of the harness differ from those installed when runs.csv was written.",
    ),
    _text(
        "machine",
        "run",
        "machine",
        "The machine that made the row: its GPUs, its processor and its cores; in runs.csv only.",
    ),
    _text(
        "versions",
        "run",
        "versions",
        "The versions of the packages and of the harness's sources that made the row; in runs.csv only.",
    ),
    _text("offload", "options", "offload", "Which model state strategy.offload keeps on the host."),
    _bytes(
        "offloaded_bytes",
        "state on the host",
        "The bytes of model state that a rank keeps on the host; empty on a CPU, whose memory is the host's.",
    ),
    _bool(
        "offload_activations",
        "options",
        "activation offload",
        "Whether the activations that layers save for backward are moved to the host.",
    ),
    _bytes(
        "offloaded_activation_bytes",
        "activations on the host",
        "The most bytes of activations that offload held on the host at once; on a GPU they are not part of"
        " activation_bytes.",
    ),
    _text("data_parallel", "layout", "data_parallel", "The implementation of data parallelism, such as ddp or fsdp."),
    _bool(
        "vocabulary_parallel",
        "layout",
        "vocabulary parallel",
        "Whether tensor parallelism shards the vocabulary; empty without tensor parallelism.",
    ),
    _bool(
        "sequence_parallel",
        "layout",
        "sequence parallel",
        "Whether tensor parallelism shards the sequence between layers; empty without tensor parallelism.",
    ),
    _text("schedule", "layout", "schedule", "The pipeline schedule; empty without a pipeline."),
    _count("virtual_stages", "layout", "virtual stages", "The pipeline stages per rank; empty without a pipeline."),
    _text("layers_per_stage", "layout", "layers per stage", "The layers of each pipeline stage, joined by hyphens."),
    _float(
        "pipeline_bubble",
        "time",
        "fraction",
        "bubble",
        "The idle time of a pipeline over its working time, of all stages together, as measured.",
        "median",
        "lower",
    ),
    _float(
        "pipeline_bubble_theory",
        "time",
        "fraction",
        "bubble in theory",
        "The idle time of a pipeline over its working time by the formula of the schedule's paper.",
        "",
        "lower",
    ),
    _count(
        "max_in_flight_micro_batches",
        "time",
        "micro-batches in flight",
        "The most forwards of a micro-batch through one stage whose backward was not finished, on any rank.",
        "maximum",
    ),
    _count(
        "skipped_steps",
        "training",
        "skipped steps",
        "The steps without an update because gradients overflowed under loss scaling.",
        "maximum",
        "lower",
    ),
    _text(
        "failed_in_phase",
        "outcome",
        "failed in",
        "The phase in which the run failed: that of the rank that failed first, else of the rank furthest behind.",
    ),
    _bytes(
        "last_seen_allocated_bytes",
        "last seen allocated",
        "The most bytes on a device that any rank of a failed run reported in its last heartbeat.",
        "outcome",
        "",
    ),
    _bytes(
        "last_seen_rss_bytes",
        "last seen resident",
        "The most resident bytes of a process that any rank of a failed run reported in its last heartbeat.",
        "outcome",
        "",
    ),
    _seconds("step_seconds_p95", "95th percentile of step time", "The 95th percentile of the timed steps."),
    _float(
        "step_seconds_iqr_ratio",
        "time",
        "fraction",
        "step time spread",
        "The interquartile range of the timed steps over their median; empty for fewer than four steps.",
        "",
        "lower",
    ),
    _text(
        "noise_warning",
        "time",
        "noise warning",
        "Why the times may differ from those on a quiet machine: a trend, other load, or lowered clocks; empty if there"
        " is no sign of it.",
    ),
    _seconds("data_seconds", "data", "The part of the median step, on its slowest rank, that loads the batch."),
    _seconds(
        "forward_seconds", "forward", "The part of the median step, on its slowest rank, that computes the forward."
    ),
    _seconds(
        "backward_seconds", "backward", "The part of the median step, on its slowest rank, that computes the backward."
    ),
    _seconds(
        "optimizer_seconds",
        "optimizer",
        "The part of the median step, on its slowest rank, that computes the gradient norm and the update.",
    ),
    _seconds(
        "exposed_communication_seconds",
        "exposed communication",
        "The part of the median step, on its slowest rank, that communicates while nothing is computed.",
    ),
    _seconds(
        "exposed_copy_seconds",
        "exposed copies",
        "The part of the median step, on its slowest rank, in which a GPU copies memory and neither computes nor"
        " communicates; on a CPU copies are operators, and it is 0.",
    ),
    _seconds(
        "idle_seconds",
        "idle",
        "The part of the median step, on its slowest rank, that waits for another pipeline stage, or on a GPU for any"
        " work.",
    ),
    _seconds(
        "other_seconds",
        "other",
        "The rest of the median step, on its slowest rank; with the parts above it adds up to step_seconds.",
    ),
    _seconds(
        "overlapped_communication_seconds",
        "overlapped communication",
        "The communication that is hidden behind computing, which is not part of the sum.",
        "",
    ),
    _count(
        "checkpointing_every",
        "options",
        "checkpointing every",
        "One of so many decoder layers is checkpointed; empty for 1.",
    ),
    _text(
        "saved_products",
        "options",
        "saved products",
        "Which products of a layer's projections checkpointing=selective saves, if not all of them: every_second.",
    ),
    _count("loss_chunks", "options", "loss chunks", "Into how many chunks the computation of the loss is split."),
    _bool("compile", "options", "compiled", "Whether the layers are compiled."),
    _text("attention", "options", "attention", "The attention that is configured: flash (a fused kernel) or eager."),
    _text("attention_kernel", "options", "attention kernel", "The attention kernel that was observed on all ranks."),
    _bool("fused_optimizer", "options", "fused optimizer", "Whether the optimizer's fused kernel is used."),
    _float("dropout", "options", "probability", "dropout", "The probability of dropout."),
    _count(
        "model_flops",
        "throughput",
        "model FLOPs",
        "The floating-point operations that the model needs in a step, over all ranks.",
    ),
    _count(
        "executed_flops",
        "throughput",
        "executed FLOPs",
        "The floating-point operations that ran in a step over all ranks, including those that checkpointing repeats.",
        better="lower",
    ),
    _float(
        "hfu",
        "throughput",
        "fraction",
        "HFU",
        "The operations that ran over the dense peak of all devices; empty where the peak is unknown, as on a CPU.",
        "median",
        "higher",
    ),
    _float(
        "model_flops_per_second_per_device",
        "throughput",
        "FLOPs per second",
        "model FLOPs per second and device",
        "The model's operations per second over the number of devices.",
        "median",
        "higher",
    ),
    _count(
        "num_alloc_retries",
        "memory",
        "allocation retries",
        "How often torch's caching allocator emptied its cache to serve a request, over all ranks; empty on a CPU.",
        "sum",
        "lower",
    ),
    _count(
        "num_ooms",
        "memory",
        "allocation failures",
        "How often torch's caching allocator could not serve a request, over all ranks; empty on a CPU.",
        "sum",
        "lower",
    ),
    _float(
        "cpu_seconds", "time", "seconds", "CPU time", "The processor time of all ranks in a step.", "median", "lower"
    ),
    _float(
        "joules_per_token",
        "throughput",
        "joules",
        "energy per token",
        "The energy of all devices per token; empty where NVML does not report it.",
        "median",
        "lower",
    ),
    _seconds(
        "predicted_communication_seconds",
        "predicted communication",
        "The exposed communication and the pipeline bubble of a step that the cost model predicts for a run with"
        " launch=virtual, which performs no collectives; empty where no cluster file describes the device.",
    ),
    _seconds(
        "estimated_step_seconds",
        "estimated step time",
        "The step time of a run with launch=virtual: what its rank did without collectives, as measured, and"
        " predicted_communication_seconds.",
    ),
    _bytes(
        "memory_limit_bytes",
        "memory limit",
        "What a rank may hold: cluster.memory_budget, else all memory of its GPU; empty on a CPU without a budget.",
        better="",
    ),
)

COLUMN_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS)

COLUMN_TYPES: dict[str, type] = {column.name: column.type for column in COLUMNS}

_BY_NAME = {column.name: column for column in COLUMNS}

# The columns of schema version 1 that have other names now.
RENAMED_COLUMNS: dict[str, str] = {
    "in_flight": "max_in_flight_micro_batches",
    "bubble": "pipeline_bubble",
    "bubble_formula": "pipeline_bubble_theory",
    "disturbed": "noise_warning",
    "stale": "stale_reason",
    "outside_bytes": "non_torch_bytes",
    "allocation_retries": "num_alloc_retries",
    "out_of_memory_errors": "num_ooms",
    "last_allocated_bytes": "last_seen_allocated_bytes",
    "last_host_bytes": "last_seen_rss_bytes",
    "peak_host_bytes": "peak_rss_bytes",
    "phase": "failed_in_phase",
    "hardware_flops": "executed_flops",
    "seconds": "duration_seconds",
    "step_seconds_spread": "step_seconds_iqr_ratio",
}


def column(name: str) -> Column:
    """Return a column of the registry. Raise KeyError if it has none of this name."""
    return _BY_NAME[name]


@functools.cache
def column_type(name: str) -> type | None:
    """Return the type of a column's values; None for an unregistered column that is not in bytes: it can have any."""
    return int if name.endswith("_bytes") else COLUMN_TYPES.get(name)


def columns_in(group: Group) -> tuple[Column, ...]:
    """Return the columns of one group, in order."""
    return tuple(entry for entry in COLUMNS if entry.group == group)


def columns_aggregated_by(aggregate: Aggregate) -> tuple[str, ...]:
    """Return the names of the columns that are aggregated in this way."""
    return tuple(entry.name for entry in COLUMNS if entry.aggregate == aggregate)


def with_current_names(row: Row) -> Row:
    """Return a row of schema version 1 with the columns' current names."""
    return {RENAMED_COLUMNS.get(name, name): value for name, value in row.items()}
