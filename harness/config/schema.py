"""Every configuration group as a frozen, validated dataclass."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.architecture import ARCHITECTURES, Architecture
from harness.config.byte_size import parse_bytes
from harness.config.hf_model_info import HFModelInfo
from harness.config.validation import divisors_text, require, require_one_of, require_positive


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a transformer under the keys of a Hugging Face config.json."""

    name: str
    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    context_length: int
    parameters: int  # as stated by the YAML for its own sizes; tests compute it
    source: str
    attention: str = "flash"
    dropout: float = 0.0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5  # llama's
    layer_norm_epsilon: float = 1e-5  # gpt's
    initializer_range: float = 0.02
    path: str | None = None  # hf's: where its configuration was found
    asked: HFModelInfo | None = None  # hf's: what it says of itself

    def __post_init__(self) -> None:
        require_one_of("model.family", self.family, (*ARCHITECTURES, "hf"))
        require_one_of("model.attention", self.attention, ("flash", "eager"))
        require_positive(
            "model", self, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
        )
        require_positive("model", self, "intermediate_size", "vocab_size", "context_length")
        if self.asked is not None:  # the library built it
            return
        if self.architecture.dropout:
            require(0 <= self.dropout < 1, "model.dropout", self.dropout, "is not a share: choose 0 or more, below 1")
        else:
            rule = f"is not part of the {self.family} family: choose 0"
            require(self.dropout == 0, "model.dropout", self.dropout, rule)
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        unit, even = (
            (heads, "equal") if self.architecture.learned_positions else (2 * heads, "even")
        )  # rotary pairs halves
        require(
            self.hidden_size % unit == 0,
            "model.hidden_size",
            self.hidden_size,
            f"does not give model.num_attention_heads={heads} heads of {even} size: choose a multiple of {unit}",
        )
        require(
            heads % groups == 0,
            "model.num_key_value_heads",
            groups,
            f"does not divide model.num_attention_heads={heads}: choose {divisors_text(heads)}",
        )

    @property
    def architecture(self) -> Architecture:
        """What its blocks are made of; a model that was asked is not known that well."""
        return ARCHITECTURES[self.family]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class StrategyConfig:
    """One strategy as asked for; -1 stands for whatever is left of the world. Resolved by harness.layout."""

    name: str  # what rows are called
    engine: str = "torch"  # the library that trains: a module of harness/engines
    data_parallel: str = "none"  # PyTorch's means: none, ddp (DistributedDataParallel), fsdp (fully_shard)
    zero_stage: int = 0  # what dp_shard divides: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters
    dp_replicate: int = 1  # copies of the model, or of the group that shards it (hybrid sharding)
    dp_shard: int = 1  # ranks over which the stage divides; the data degree is dp_replicate x dp_shard
    tp: int = 1  # ranks that cut every matrix (tensor parallelism)
    sequence_parallel: bool = False  # whether tp cuts the residual stream too, along the sequence
    vocabulary_parallel: bool = True  # whether tp cuts embedding and head too, or leaves them whole on every rank
    cp: int = 1  # ranks that share every sequence (context parallelism)
    pp: int = 1  # ranks that share the depth (pipeline parallelism)
    schedule: str = "1f1b"  # of the pipeline: gpipe, 1f1b, interleaved_1f1b, zero_bubble
    virtual_stages: int = 1  # stages a rank holds, for schedules that interleave them
    layers_per_stage: tuple[int, ...] | None = None  # in the order of stages; null: parameters spread evenly
    offload: str = "none"  # to the host: none, optimizer (and the gradients it reads), parameters (and all of these)
    literature: bool = True  # whether the papers' volume and shares are claimed: a run that has others is an error
    options: dict[str, Any] = field(default_factory=dict)  # the engine's own settings, passed on as they are

    def __post_init__(self) -> None:
        require_one_of("strategy.data_parallel", self.data_parallel, ("none", "ddp", "fsdp"))
        require_one_of("strategy.zero_stage", self.zero_stage, (0, 1, 2, 3))
        require_one_of("strategy.schedule", self.schedule, ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"))
        require_one_of("strategy.offload", self.offload, ("none", "optimizer", "parameters"))
        require_positive("strategy", self, "virtual_stages")
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
            degree = getattr(self, axis)
            rule = "is not a degree: choose 1 or more, or -1 for whatever is left of the world"
            require(degree == -1 or degree >= 1, f"strategy.{axis}", degree, rule)


RECOMPUTING_MODES = ("full", "every_n", "selective")  # the kinds of checkpointing that call a layer a second time


@dataclass(frozen=True)
class CheckpointingConfig:
    """What of a forward is run a second time in backward instead of being kept."""

    name: str
    every: int = 1  # every_n: of so many decoder layers the last, counted through the whole model
    offload_activations: bool = False  # what layers keep for backward, or under checkpointing their inputs, on the host

    def __post_init__(self) -> None:
        require_one_of("checkpointing", self.name, ("none", "full", "every_n", "selective", "attention"))
        require_positive("checkpointing", self, "every")
        is_every_n = self.name == "every_n"
        rule = f"is for checkpointing=every_n, not {self.name}: choose it, or 1"
        require(is_every_n or self.every == 1, "checkpointing.every", self.every, rule)
        require(not is_every_n or self.every > 1, "checkpointing.every", self.every, "is full: choose 2 or more")

    def recomputes_layer(self, layer: int) -> bool:
        """Whether the forward of a decoder layer, by its index in the whole model, is called a second time."""
        return self.name in RECOMPUTING_MODES and (layer + 1) % self.every == 0


@dataclass(frozen=True)
class PrecisionConfig:
    """Widths of one precision; torch's dtype names. The same in every engine, never autocast."""

    name: str
    compute: str  # weights and activations in forward and backward
    master: str  # what the optimizer updates; its moments have the same width
    accumulate: str  # gradients summed over micro-batches
    reduce: str  # gradients on the wire
    initial_loss_scale: float | None = None  # where the loss is scaled, and the scale adapted
    loss_scale_window: int = 2000  # steps without an overflow before the scale is doubled

    def __post_init__(self) -> None:
        require_one_of("precision", self.name, ("fp32", "bf16", "bf16_mixed", "fp16_mixed"))
        require_positive("precision", self, "loss_scale_window")
        if self.initial_loss_scale is not None:
            rule = "is not a finite number above 0: choose one, such as 65536"
            finite = math.isfinite(self.initial_loss_scale) and self.initial_loss_scale > 0
            require(finite, "precision.initial_loss_scale", self.initial_loss_scale, rule)

    @property
    def is_mixed(self) -> bool:
        return self.compute != self.master


@dataclass(frozen=True)
class DataConfig:
    name: str
    kind: str  # text: bytes of real files; synthetic: uniform random tokens
    path: str | None = None  # a file or a folder; null: the running Python's standard library
    cache: str = "~/.cache/harness"

    def __post_init__(self) -> None:
        require_one_of("data.kind", self.kind, ("text", "synthetic"))
        if self.kind == "text" and self.path is not None:
            found = Path(self.path).expanduser()
            require(found.exists(), "data.path", self.path, "does not exist: name a text file or a folder of them")


@dataclass(frozen=True)
class ClusterConfig:
    name: str
    nodes: int = 1
    gpus_per_node: int | None = None  # null: look at the machine
    device: str = "auto"  # auto | cpu | cuda
    memory_budget: str | int | float | None = None  # of a rank, such as 24GiB; null: what is there
    partition: str | None = None  # the site's, for Slurm; null: its default
    account: str | None = None
    time: str | None = (
        None  # a job's limit as Slurm writes it, 4:00:00 (in a file in quotes); null: from timeout_seconds
    )

    def __post_init__(self) -> None:
        require_positive("cluster", self, "nodes")
        if self.gpus_per_node is not None:
            require_positive("cluster", self, "gpus_per_node")
        require_one_of("cluster.device", self.device, ("auto", "cpu", "cuda"))
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, "cluster.memory_budget")

    @property
    def memory_budget_bytes(self) -> int | None:
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)


