"""The report that every rank writes when it ends: what it measured, or why it failed."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Self, get_args

from harness.records.evidence import CheckpointReport, DrawnMasks, StartUp, UpdateExcess, UpdateReport, read_tuple
from harness.util.files import JsonObject

LaunchStatus = Literal["ok", "oom", "error", "timeout", "interrupted"]
RunStatus = Literal["ok", "oom", "refused", "timeout", "error", "interrupted"]
STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)

# What a block of memory can be used for. Where several claim a block, the first of these counts. "gathered" is a
# parameter made whole for compute, "communication" a buffer of a collective, "temporary" whatever nothing else claims.
MEMORY_ROLES = ("parameter", "optimizer", "gradient", "gathered", "activation", "communication", "temporary")
OUTSIDE_PHASES = "rest"  # the name for the time of a step outside its phases
COMPOSED = "composed"  # attention composed of matrix products and a softmax: torch's math, or the model's own
FUSED_KERNELS = ("flash", "cudnn", "efficient")  # attention kernels that do not materialize the scores


Box = tuple[tuple[int, int], ...]  # (start, stop) along each dimension of a whole tensor


class TensorFingerprint(NamedTuple):
    """A rank's shard of a tensor, reduced to two numbers. NaN is None after it was written to a file."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    square: float | None  # sum of squares
    projection: float | None  # inner product with the parameter's random vector of unit variance


class StateShard(NamedTuple):
    """A rank's shard of a parameter, gradient or optimizer state, without its values."""

    name: str
    state_name: str  # which optimizer state it is; empty for the values themselves
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    dtype: str


def tensors(cls: Callable[..., NamedTuple]) -> Any:
    """Return a field of fingerprints or shards, which a rank's file has as arrays, because there are many."""
    return field(default=(), metadata={"read": lambda entries: [read_tuple(cls, entry) for entry in entries]})


# The keys of attributes in a rank's file where these are others.
FILE_KEYS = {
    "peak_rss_bytes": "peak_host_bytes",
    "gradient_bytes_by_device": "placed_gradients",
    "max_in_flight_micro_batches": "in_flight",
    "host_usage": "used",
    "time_breakdown": "traced",
    "non_torch_bytes": "outside_bytes",
    "num_alloc_retries": "allocation_retries",
    "num_ooms": "out_of_memory_errors",
    "dropout_seed": "masks_seed",
    "dropout_rng_ranks": "masks_ranks",
    "host_state": "on_host",
    "state_bytes_by_device": "placed",
    "parameter_shards": "parameters",
    "optimizer_shards": "optimizer",
    "rss_bytes": "host_bytes",
}


class FromJson:
    """A frozen dataclass that is read from JSON: unknown keys are ignored, and missing ones leave the default."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build the dataclass from the values of a file."""
        known: dict[str, Any] = {}
        for entry in dataclasses.fields(cls):  # type: ignore[arg-type]
            value = values.get(FILE_KEYS.get(entry.name, entry.name))
            if value is not None:
                read = entry.metadata.get("read")
                known[entry.name] = read(value) if read else value
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class TrainingReport(FromJson):
    """The evidence of what one rank trained, by which two trainings are compared.

    Losses and gradient norms cover every step, and are None where they are not finite. The first gradients, moments and
    updates are those of the first step whose gradients did not overflow.
    """

    losses: Sequence[float | None] = ()
    grad_norms: Sequence[float | None] = ()
    skipped_steps: int = 0  # because gradients overflowed
    first_gradients: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
    first_moments: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
    # The differences between the parameters, or their masters, after the first update and the initial weights.
    first_updates: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
    last_gradients: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
    # The sum of squares of each of first_gradients in every step; none where they lie on the host.
    gradient_squares: Sequence[Sequence[float | None]] = ()
    worst_first_update: UpdateExcess = field(
        default=UpdateExcess(), metadata={"read": partial(read_tuple, UpdateExcess)}
    )
    after_first_update: UpdateReport = field(
        default=UpdateReport(), metadata={"read": partial(read_tuple, UpdateReport)}
    )


@dataclass(frozen=True)
class PeakPart(FromJson):
    """The bytes of one role at the peak; `what` is the kind of buffer, or the operator that made a temporary."""

    role: str
    what: str
    bytes: int


@dataclass(frozen=True)
class PhaseShare(FromJson):
    """The duration of one phase of a step, and how long it communicated, waited or copied without computing."""

    seconds: float
    exposed_seconds: float
    waiting_seconds: float  # for messages on a CPU, for any work on a GPU
    copy_seconds: float = 0.0  # copies of a GPU during which it neither computed nor communicated


