"""The configuration of one run as frozen, validated dataclasses: what is measured, and so what identifies it.

The configuration of the command itself is in harness.config.command. A field whose metadata have `old_key` had that key
before: old records have it, and it is still the key that enters a run's identity (harness.config.fingerprint).
The comments of the fields are the reference of all keys (docs/reference/configuration.md).
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from harness.config.adapter import NF4_BYTES
from harness.config.from_dict import (
    AtLeastOne,
    ConfigValues,
    Finite,
    Natural,
    Positive,
    is_above_zero,
    one_of,
    require,
    rule,
)
from harness.config.hardware import HardwareConfig
from harness.config.model import ModelConfig
from harness.config.optimizer import DTYPE_BYTES, OptimizerConfig
from harness.config.strategy import StrategyConfig
from harness.util.text import Size, parse_bytes

RequestedDevice = Literal["auto", "cpu", "cuda"]
Device = Literal["cpu", "cuda"]
LaunchMode = Literal["processes", "virtual", "simulated"]
DataKind = Annotated[str, one_of("text", "synthetic")]
SimulatedRank = Annotated[
    str | int,
    rule(
        lambda value: value in ("peak", "all") or (isinstance(value, int) and value >= 0),
        "is not a rank: choose peak, all, or a number of 0 or more",
    ),
]


Checkpointing = Literal["none", "full", "every_n", "selective", "attention"]
Saving = Literal["none", "sync", "async"]
SavedProducts = Literal["all", "every_second"]

RECOMPUTING_MODES = ("full", "every_n", "selective")  # the modes that call a layer's forward a second time


@dataclass(frozen=True)
class CheckpointingConfig:
    """The selection of the parts of forward that backward computes a second time instead of saving their results."""

    name: Checkpointing  # The kind of checkpointing.
    # The n of every_n: the last of every n decoder layers is checkpointed, counted through all stages.
    every: Positive = 1
    # Whether the host's memory holds the activations that layers keep for backward.
    offload_activations: bool = False
    # The products of a layer's projections that selective saves: all, or every_second, which are the first, third, etc.
    saved_products: SavedProducts = "all"

    def __post_init__(self) -> None:
        if self.name == "every_n":
            require(self.every > 1, "checkpointing.every", self.every, "is full: choose 2 or more")
        for key, default, mode in (("every", 1, "every_n"), ("saved_products", "all", "selective")):
            rule = f"is for checkpointing={mode}, not {self.name}: choose it, or {default}"
            require(
                self.name == mode or getattr(self, key) == default, f"checkpointing.{key}", getattr(self, key), rule
            )

    def recomputes_layer(self, layer: int) -> bool:
        """Return whether a decoder layer, by its index in the whole model, runs its forward a second time."""
        return self.name in RECOMPUTING_MODES and (layer + 1) % self.every == 0

    def saves_product(self, number: int) -> bool:
        """Return whether selective checkpointing saves a product of a layer's forward, the first of which is number 1.

        A product is that of one projection, with or without its bias; attention's own products are not counted.
        """
        return self.saved_products == "all" or number % 2 == 1

    def recomputed_products(self, projections: Iterable[str]) -> tuple[str, ...]:
        """Return those of a layer's projections, in the order of its forward, whose products are not saved."""
        return tuple(name for number, name in enumerate(projections, 1) if not self.saves_product(number))


Precision = Annotated[str, one_of("fp32", "bf16", "bf16_mixed", "fp16_mixed", "fp8_mixed")]
Recipe = Literal["none", "tensorwise", "rowwise", "mxfp8", "nvfp4"]
LossScale = Annotated[float, rule(is_above_zero, "is not a finite number above 0: choose one, such as 65536")]


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes of one precision, by torch's names: the same in every engine, and never autocast."""

    name: Precision  # The name of the precision: fp32, bf16, bf16_mixed, fp16_mixed or fp8_mixed.
    compute: str  # The dtype of weights and activations in forward and backward.
    master: str  # The dtype of the parameters that the optimizer updates, and of its moments.
    accumulate: str  # The dtype in which gradients are summed over micro-batches.
    reduce: str  # The dtype in which gradients are sent between ranks.
    # The factor of the loss in the first step, which then adapts to overflows; null means that the loss is not scaled.
    initial_loss_scale: LossScale | None = None
    loss_scale_window: Positive = 2000  # The number of steps without an overflow after which the loss scale is doubled.
    # How the inputs of the layers' projections are scaled to fewer bits: tensorwise with one scale each, rowwise with
    # one for each row, mxfp8 and nvfp4 with one for each block of a row. The last two are planned and never run.
    recipe: Recipe = "none"
    # Whether fully_shard gathers the projections' weights in float8, with one scale that the ranks agree on.
    float8_all_gather: bool = False

    def __post_init__(self) -> None:
        is_narrow = self.name == "fp8_mixed"
        rule = "is for precision=fp8_mixed alone" if self.has_recipe else "is no recipe of precision=fp8_mixed"
        require(self.has_recipe == is_narrow, "precision.recipe", self.recipe, f"{rule}: choose both, or none")
        is_possible = not self.float8_all_gather or self.recipe == "tensorwise"
        rule = "needs one scale for each matrix: choose precision.recipe=tensorwise, or false"
        require(is_possible, "precision.float8_all_gather", self.float8_all_gather, rule)

    @property
    def has_recipe(self) -> bool:
        """Whether the layers' projections multiply fewer than 16 bits."""
        return self.recipe != "none"

    @property
    def is_planned_only(self) -> bool:
        """Whether no engine here multiplies by the recipe."""
        return self.recipe in ("mxfp8", "nvfp4")

    @property
    def least_dtype(self) -> str:
        """The dtype by whose rounding two honest trainings differ most: float8 with a recipe, else `compute`."""
        return "float8" if self.has_recipe else self.compute

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

    name: str  # The name of the data.
    kind: DataKind  # The kind of tokens: text is the bytes of real files, synthetic is uniform random tokens.
    # A text file or a folder of them; null means the source text of the running Python's standard library.
    path: str | None = None
    cache: str = "~/.cache/harness"  # The folder of prepared corpora and compiled libraries.

    def __post_init__(self) -> None:
        if self.kind == "text" and self.path is not None:
            source = Path(self.path).expanduser()
            require(source.exists(), "data.path", self.path, "does not exist: name a text file or a folder of them")


