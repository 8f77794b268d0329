"""The configuration of one run as frozen, validated dataclasses: what is measured, and so what identifies it.

How a command goes about its runs is in harness.config.command. A field whose metadata say `identity: False` names,
finds or places something without changing any result: it is no part of a run's identity (harness.config.fingerprint).
A field whose metadata say `old_key` had that key before: old records have it, and it still enters a run's identity.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from harness.config.architecture import ARCHITECTURES, Architecture
from harness.config.byte_size import parse_bytes
from harness.config.hf_model_info import HFModelInfo
from harness.config.validation import divisors_text, require, require_one_of, require_positive

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
DataParallel = Literal["none", "ddp", "fsdp"]
Offload = Literal["none", "optimizer", "parameters"]
Checkpointing = Literal["none", "full", "every_n", "selective", "attention"]
RequestedDevice = Literal["auto", "cpu", "cuda"]
LaunchMode = Literal["processes", "virtual", "simulated"]


def _no_identity(default: Any) -> Any:
    """Return a field with a default that is no part of a run's identity."""
    return field(default=default, metadata={"identity": False})


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
    parameters: int  # as the YAML file states it for its own sizes; tests compute it
    source: str
    attention: str = "flash"
    dropout: float = 0.0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5  # family llama
    layer_norm_epsilon: float = 1e-5  # family gpt
    initializer_range: float = 0.02
    path: str | None = _no_identity(None)  # family hf: where its configuration was found
    hf_info: HFModelInfo | None = field(default=None, metadata={"old_key": "asked"})  # family hf: the model's trace

    def __post_init__(self) -> None:
        require_one_of("model.family", self.family, (*ARCHITECTURES, "hf"))
        require_one_of("model.attention", self.attention, ("flash", "eager"))
        require_positive(
            "model", self, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
        )
        require_positive("model", self, "intermediate_size", "vocab_size", "context_length")
        if self.hf_info is not None:  # transformers has built the model, and so accepted its sizes
            return
        if self.architecture.dropout:
            require(
                0 <= self.dropout < 1, "model.dropout", self.dropout, "must be in [0, 1): choose 0 or more, below 1"
            )
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
        """What a decoder layer is made of. Raises KeyError for the family hf, whose layers only the library knows."""
        return ARCHITECTURES[self.family]

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class StrategyConfig:
    """One strategy as the user writes it; a degree of -1 is whatever is left of the world (see resolve_layout)."""

    name: str  # the row's column `strategy`
    engine: str = "torch"  # the library that trains: a module of harness/engines
    data_parallel: DataParallel = "none"  # PyTorch's wrapper: ddp is DistributedDataParallel, fsdp is fully_shard
    zero_stage: int = 0  # what dp_shard divides: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters
    dp_replicate: int = 1  # copies of the model, or of the group that shards it (hybrid sharding)
    dp_shard: int = 1  # ranks over which the stage divides; the data degree is dp_replicate x dp_shard
    tp: int = 1  # ranks that cut every matrix (tensor parallelism)
    sequence_parallel: bool = False  # whether tp cuts the residual stream too, along the sequence
    vocabulary_parallel: bool = True  # whether tp cuts embedding and head too; else every rank has them whole
    cp: int = 1  # ranks that share every sequence (context parallelism)
    pp: int = 1  # ranks that share the depth (pipeline parallelism)
    schedule: Schedule = "1f1b"  # the pipeline's
    virtual_stages: int = 1  # stages of one rank, for schedules that interleave them
    layers_per_stage: tuple[int, ...] | None = None  # in the order of stages; null: parameters spread evenly
    offload: Offload = "none"  # to the host: optimizer (with the gradients it reads), parameters (with all of these)
    literature: bool = True  # whether the run claims the papers' volume and shares: then others make it an error
    options: dict[str, Any] = field(default_factory=dict)  # the engine's own settings, passed on as they are

    def __post_init__(self) -> None:
        require_one_of("strategy.zero_stage", self.zero_stage, (0, 1, 2, 3))
        require_positive("strategy", self, "virtual_stages")
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
            degree = getattr(self, axis)
            rule = "is not a degree: choose 1 or more, or -1 for whatever is left of the world"
            require(degree == -1 or degree >= 1, f"strategy.{axis}", degree, rule)

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Whether DistributedDataParallel's gradients are views of its buckets, held once; torch's default is false."""
        return bool(self.options.get("gradient_as_bucket_view", True))

    @property
    def ddp_options(self) -> dict[str, Any]:
        """Keyword arguments of DistributedDataParallel."""
        return self.options | {"gradient_as_bucket_view": self.gradient_as_bucket_view}


RECOMPUTING_MODES = ("full", "every_n", "selective")  # the modes that call a layer's forward a second time


@dataclass(frozen=True)
class CheckpointingConfig:
    """Which parts of the forward pass are computed a second time in backward instead of being kept."""

    name: Checkpointing
    every: int = 1  # every_n: the last of every `every` decoder layers, counted through the whole model
    offload_activations: bool = False  # whether the host holds what layers keep for backward (checkpointed: inputs)

    def __post_init__(self) -> None:
        require_one_of("checkpointing", self.name, get_args(Checkpointing))
        require_positive("checkpointing", self, "every")
        is_every_n = self.name == "every_n"
        rule = f"is for checkpointing=every_n, not {self.name}: choose it, or 1"
        require(is_every_n or self.every == 1, "checkpointing.every", self.every, rule)
        require(not is_every_n or self.every > 1, "checkpointing.every", self.every, "is full: choose 2 or more")

    def recomputes_layer(self, layer: int) -> bool:
        """Return whether a decoder layer, by its index in the whole model, runs its forward a second time."""
        return self.name in RECOMPUTING_MODES and (layer + 1) % self.every == 0


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per element, by torch's dtype names


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes of one precision, by torch's names: the same in every engine, and never autocast."""

    name: str
    compute: str  # weights and activations in forward and backward
    master: str  # what the optimizer updates; its moments have the same width
    accumulate: str  # sum of gradients over micro-batches
    reduce: str  # gradients on the wire
    initial_loss_scale: float | None = None  # null: the loss is not scaled; else the scale adapts from here
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
        """Whether the optimizer updates copies of another width than the weights that compute."""
        return self.compute != self.master

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of `compute`."""
        return DTYPE_BYTES[self.compute]

    @property
    def master_bytes(self) -> int:
        """Bytes per element of `master`."""
        return DTYPE_BYTES[self.master]

    @property
    def accumulate_bytes(self) -> int:
        """Bytes per element of `accumulate`."""
        return DTYPE_BYTES[self.accumulate]

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of `reduce`."""
        return DTYPE_BYTES[self.reduce]


