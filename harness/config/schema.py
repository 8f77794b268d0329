"""The configuration of one run as frozen, validated dataclasses: what is measured, and so what identifies it.

The configuration of the command itself is in harness.config.command. A field whose metadata have `identity: False`
names, finds or places something without changing any result: it is no part of a run's identity
(harness.config.fingerprint). A field whose metadata have `old_key` had that key before: old records have it, and it is
still the key that enters a run's identity.
The comments of the fields are the reference of all keys (docs/reference/configuration.md).
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from harness.config.byte_size import Size, parse_bytes
from harness.config.checkpointing import CheckpointingConfig
from harness.config.from_dict import (
    ConfigValues,
    Finite,
    Natural,
    Positive,
    one_of,
    require,
    rule,
)
from harness.config.hardware import HardwareConfig
from harness.config.model import ModelConfig
from harness.config.optimizer import ADAMW, OptimizerSpec
from harness.config.precision import PrecisionConfig
from harness.config.strategy import StrategyConfig

RequestedDevice = Literal["auto", "cpu", "cuda"]
Device = Literal["cpu", "cuda"]
LaunchMode = Literal["processes", "virtual", "simulated"]
WorldSize = Annotated[int, rule(lambda value: value >= 1, "is not a positive number: choose 1 or more")]
DataKind = Annotated[str, one_of("text", "synthetic")]
SimulatedRank = Annotated[
    str | int,
    rule(
        lambda value: value in ("peak", "all") or (isinstance(value, int) and value >= 0),
        "is not a rank: choose peak, all, or a number of 0 or more",
    ),
]


def _no_identity(default: Any) -> Any:
    """Return a field with a default that is no part of a run's identity."""
    return field(default=default, metadata={"identity": False})


@dataclass(frozen=True)
class DataConfig:
    """The text that every run trains on."""

    name: str  # The name of the data.
    kind: DataKind  # The kind of tokens: text is the bytes of real files, synthetic is uniform random tokens.
    # A text file or a folder of them; null means the source text of the running Python's standard library.
    path: str | None = None
    cache: str = _no_identity("~/.cache/harness")  # The folder of prepared corpora and compiled libraries.

    def __post_init__(self) -> None:
        if self.kind == "text" and self.path is not None:
            source = Path(self.path).expanduser()
            require(source.exists(), "data.path", self.path, "does not exist: name a text file or a folder of them")


@dataclass(frozen=True)
class ClusterConfig:
    """The machines to run on, and what one rank may use of them."""

    name: str = field(metadata={"identity": False})  # The name of the cluster.
    nodes: Positive = 1  # The number of machines.
    gpus_per_node: Positive | None = None  # The number of GPUs of each machine; null means as many as this machine has.
    # The kind of device that trains; auto means cuda wherever the machine has a GPU, otherwise cpu.
    device: RequestedDevice = "auto"
    # The most bytes of tensors that a rank may hold, such as 24GiB; null means all that its device has.
    memory_budget: Size | None = None
    partition: str | None = _no_identity(None)  # The partition of Slurm; null means the site's default.
    account: str | None = _no_identity(None)  # The account of Slurm; null means the user's default.
    # The time limit of a Slurm job as Slurm writes it, such as '4:00:00'; null derives it from timeout_seconds.
    time: str | None = _no_identity(None)
    # What a device and the links can do, for `harness plan`; null where plans are not made for this cluster.
    hardware: HardwareConfig | None = field(default=None, metadata={"identity": False})

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
    lr: Finite  # The learning rate of AdamW, which stays the same in all steps.
    weight_decay: Finite  # The weight decay of AdamW.
    betas: tuple[float, float]  # The decay rates of AdamW's first and second moments.
    eps: Finite  # The epsilon in the denominator of AdamW's update.
    gradient_clipping: Finite  # The largest global norm of gradients; 0 measures the norm and clips nothing.
    # The parts into which a micro-batch's tokens are split; head and loss compute one part after another.
    loss_chunks: Positive = 1
    # Whether one kernel without temporaries updates the parameters, in the place of torch's foreach operators.
    fused_optimizer: bool = True
    compile: bool = False  # Whether torch.compile compiles every decoder layer.

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
    world_size: WorldSize | None = None  # The number of ranks; null means as many as the cluster has.
    repeat: int = 0  # The number of this repeat, which tells repeated measurements of one configuration apart.
    # How ranks are run. processes runs every rank as a process; virtual runs one rank of the world on this machine,
    # without the others and without collectives; simulated runs the code of one rank on the devices that `cluster`
    # describes, with tensors that have no memory.
    launch: LaunchMode = "processes"
    simulate: SimulateConfig = field(default_factory=SimulateConfig)  # The rank of a simulated or virtual run.

    @property
    def optimizer(self) -> OptimizerSpec:
        """The optimizer that every engine trains with."""
        return ADAMW

    @property
    def optimizer_state_bytes(self) -> int:
        """The bytes of the optimizer's states for each parameter, without its master."""
        return int(self.precision.master_bytes * sum(state.width for state in self.optimizer.states))

    def to_dict(self) -> ConfigValues:
        """Return the configuration in plain values."""
        return dataclasses.asdict(self)