# Steps after the timed ones: under torch's profiler, to see where time goes, and one with every operator heard.
TRACED_STEPS, PROFILED_STEPS = 2, 1


@dataclass(frozen=True)
class TrainConfig:
    """One step is `global_batch` sequences of `seq_len` tokens; batches are counted in sequences."""

    global_batch: int
    micro_batch: int
    seq_len: int
    steps: int
    warmup_steps: int
    seed: int
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    gradient_clipping: float  # 0: measured, not clipped
    loss_chunks: int = 1  # parts of a micro-batch's tokens that go through head and loss one after another
    fused_optimizer: bool = True  # one kernel without temporaries; else torch's foreach operators
    compile: bool = False  # every decoder layer by torch.compile

    @property
    def total_steps(self) -> int:
        """Every step that is trained."""
        return self.warmup_steps + self.steps + TRACED_STEPS + PROFILED_STEPS

    def __post_init__(self) -> None:
        require_positive(
            "train", self, "global_batch", "micro_batch", "seq_len", "steps", "warmup_steps", "loss_chunks"
        )
        require(self.seed >= 0, "train.seed", self.seed, "is negative: choose 0 or more")
        for key in ("lr", "weight_decay", "eps", "gradient_clipping"):
            value = getattr(self, key)
            rule = "is not a finite number of 0 or more: choose one"
            require(math.isfinite(value) and value >= 0, f"train.{key}", value, rule)