@dataclass(frozen=True)
class TimeBreakdown(FromJson):
    """The durations of the traced steps together; the phases and the time outside of them add up to `seconds`."""

    seconds: float
    phases: Mapping[str, PhaseShare] = field(
        metadata={"read": lambda phases: {name: PhaseShare.from_json(share) for name, share in phases.items()}}
    )
    overlapped_seconds: float  # of collectives that ran while something was computed


@dataclass(frozen=True)
class Traffic(FromJson):
    """The data that a rank must send in one kind of operation within one group of global ranks.

    `sizes` maps the bytes S that a call moved in all to the number of such calls. `purpose` is LAYOUT, or the function
    that sent scalars beside the layout's own communication.
    """

    operation: str = ""
    group_ranks: Sequence[int] = ()
    dtype: str = ""
    purpose: str = ""
    bytes_sent: float = 0.0
    count: int = 0
    sizes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AtPeak(FromJson):
    """The contents of memory when it was fullest; the parts add up to `bytes`, as torch requested them."""

    phase: str = ""
    bytes: int = 0
    parts: Sequence[PeakPart] = field(
        default=(), metadata={"read": lambda parts: [PeakPart.from_json(part) for part in parts]}
    )


@dataclass(frozen=True)
class HostUsage(FromJson):
    """The use of a machine during the timed steps, as one rank sees it. None is unknown."""

    pid: int = 0
    host: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process: all threads, in user and system mode
    helper_cpu_seconds: float = 0.0  # of the processes that started this one and watch it
    cores: int = 0  # available to this process
    core_seconds: float = 0.0  # of these cores, busy, idle or stolen; by the same clock as the next two
    busy_seconds: float = 0.0  # of these cores in user and system mode, for any process of this machine
    stolen_seconds: float | None = None  # of these cores, given to other virtual machines; known on Linux only
    peak_rss_bytes: int | None = None  # shared pages included
    energy_joules: float | None = None  # of this rank's devices; unknown for steps that are too short to measure
    clocks_lowered: list[str] | None = None  # reasons: "power limit", "heat", "power brake", "hardware"
    device_pids: list[int] | None = None  # processes on this rank's devices, this process included


@dataclass(frozen=True)
class ProfiledStep(FromJson):
    """The measurements of the one step in which every operator is observed."""

    gradient_bytes: int = 0  # the most during the step
    gradient_bytes_by_device: Mapping[str, int] = field(default_factory=dict)
    gradient_dtypes: Sequence[str] = ()  # of the reduced gradients
    activation_bytes: int = 0  # the most saved for backward during the step, on the device
    offloaded_activation_bytes: int = 0  # the most that activation offload had on the host
    recomputations: int = 0  # second forwards of checkpointed parts
    max_in_flight_micro_batches: int = 0  # whose backward was not finished
    split_backwards: int = 0  # backwards whose first half, for inputs, left the gradients of weights alone
    flops: int = 0  # of matrix products and attention, second forwards included
    scaled_flops: Mapping[str, int] = field(default_factory=dict)  # of these, those of scaled matrices, by recipe
    # The smallest of the shares of its dtype's range that scaled matrices fill; None where none has values.
    least_scaled_range: float | None = None
    peak_allocated_bytes: int | None = None
    at_peak: AtPeak | None = field(default=None, metadata={"read": AtPeak.from_json})  # None: not counted
    peak_without_backend_bytes: int | None = None  # of the timed steps, without the copies that gloo makes
    communication: Sequence[Traffic] = field(
        default=(), metadata={"read": lambda sent: [Traffic.from_json(entry) for entry in sent]}
    )
    attention_kernels: Sequence[str] = ()
    optimizers: Sequence[str] = ()  # implementations of the optimizer's step
    layers_compiled: bool = False  # whether none of a layer's activation functions ran as an operator
    masks: DrawnMasks = field(default=DrawnMasks(), metadata={"read": partial(read_tuple, DrawnMasks)})


@dataclass(frozen=True)
class SimulatedTime(FromJson):
    """The time of a simulated step by the figures of its cluster; computing, exposed, copies and idle add up to it."""

    step_seconds: float = 0.0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)  # of computing
    exposed_seconds: Mapping[str, float] = field(default_factory=dict)  # of communication, by axes of the mesh
    overlapped_seconds: float = 0.0  # of communication beside computing
    copy_seconds: float = 0.0  # between device and host, beside nothing else
    idle_seconds: float = 0.0
    bubble_seconds: float = 0.0  # of idle_seconds, those in which a pipeline stage waits for others
    bubble_is_planned: bool = False  # by the schedule's formula, where the other stages were not simulated
    operator_seconds: Mapping[str, float] = field(default_factory=dict)  # of kernels, by phase and operator
    communication_operators: Sequence[str] = ()  # the keys of operator_seconds that are of collectives and transfers
    launches: int = 0  # of kernels by the host


