"""The configuration of a strategy: the engine, and how ranks divide the work."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from harness.config.from_dict import Positive, one_of, rule

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")  # of the mesh, outermost first, in the order of ranks
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")  # the same axes, in the order in which they are read
DATA_AXES = ("dp_replicate", "dp_shard", "ep", "cp")  # those whose ranks have different tokens
MODEL_AXES = ("tp", "cp", "pp")  # those that divide more than the batch and the model state

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"]
V_SCHEDULES = ("zbv", "dualpipev")  # whose ranks have two stages, the n-th from the front and the n-th from the back
DataParallel = Literal["none", "ddp", "fsdp"]
Offload = Literal["none", "optimizer", "parameters"]
# What torch calls ring attention it has for the kernels of GPUs alone, and no proof of this project has run it.
ContextParallel = Annotated[
    str,
    rule(
        lambda value: value in ("gather", "ulysses"),
        "is no way to share a sequence here (torch's ring attention has no kernel of a CPU): choose gather or ulysses",
    ),
]
ZeroStage = Annotated[int, one_of(0, 1, 2, 3)]
Degree = Annotated[
    int,
    rule(
        lambda value: value == -1 or value >= 1,
        "is not a degree: choose 1 or more, or -1 for whatever is left of the world",
    ),
]


@dataclass(frozen=True)
class StrategyConfig:
    """One strategy as the user writes it; a degree of -1 is whatever is left of the world (see resolve_layout)."""

    name: str  # The name of the strategy, which is the value of the row's column `strategy`.
    engine: str = "torch"  # The library that trains: the name of a module in harness/engines.
    # The wrapper of PyTorch for data parallelism: ddp is DistributedDataParallel, fsdp is fully_shard (FSDP2).
    data_parallel: DataParallel = "none"
    # The ZeRO stage: dp_shard divides nothing (0), the optimizer state (1), also gradients (2), also parameters (3).
    # With data_parallel=fsdp all stages divide parameters between steps, and below 3 they are whole within a step.
    zero_stage: ZeroStage = 0
    dp_replicate: Degree = 1  # The number of copies of the model, or of the group of ranks that shards it.
    # The number of ranks that divide model state by zero_stage; the data-parallel degree is dp_replicate x dp_shard.
    dp_shard: Degree = 1
    # The number of neighboring ranks of dp_shard that share out a second copy of the parameters, which backward gathers
    # in the place of the shards of all ranks: a part of a node, for example. 1 is no copy. FSDP2 calls it an integer
    # reshard_after_forward, and ZeRO++ the secondary partition (hpZ, arXiv 2306.10209).
    secondary_shards: Positive = 1
    tp: Degree = 1  # The tensor-parallel degree: the number of ranks that divide the matrices of each layer.
    # Whether tensor-parallel ranks also divide norms and the residual stream, along the sequence.
    sequence_parallel: bool = False
    # Whether tensor-parallel ranks also divide embedding and output head; otherwise each rank has both as a whole.
    vocabulary_parallel: bool = True
    cp: Degree = 1  # The context-parallel degree: the number of ranks that divide every sequence.
    # What context-parallel ranks exchange for attention: gather, all keys and values (arXiv 2407.21783), or ulysses,
    # their parts of sequences for whole sequences of a part of the heads (arXiv 2309.14509).
    context_parallel: ContextParallel = "gather"
    pp: Degree = 1  # The pipeline-parallel degree: the number of ranks that divide the layers.
    # The expert-parallel degree: the number of data-parallel ranks that divide the experts of each layer. They are a
    # part of dp_shard or, where it is 1, of dp_replicate.
    ep: Positive = 1
    schedule: Schedule = "1f1b"  # The order of a pipeline's forwards and backwards.
    virtual_stages: Positive = 1  # The number of pipeline stages on each rank, for schedules that interleave them.
    # The number of decoder layers in each pipeline stage, in order; null balances the stages by their parameters.
    layers_per_stage: tuple[int, ...] | None = None
    # The model state that the host's memory holds: optimizer moves optimizer state and gradients, parameters moves all.
    offload: Offload = "none"
    # Whether a run must send the bytes and hold the shares of the published methods; if it does not, it is an error.
    literature: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # Settings of the engine, which are passed on as they are.

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Whether DistributedDataParallel's gradients are views of its buckets, held once; torch's default is false."""
        return bool(self.options.get("gradient_as_bucket_view", True))

    @property
    def ddp_options(self) -> dict[str, Any]:
        """Keyword arguments of DistributedDataParallel.

        The models' buffers are constants, such as tables of positions, which DDP would broadcast in every forward.
        """
        return self.options | {"gradient_as_bucket_view": self.gradient_as_bucket_view, "broadcast_buffers": False}