@dataclass(frozen=True)
class ClusterConfig:
    """The machines to run on, and what one rank may use of them."""

    name: str  # The name of the cluster.
    nodes: Positive = 1  # The number of machines.
    gpus_per_node: Positive | None = None  # The number of GPUs of each machine; null means as many as this machine has.
    # The kind of device that trains; auto means cuda wherever the machine has a GPU, otherwise cpu.
    device: RequestedDevice = "auto"
    # The most bytes of tensors that a rank may hold, such as 24GiB; null means all that its device has.
    memory_budget: Size | None = None
    partition: str | None = None  # The partition of Slurm; null means the site's default.
    account: str | None = None  # The account of Slurm; null means the user's default.
    # The time limit of a Slurm job as Slurm writes it, such as '4:00:00'; null derives it from timeout_seconds.
    time: str | None = None
    # What a device and the links can do, for `harness plan`; null where plans are not made for this cluster.
    hardware: HardwareConfig | None = None

    @property
    def memory_budget_bytes(self) -> int | None:
        """cluster.memory_budget in bytes; None where there is none."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)


# Steps after the timed ones: one that records every operator, and two under torch's profiler, to see where time goes.
# The profiled step comes first because nothing in it is timed: torch's profiler attaches itself to a GPU before it.
PROFILED_STEPS, TRACED_STEPS = 1, 2


@dataclass(frozen=True)
class TrainConfig:
    """The training of a run: one step is `global_batch` sequences of `seq_len` tokens, and batches count sequences."""

    global_batch: Positive  # The number of sequences in a step, over all ranks.
    # The number of sequences that a rank takes through the model at once; gradients are accumulated over several.
    micro_batch: Positive
    seq_len: Positive  # The number of tokens in a sequence.
    steps: Positive  # The number of timed steps.
    warmup_steps: Positive  # The number of steps before the timed ones.
    seed: Natural  # The seed of initial weights, data and dropout.
    lr: Finite  # The learning rate, which stays the same in all steps.
    weight_decay: Finite  # The weight decay: of AdamW and Muon apart from the gradient, of SGD as a part of it.
    betas: tuple[float, float]  # The decay rates of AdamW's first and second moments.
    eps: Finite  # The epsilon in the denominator of AdamW's update.
    gradient_clipping: Finite  # The largest global norm of gradients; 0 measures the norm and clips nothing.
    # The parts into which a micro-batch's tokens are split; head and loss compute one part after another.
    loss_chunks: Positive = 1
    # Whether one kernel without temporaries runs AdamW's update, in the place of torch's foreach operators. SGD always
    # has the latter, and torchao's optimizers have neither.
    fused_optimizer: bool = True
    compile: bool = False  # Whether torch.compile compiles every decoder layer.
    # Whether a checkpoint is written behind the last step, read into a new engine and checked: sync waits until its
    # files are complete, async goes on training as soon as the state is copied.
    save: Saving = "none"

    @property
    def total_steps(self) -> int:
        """The number of all steps that are trained: warm-up, timed, profiled and traced ones."""
        return self.warmup_steps + self.steps + PROFILED_STEPS + TRACED_STEPS

    @property
    def profiled_step(self) -> int:
        """The index of the profiled step, whose gradients are compared with the reference's."""
        return self.warmup_steps + self.steps


@dataclass(frozen=True)
class SimulateConfig:
    """The configuration of a run whose ranks are simulated or virtual; read with these modes of launch alone."""

    # The rank that is run: peak is the one with the highest predicted memory, all is one rank of every pipeline stage,
    # and a number is that rank.
    rank: SimulatedRank = "peak"


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run. Its hash, with device, world size and corpus, is the run's identity."""

    model: ModelConfig
    strategy: StrategyConfig
    checkpointing: CheckpointingConfig
    precision: PrecisionConfig
    data: DataConfig
    cluster: ClusterConfig
    train: TrainConfig
    world_size: AtLeastOne | None = None  # The number of ranks; null means as many as the cluster has.
    repeat: int = 0  # The number of this repeat, which tells repeated measurements of one configuration apart.
    # How ranks are run. processes runs every rank as a process; virtual runs one rank of the world on this machine,
    # without the others and without collectives; simulated runs the code of one rank on the devices that `cluster`
    # describes, with tensors that have no memory.
    launch: LaunchMode = "processes"
    simulate: SimulateConfig = SimulateConfig()  # The rank of a simulated or virtual run.
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def optimizer_setting(self, key: str) -> Any:
        """Return the value of an optimizer's setting, which is a key of `optimizer` or of `train`."""
        return getattr(self.optimizer if hasattr(self.optimizer, key) else self.train, key)

    def gathered_matrix_bytes(self, width: int) -> float:
        """Return the bytes of an element of a layer's own matrices that are gathered, where others have `width`."""
        if self.precision.float8_all_gather:
            return 1
        return NF4_BYTES if self.model.adapter.is_quantized else width

    def to_dict(self) -> ConfigValues:
        """Return the configuration in plain values."""
        return dataclasses.asdict(self)