@dataclass(frozen=True)
class RankReport(TrainingReport):
    """Everything that one rank reports of itself; the file of a failed rank has the last group of fields only.

    Seconds cover the timed steps: whole steps, with their data. Shards are those that exist between steps.
    """

    rank: int = 0
    host: str = ""
    pid: int = 0
    status: Literal["", "ok", "oom", "error"] = ""  # "" for a rank that has reported nothing yet
    cores: Sequence[int] = ()

    step_seconds: Sequence[float] = ()
    phase_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    host_usage: HostUsage = field(default=HostUsage(), metadata={"read": HostUsage.from_json})
    last_parameters: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
    last_masters: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
    after_last_update: UpdateReport = field(
        default=UpdateReport(), metadata={"read": partial(read_tuple, UpdateReport)}
    )
    graphs_in_timed_steps: int = 0  # compiled during these steps
    time_breakdown: TimeBreakdown | None = field(default=None, metadata={"read": TimeBreakdown.from_json})
    trace_problem: str = ""  # why there is no breakdown
    profiled: ProfiledStep = field(default=ProfiledStep(), metadata={"read": ProfiledStep.from_json})
    # How many of this rank's tokens went to each expert in the profiled step, by the layer's index.
    expert_tokens: Sequence[tuple[int, Sequence[int]]] = ()
    peak_allocated_bytes: int | None = None  # in the timed steps, like the next six fields
    peak_requested_bytes: int | None = None
    peak_active_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    non_torch_bytes: int | None = None
    num_alloc_retries: int | None = None
    num_ooms: int | None = None
    devices: int = 1  # driven by this process
    device_name: str = ""
    start_up: StartUp = field(default=StartUp(), metadata={"read": partial(read_tuple, StartUp)})
    checkpoint: CheckpointReport | None = field(default=None, metadata={"read": partial(read_tuple, CheckpointReport)})
    start_peak_bytes: int | None = None  # the most while the engine was built
    dropout_seed: int | None = None
    dropout_rng_ranks: Sequence[int | None] = ()
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    host_state: Sequence[str] = ()  # kinds of state offloaded to the host
    state_bytes_by_device: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parameter_shards: Sequence[StateShard] = tensors(StateShard)
    optimizer_shards: Sequence[StateShard] = tensors(StateShard)
    simulated_time: SimulatedTime | None = field(default=None, metadata={"read": SimulatedTime.from_json})
    # The second training of a reference, which differs from the first in rounding only; None for other runs.
    perturbed: TrainingReport | None = field(default=None, metadata={"read": TrainingReport.from_json})

    phase: str = ""  # a failed rank's last phase; step and memory follow
    step: int = 0
    allocated_bytes: int | None = None
    rss_bytes: int | None = None
    error: str = ""  # the exception's class
    reason: str = ""
    traceback: str = ""

    def to_json(self) -> JsonObject:
        """Return the plain values that the rank's file has: the measurements of an ok rank, the failure of others."""
        values: JsonObject = dataclasses.asdict(
            self, dict_factory=lambda entries: {FILE_KEYS.get(name, name): value for name, value in entries}
        )
        left_out = _OF_FAILED_RANKS if self.status == "ok" else values.keys() - _IDENTIFYING - _OF_FAILED_RANKS
        return {key: value for key, value in values.items() if key not in left_out}


_IDENTIFYING = {"rank", "host", "pid", "status", "cores"}
_OF_FAILED_RANKS = {"phase", "step", "allocated_bytes", "host_bytes", "error", "reason", "traceback"}

# The keys of the file whose values only the proof reads; they are too long for the run's record.
LONG_KEYS = (
    *("parameters", "optimizer", "first_gradients", "first_moments", "first_updates", "last_gradients"),
    *("expert_tokens", "gradient_squares", "last_parameters", "last_masters", "perturbed", "phase_seconds"),
    *("checkpoint", "traceback"),
)


def to_record_entry(report: RankReport) -> JsonObject:
    """Return the part of a rank's report that the run's record has."""
    return {key: value for key, value in report.to_json().items() if key not in LONG_KEYS}