@dataclass(frozen=True)
class DataConfig:
    """The text that every run trains on."""

    name: str
    kind: str  # text: bytes of real files; synthetic: uniform random tokens
    path: str | None = None  # a file or a folder; null: the running Python's standard library
    cache: str = _no_identity("~/.cache/harness")  # folder of prepared corpora and compiled libraries

    def __post_init__(self) -> None:
        require_one_of("data.kind", self.kind, ("text", "synthetic"))
        if self.kind == "text" and self.path is not None:
            source = Path(self.path).expanduser()
            require(source.exists(), "data.path", self.path, "does not exist: name a text file or a folder of them")


@dataclass(frozen=True)
class ClusterConfig:
    """The machines to run on, and what one rank may use of them."""

    name: str = field(metadata={"identity": False})
    nodes: int = 1
    gpus_per_node: int | None = None  # null: as many as this machine has
    device: RequestedDevice = "auto"
    memory_budget: str | int | float | None = None  # of one rank, such as 24GiB; null: all that the device has
    partition: str | None = _no_identity(None)  # Slurm's; null: the site's default
    account: str | None = _no_identity(None)
    time: str | None = _no_identity(None)  # a job's limit as Slurm writes it, "4:00:00"; null: from timeout_seconds

    def __post_init__(self) -> None:
        require_positive("cluster", self, "nodes")
        if self.gpus_per_node is not None:
            require_positive("cluster", self, "gpus_per_node")
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, "cluster.memory_budget")

    @property
    def memory_budget_bytes(self) -> int | None:
        """cluster.memory_budget in bytes; None where there is none."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)


# Steps after the timed ones: two under torch's profiler, to see where time goes, and one that records every operator.
TRACED_STEPS, PROFILED_STEPS = 2, 1


@dataclass(frozen=True)
class TrainConfig:
    """How a run trains: one step is `global_batch` sequences of `seq_len` tokens, and batches count sequences."""

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
    gradient_clipping: float  # 0: the norm is measured, and nothing clipped
    loss_chunks: int = 1  # parts of a micro-batch's tokens that go through head and loss one after another
    fused_optimizer: bool = True  # one kernel without temporaries; else torch's foreach operators
    compile: bool = False  # whether torch.compile compiles every decoder layer

    @property
    def total_steps(self) -> int:
        """The number of all steps that are trained: warm-up, timed, traced and profiled ones."""
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
class RunConfig:
    """What one run measures. Its hash, with device, world size and corpus, is the run's identity."""

    model: ModelConfig
    strategy: StrategyConfig
    checkpointing: CheckpointingConfig
    precision: PrecisionConfig
    data: DataConfig
    cluster: ClusterConfig
    train: TrainConfig
    world_size: int | None = None  # ranks; null: as many as the cluster has
    repeat: int = 0  # tells repeated measurements of one configuration apart
    launch: LaunchMode = "processes"  # whether every rank is a process; part of the identity only where it is not

    def __post_init__(self) -> None:
        if self.world_size is not None:
            require(self.world_size >= 1, "world_size", self.world_size, "is not a positive number: choose 1 or more")

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration in plain values."""
        return dataclasses.asdict(self)