@dataclass(frozen=True)
class ProofConfig:
    """What every run is held to; a run above a bound is an error."""

    reference: bool = True
    loss_bound: dict[str, float] = field(default_factory=dict)  # by precision, relative
    grad_bound: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasureConfig:
    """What is kept beside the record."""

    memory_snapshot: bool = False  # of every rank's profiled step, for torch's viewer


@dataclass(frozen=True)
class SweepConfig:
    """How the runs of one command are gone through."""

    parallel: int | str = 1  # runs side by side, each on devices or cores of its own; auto: as many as have devices
    skip_dominated: bool = True  # what ran out of memory at a smaller batch or depth is not tried at a larger

    def __post_init__(self) -> None:
        is_number = isinstance(self.parallel, int) and self.parallel >= 1
        rule = "is not a number of runs: choose auto, or 1 or more"
        require(is_number or self.parallel == "auto", "sweep.parallel", self.parallel, rule)


RETRYABLE = ("error", "timeout", "oom")  # the ends that can be tried again; what was interrupted always is


@dataclass(frozen=True)
class TrackingConfig:
    name: str
    mode: str = "offline"  # offline | online
    project: str = "harness"
    entity: str | None = None  # user or team; null: the account's own choice
    tags: tuple[str, ...] = ()  # of every run, beside what it is

    def __post_init__(self) -> None:
        require_one_of("tracking.mode", self.mode, ("offline", "online"))


@dataclass(frozen=True)
class RunConfig:
    """One run, whole."""

    name: str
    results_dir: str
    model: ModelConfig
    strategy: StrategyConfig
    checkpointing: CheckpointingConfig
    precision: PrecisionConfig
    data: DataConfig
    cluster: ClusterConfig
    train: TrainConfig
    proof: ProofConfig
    tracking: TrackingConfig
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    world_size: int | None = None  # null: the cluster's
    repeat: int = 0
    repeats: int = 1  # so many runs, from `repeat` on; each of them is a run of its own
    timeout_seconds: float = 1800.0
    hang_seconds: float = 600.0
    preflight: bool = True
    retry: tuple[str, ...] = ()  # ends, of RETRIED, that are no result: those runs are made again
    launch: str = "processes"  # or script: with Slurm, the batch script is written and not submitted
    stop_after: tuple[str | int | float, ...] = ()  # harness.budget: 8h, 20runs, 3failures: no run is begun then
    force: bool = False

    def __post_init__(self) -> None:
        if self.world_size is not None:
            require(self.world_size >= 1, "world_size", self.world_size, "is not a positive number: choose 1 or more")
        require(self.repeats >= 1, "repeats", self.repeats, "is not a positive whole number: choose 1 or more")
        for key in ("timeout_seconds", "hang_seconds"):
            require(getattr(self, key) > 0, key, getattr(self, key), "is not positive: choose seconds")
        require_one_of("launch", self.launch, ("processes", "script"))
        for status in self.retry:
            require_one_of("retry", status, RETRYABLE)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to a run file."""
        return dataclasses.asdict(self)
