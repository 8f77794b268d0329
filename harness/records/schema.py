"""A run proves itself, from what its ranks wrote down: the layout it ran, the work it did, what it trained."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Rank = dict[str, Any]  # a rank file

Box = tuple[tuple[int, int], ...]

# What a block can be, the claim that counts first. gathered: parameters made whole for compute. communication: packed
# for the wire, or come from it. temporary: whatever no one claims.
MEMORY_ROLES = ("parameter", "optimizer", "gradient", "gathered", "activation", "communication", "temporary")

Record = dict[str, Any]

Row = dict[str, Any]

SCHEMA_VERSION = 1

STATUSES = ("ok", "oom", "refused", "timeout", "error", "interrupted")

# The columns of runs.csv in order, with the type of their values. Bytes, counts and degrees are whole numbers.
COLUMN_TYPES: Mapping[str, type] = (
    dict.fromkeys(("run_id", "name", "status", "reason", "model"), str)
    | {"parameters": int}
    | dict.fromkeys(("strategy", "engine", "checkpointing", "precision"), str)
    | dict.fromkeys(("world_size", "dp_replicate", "dp_shard", "tp", "cp", "pp", "zero_stage"), int)
    | dict.fromkeys(("micro_batch", "grad_accumulation", "global_batch", "seq_len"), int)
    | dict.fromkeys(("tokens_per_second", "tokens_per_second_per_device", "step_seconds", "mfu"), float)
    | dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"), int)
    | dict.fromkeys(("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"), int)
    | {"communication_bytes": int}
    | dict.fromkeys(("loss_first", "loss_last", "loss_deviation", "grad_deviation"), float)
    | {"predicted_peak_bytes": int, "predicted_step_seconds": float, "measured_on": str, "launch": str}
    # Beyond the columns promised to readers of the file. started_at: ISO 8601, UTC. peak_rank: the rank of
    # peak_allocated_bytes. seconds: the run from start to end. stale: filled when runs.csv is built.
    | {"repeat": int, "started_at": str, "seconds": float, "peak_rank": int, "stale": str}
    # What lies on the host: as asked, and bytes of model state there where the device has a memory of its own.
    | {"offload": str, "offloaded_bytes": int, "offload_activations": bool, "offloaded_activation_bytes": int}
    # By which means, and what tensor parallelism cuts.
    | {"data_parallel": str, "vocabulary_parallel": bool}
    # Of pipelines: idle over working time of all stages, and the papers'; the most passes in flight on a rank.
    | {"sequence_parallel": bool, "schedule": str, "virtual_stages": int, "layers_per_stage": str}
    | {"bubble": float, "bubble_formula": float, "in_flight": int}
    # Steps left out because a gradient overflowed, where the loss is scaled.
    | {"skipped_steps": int}
    # Where a run that is not ok ended, and the most that a rank said last it held.
    | {"phase": str, "last_allocated_bytes": int, "last_host_bytes": int}
    # Time: quantiles and spread (interquartile range over median) of the timed steps; of the median step the parts,
    # which add up to it, and what was hidden behind computing. disturbed: empty, or what disturbed the run.
    | {"step_seconds_p95": float, "step_seconds_spread": float, "disturbed": str}
    | dict.fromkeys(("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"), float)
    | dict.fromkeys(("exposed_communication_seconds", "idle_seconds", "other_seconds"), float)
    | {"overlapped_communication_seconds": float}
    # What is computed when, and by which implementations: attention's as it was heard on all ranks.
    | {"checkpointing_every": int, "loss_chunks": int, "compile": bool}
    | {"attention": str, "attention_kernel": str, "fused_optimizer": bool, "dropout": float}
    # Operations of a step over all ranks: the model's, without what is run again, and those that ran.
    | {"model_flops": int, "hardware_flops": int, "hfu": float, "model_flops_per_second_per_device": float}
    # Memory beyond tensors, and what the host gave.
    | {"allocation_retries": int, "out_of_memory_errors": int, "cpu_seconds": float, "joules_per_token": float}
    # What a rank could hold: its budget, else all of its GPU's memory.
    | {"memory_limit_bytes": int}
)

COLUMNS = tuple(COLUMN_TYPES)


@functools.cache
def column_type(column: str) -> type | None:
    """The type of a column's values: a row's own columns have any, except that bytes are whole numbers."""
    return int if column.endswith("_bytes") else COLUMN_TYPES.get(column)


@dataclass(frozen=True)
class Traffic:
    """What one rank must send in one kind of operation within one group of global ranks.

    `sizes` has the number of calls by the bytes S that each moved in all, `purpose` is LAYOUT or who sent scalars.
    """

    operation: str
    group_ranks: tuple[int, ...]
    dtype: str
    purpose: str
    bytes_sent: float
    count: int
    sizes: dict[int, int]


class TensorFingerprint(NamedTuple):
    """One rank's share of one parameter's gradient."""

    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    square: float  # sum of squares
    projection: float  # product with the parameter's random vector of unit variance


COMPOSED = "composed"  # of products and a softmax: torch's math, or the model's own


class AtPeak(NamedTuple):
    """When memory was fullest, and what filled it; the parts add up to `bytes`, as torch requested them."""

    phase: str
    bytes: int
    parts: tuple[dict[str, Any], ...]  # role, what, bytes


class ProfiledStep(NamedTuple):
    gradients: list[TensorFingerprint]
    gradient_bytes: int  # the most held during the step
    placed_gradients: dict[str, int]  # bytes of the reduced ones by kind of device
    gradient_dtypes: tuple[str, ...]  # of the reduced ones
    activation_bytes: int  # the most held for backward during the step, on the device
    offloaded_activation_bytes: int  # the most that activation offload held on the host
    recomputations: int  # second forwards of checkpointed parts
    in_flight: int  # the most forwards whose backward was not finished
    split_backwards: int  # whose first half, for inputs, left the gradients of weights alone
    flops: int  # of matrix products and attention, second forwards included
    peak_allocated_bytes: int | None
    at_peak: AtPeak | None  # None where memory is not counted
    communication: tuple[Traffic, ...]
    attention_kernels: tuple[str, ...]
    optimizers: tuple[str, ...]  # implementations of its step
    layers_compiled: bool  # none of a layer's activation functions ran as an operator


OUTSIDE_PHASES = "rest"  # of a step, outside its phases


FUSED_KERNELS = ("flash", "cudnn", "efficient")  # attention kernels that keep no scores
