"""The registry of columns: name, type, unit, title, meaning and use of every column of runs.csv, in its order.

Reports, tables and the reference page docs/reference/columns.md take a column's facts from here. A row may have columns
of its own beyond these, such as at_peak_gradient_bytes: names that end in _bytes are whole numbers of bytes.
"""

import functools

from harness.records.column import (
    Aggregate,
    Column,
    Group,
    bool_column,
    bytes_column,
    count_column,
    float_column,
    seconds_column,
    text_column,
)

COLUMNS: tuple[Column, ...] = (
    text_column(
        "run_id", "run", "run", "The name of the run and of its folder; it ends with a hash of the configuration."
    ),
    text_column("name", "run", "comparison", "The name of the comparison, which is the name of its folder."),
    text_column("status", "run", "status", "How the run ended: ok, oom, refused, timeout, error or interrupted."),
    text_column("reason", "run", "reason", "Why the run is not ok; empty for a run that is."),
    text_column("model", "model", "model", "The name of the model."),
    count_column(
        "parameters",
        "model",
        "model parameters",
        "The number of parameters of the whole model.",
        short_title="parameters",
    ),
    text_column("strategy", "layout", "strategy", "The name of the strategy, a file in conf/strategy."),
    text_column(
        "engine", "layout", "engine", "The engine that trains: torch, deepspeed, accelerate or nn_data_parallel."
    ),
    text_column("checkpointing", "options", "checkpointing", "The kind of activation checkpointing."),
    text_column("precision", "options", "precision", "The precision: fp32, bf16_mixed, fp16_mixed or bf16."),
    count_column("world_size", "layout", "ranks", "The number of ranks."),
    count_column(
        "dp_replicate", "layout", "dp_replicate", "The number of replicas of the sharded data-parallel group."
    ),
    count_column("dp_shard", "layout", "dp_shard", "The number of ranks that shard the state within a replica."),
    count_column("tp", "layout", "tp", "The degree of tensor parallelism."),
    count_column("cp", "layout", "cp", "The degree of context parallelism."),
    count_column("pp", "layout", "pp", "The number of pipeline ranks."),
    count_column(
        "zero_stage",
        "layout",
        "ZeRO",
        "What the sharded data-parallel axis divides: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.",
    ),
    count_column("micro_batch", "batch", "micro-batch", "The sequences in one micro-batch of a data-parallel rank."),
    count_column(
        "grad_accumulation", "batch", "accumulation", "The micro-batches that a data-parallel rank runs per step."
    ),
    count_column(
        "global_batch", "batch", "global batch", "The sequences in one step of the whole world.", short_title="batch"
    ),
    count_column("seq_len", "batch", "sequence length", "The tokens in one sequence.", short_title="seq_len"),
    float_column(
        "tokens_per_second",
        "throughput",
        "tokens per second",
        "tokens per second",
        "The tokens that the whole world trains on per second, at the median step.",
        "median",
        "higher",
    ),
    float_column(
        "tokens_per_second_per_device",
        "throughput",
        "tokens per second",
        "tokens per second and device",
        "The tokens per second over the number of devices.",
        "median",
        "higher",
    ),
    seconds_column("step_seconds", "step time", "The median over timed steps of the whole step on its slowest rank."),
    float_column(
        "mfu",
        "throughput",
        "fraction",
        "MFU",
        "The model's operations over the dense peak of all devices (arXiv 2204.02311, appendix B); empty where the peak"
        " is unknown, as on a CPU.",
        "median",
        "higher",
    ),
    bytes_column(
        "peak_allocated_bytes",
        "peak memory",
        "The most bytes of tensors on any rank's device during the timed steps.",
    ),
    bytes_column(
        "peak_reserved_bytes",
        "peak reserved",
        "The most bytes that torch's caching allocator took from any GPU; empty on a CPU.",
    ),
    bytes_column("parameter_bytes", "parameters", "The bytes of parameters that a rank holds between steps."),
    bytes_column(
        "gradient_bytes",
        "gradients",
        "The most bytes of gradients that a rank holds during a step; communication buckets are not counted.",
    ),
    bytes_column(
        "optimizer_bytes",
        "optimizer state",
        "The bytes of optimizer state that a rank holds between steps, including fp32 master weights that are kept"
        " beside the parameters.",
    ),
    bytes_column(
        "activation_bytes", "activations", "The most bytes that a rank's device holds for backward during a step."
    ),
    bytes_column(
        "communication_bytes",
        "bytes sent",
        "The bytes that one rank must send in a step under ring algorithms; the record has them by operation and axis.",
        "bytes",
    ),
    float_column("loss_first", "training", "", "first loss", "The mean loss of the first step."),
    float_column("loss_last", "training", "", "last loss", "The mean loss of the last step."),
    float_column(
        "loss_deviation",
        "training",
        "relative",
        "loss deviation",
        "The largest relative difference of any step's loss from the reference; empty with dropout.",
        "maximum",
        "lower",
    ),
    float_column(
        "grad_deviation",
        "training",
        "relative",
        "gradient deviation",
        "The largest relative difference from the reference of the gradient norm at any step, or of any parameter's"
        " gradient at the first and last step; empty with dropout.",
        "maximum",
        "lower",
    ),
    bytes_column(
        "predicted_peak_bytes",
        "predicted peak",
        "The peak memory that the cost model predicts, on a CPU with the copies that gloo makes in collectives; its"
        " error is that against `peak_allocated_bytes`, which gloo's threads raise where they free copies late. Empty"
        " for compiled layers.",
    ),
    seconds_column("predicted_step_seconds", "predicted step time", "The step time that the cost model predicts."),
    text_column("measured_on", "run", "device", "The device that the run was measured on, such as cpu or NVIDIA H200."),
    text_column("launch", "run", "launch", "How ranks were launched, by the configuration's key of this name."),
    bytes_column(
        "peak_requested_bytes",
        "peak requested",
        "The most bytes that tensors of a rank requested at once, without the rounding of a GPU's allocator.",
    ),
    bytes_column(
        "peak_active_bytes",
        "peak active",
        "The most bytes in blocks of a GPU that were allocated, or freed and awaited by another stream; empty on a"
        " CPU.",
    ),
    bytes_column(
        "peak_without_backend_bytes",
        "peak without the backend's copies",
        "The peak memory of a run on a CPU without the copies that gloo makes in collectives: how many exist at once"
        " depends on timing, and NCCL makes none; empty on a GPU.",
    ),
    count_column("repeat", "run", "repeat", "Which repeat of the same configuration this run is, starting at 0."),
    text_column("started_at", "run", "started", "When the run started, in ISO 8601 and UTC."),
    float_column("duration_seconds", "run", "seconds", "duration", "The duration of the whole run, from start to end."),
    float_column(
        "update_deviation",
        "training",
        "relative",
        "update deviation",
        "The largest relative difference from the reference of the norm of any matrix's first update; empty with"
        " dropout.",
        "maximum",
        "lower",
    ),
    float_column(
        "loss_floor",
        "training",
        "relative",
        "loss floor",
        "The loss deviation of the reference's second training, which differs from its first in rounding only.",
        "maximum",
    ),
    float_column(
        "grad_floor",
        "training",
        "relative",
        "gradient floor",
        "The gradient deviation of the reference's second training, which differs from its first in rounding only.",
        "maximum",
    ),
    float_column(
        "update_floor",
        "training",
        "relative",
        "update floor",
        "The update deviation of the reference's second training, which differs from its first in rounding only.",
        "maximum",
    ),
    count_column(
        "proven_steps",
        "training",
        "steps proven",
        "The number of steps from the first on that were compared with the reference; rounding alone may move later"
        " ones by more than a hundredth, so that they prove nothing.",
    ),
    text_column(
        "reference",
        "training",
        "reference",
        "What the run was compared with, and how far back that reaches, or why it was compared with nothing.",
    ),
    count_column(
        "reference_layers",
        "training",
        "layers compared",
        "The layers of the single process that the comparison goes back to; fewer than the model's where no single"
        " process fits.",
    ),
    float_column(
        "reference_seconds",
        "training",
        "seconds",
        "duration of the reference",
        "The duration of the reference's run, and of those that prove its layout with fewer layers.",
    ),
    count_column("peak_rank", "memory", "fullest rank", "The rank that has the highest peak_allocated_bytes."),
    text_column(
        "stale_reason",
        "run",
        "stale",
        "Which versions of packages or of the harness differ from those installed when runs.csv was written.",
    ),
    text_column(
        "machine",
        "run",
        "machine",
        "The machine that made the row: its GPUs, its processor and its cores; in runs.csv only.",
    ),
    text_column(
        "versions",
        "run",
        "versions",
        "The versions of the packages and of the harness's sources that made the row; in runs.csv only.",
    ),
    text_column("offload", "options", "offload", "Which model state strategy.offload keeps on the host."),
    bytes_column(
        "offloaded_bytes",
        "state on the host",
        "The bytes of model state that a rank keeps on the host; empty on a CPU, whose memory is the host's.",
    ),
    bool_column(
        "offload_activations",
        "options",
        "activation offload",
        "Whether the activations that layers save for backward are moved to the host.",
    ),
    bytes_column(
        "offloaded_activation_bytes",
        "activations on the host",
        "The most bytes of activations that offload held on the host at once; on a GPU they are not part of"
        " activation_bytes.",
    ),
    text_column(
        "data_parallel", "layout", "data_parallel", "The implementation of data parallelism, such as ddp or fsdp."
    ),
    bool_column(
        "vocabulary_parallel",
        "layout",
        "vocabulary parallel",
        "Whether tensor parallelism shards the vocabulary; empty without tensor parallelism.",
    ),
    bool_column(
        "sequence_parallel",
        "layout",
        "sequence parallel",
        "Whether tensor parallelism shards the sequence between layers; empty without tensor parallelism.",
    ),
    text_column("schedule", "layout", "schedule", "The pipeline schedule; empty without a pipeline."),
    count_column(
        "virtual_stages", "layout", "virtual stages", "The pipeline stages per rank; empty without a pipeline."
    ),
    text_column(
        "layers_per_stage", "layout", "layers per stage", "The layers of each pipeline stage, joined by hyphens."
    ),
    float_column(
        "pipeline_bubble",
        "time",
        "fraction",
        "bubble",
        "The idle time of a pipeline over its working time, of all stages together, as measured.",
        "median",
        "lower",
    ),
    float_column(
        "pipeline_bubble_theory",
        "time",
        "fraction",
        "bubble in theory",
        "The idle time of a pipeline over its working time by the formula of the schedule's paper.",
        "",
        "lower",
    ),
    count_column(
        "max_in_flight_micro_batches",
        "time",
        "micro-batches in flight",
        "The most forwards of a micro-batch through one stage whose backward was not finished, on any rank.",
        "maximum",
    ),
    count_column(
        "skipped_steps",
        "training",
        "skipped steps",
        "The steps without an update because gradients overflowed under loss scaling.",
        "maximum",
        "lower",
    ),
    text_column(
        "failed_in_phase",
        "outcome",
        "failed in",
        "The phase in which the run failed: that of the rank that failed first, else of the rank furthest behind.",
    ),
    bytes_column(
        "last_seen_allocated_bytes",
        "last seen allocated",
        "The most bytes on a device that any rank of a failed run reported in its last heartbeat.",
        "outcome",
        "",
    ),
    bytes_column(
        "last_seen_rss_bytes",
        "last seen resident",
        "The most resident bytes of a process that any rank of a failed run reported in its last heartbeat.",
        "outcome",
        "",
    ),
    seconds_column("step_seconds_p95", "95th percentile of step time", "The 95th percentile of the timed steps."),
    float_column(
        "step_seconds_iqr_ratio",
        "time",
        "fraction",
        "step time spread",
        "The interquartile range of the timed steps over their median; empty for fewer than four steps.",
        "",
        "lower",
    ),
    text_column(
        "noise_warning",
        "time",
        "noise warning",
        "Why the times may differ from those on a quiet machine: a trend, other load, or lowered clocks; empty if there"
        " is no sign of it.",
    ),
    seconds_column("data_seconds", "data", "The part of the median step, on its slowest rank, that loads the batch."),
    seconds_column(
        "forward_seconds", "forward", "The part of the median step, on its slowest rank, that computes the forward."
    ),
    seconds_column(
        "backward_seconds", "backward", "The part of the median step, on its slowest rank, that computes the backward."
    ),
    seconds_column(
        "optimizer_seconds",
        "optimizer",
        "The part of the median step, on its slowest rank, that computes the gradient norm and the update.",
    ),
    seconds_column(
        "exposed_communication_seconds",
        "exposed communication",
        "The part of the median step, on its slowest rank, that communicates while nothing is computed.",
    ),
    seconds_column(
        "exposed_copy_seconds",
        "exposed copies",
        "The part of the median step, on its slowest rank, in which a GPU copies memory and neither computes nor"
        " communicates; on a CPU copies are operators, and it is 0.",
    ),
    seconds_column(
        "idle_seconds",
        "idle",
        "The part of the median step, on its slowest rank, that waits for another pipeline stage, or on a GPU for any"
        " work.",
    ),
    seconds_column(
        "other_seconds",
        "other",
        "The rest of the median step, on its slowest rank; with the parts above it adds up to step_seconds.",
    ),
    seconds_column(
        "overlapped_communication_seconds",
        "overlapped communication",
        "The communication that is hidden behind computing, which is not part of the sum.",
        "",
    ),
    count_column(
        "checkpointing_every",
        "options",
        "checkpointing every",
        "One of so many decoder layers is checkpointed; empty for 1.",
    ),
    text_column(
        "saved_products",
        "options",
        "saved products",
        "Which products of a layer's projections checkpointing=selective saves, if not all of them: every_second.",
    ),
    count_column("loss_chunks", "options", "loss chunks", "Into how many chunks the computation of the loss is split."),
    bool_column("compile", "options", "compiled", "Whether the layers are compiled."),
    text_column(
        "attention", "options", "attention", "The attention that is configured: flash (a fused kernel) or eager."
    ),
    text_column(
        "attention_kernel", "options", "attention kernel", "The attention kernel that was observed on all ranks."
    ),
    bool_column("fused_optimizer", "options", "fused optimizer", "Whether the optimizer's fused kernel is used."),
    float_column("dropout", "options", "probability", "dropout", "The probability of dropout."),
    float_column(
        "model_flops",
        "throughput",
        "FLOPs",
        "model FLOPs",
        "The floating-point operations that the model needs in a step, over all ranks.",
    ),
    float_column(
        "executed_flops",
        "throughput",
        "FLOPs",
        "executed FLOPs",
        "The floating-point operations that ran in a step over all ranks, including those that checkpointing repeats.",
        better="lower",
    ),
    float_column(
        "hfu",
        "throughput",
        "fraction",
        "HFU",
        "The operations that ran over the dense peak of all devices; empty where the peak is unknown, as on a CPU.",
        "median",
        "higher",
    ),
    float_column(
        "model_flops_per_second_per_device",
        "throughput",
        "FLOPs per second",
        "model FLOPs per second and device",
        "The model's operations per second over the number of devices.",
        "median",
        "higher",
    ),
    count_column(
        "num_alloc_retries",
        "memory",
        "allocation retries",
        "How often torch's caching allocator emptied its cache to serve a request, over all ranks; empty on a CPU.",
        "sum",
        "lower",
    ),
    count_column(
        "num_ooms",
        "memory",
        "allocation failures",
        "How often torch's caching allocator could not serve a request, over all ranks; empty on a CPU.",
        "sum",
        "lower",
    ),
    float_column(
        "cpu_seconds", "time", "seconds", "CPU time", "The processor time of all ranks in a step.", "median", "lower"
    ),
    float_column(
        "joules_per_token",
        "throughput",
        "joules",
        "energy per token",
        "The energy of all devices per token; empty where NVML does not report it.",
        "median",
        "lower",
    ),
    seconds_column(
        "predicted_communication_seconds",
        "predicted communication",
        "The exposed communication and the pipeline bubble of a step that the cost model predicts for a run with"
        " launch=virtual, which performs no collectives; empty where no cluster file describes the device.",
    ),
    seconds_column(
        "estimated_step_seconds",
        "estimated step time",
        "The step time of a run with launch=virtual: what its rank did without collectives, as measured, and"
        " predicted_communication_seconds.",
    ),
    bytes_column(
        "memory_limit_bytes",
        "memory limit",
        "What a rank may hold: cluster.memory_budget, else all memory of its GPU; empty on a CPU without a budget.",
        better="",
    ),
)

COLUMN_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS)

COLUMN_TYPES: dict[str, type] = {column.name: column.type for column in COLUMNS}

_BY_NAME = {column.name: column for column in COLUMNS}


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
