"""The combinations of strategy, world size and options whose runs the tests of ranks share.

Each is run once in the session's results directory, and every test reads its record from there.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

import torch

from harness.records.schema import Record
from tests.support.commands import run_with


class Combination(NamedTuple):
    """A run of a few steps that must be proven."""

    strategy: str
    world_size: int = 2
    options: tuple[str, ...] = ()  # further overrides

    def __str__(self) -> str:
        return " ".join((self.strategy, f"world_size={self.world_size}", *self.options))

    def record(self, results: Path) -> Record:
        """Return the record of its run, which is made only if no test made it before."""
        overrides = (f"strategy={self.strategy}", f"world_size={self.world_size}", *self.options)
        return run_with(results, *overrides)


class Size(NamedTuple):
    """The size of a model and its batch.

    Tensor parallelism is slow on a CPU because of a hundred small operators a layer, and a pipeline needs layers to
    divide.
    """

    layers: int
    micro_batches: int

    def options(self) -> tuple[str, ...]:
        """Return the overrides that set these sizes."""
        model = f"model.num_hidden_layers={self.layers} model.num_key_value_heads=4 model.vocab_size={VOCABULARY}"
        batch = f"train.global_batch={SEQUENCES * self.micro_batches} train.micro_batch={SEQUENCES}"
        return (*model.split(), *batch.split(), f"train.seq_len={SEQ_LEN}")


CHECKPOINTING = {2: ("none", "full"), 4: ("none",)}  # by world size

TWO_LAYERS = "model.num_hidden_layers=2"  # enough where no pipeline divides them

# --- data parallelism, by engine

# DeepSpeed's own defaults, whose layouts are those of zero1 to zero3.
DEFAULTS = ("zero1_defaults", "zero2_defaults", "zero3_defaults")

# Each strategy of several ranks, with further overrides.
STRATEGIES: list[tuple[str, tuple[str, ...]]] = [
    *((name, ()) for name in ("ddp", "zero1_torch", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_no_shard")),
    *((name, ()) for name in ("zero1", "zero2", "zero3", *DEFAULTS)),
    ("ddp", ("strategy.engine=accelerate",)),
]

# The ordinary suite runs each on two ranks without checkpointing, and these also under full checkpointing, and on four.
ALSO = (("ddp", ()), ("zero2", ()), ("fsdp_full_shard", ()))


def data_parallel(strategy: str, world_size: int = 2, checkpointing: str = "none", *more: str) -> Combination:
    """Return the combination of a strategy of data parallelism, with further overrides."""
    return Combination(strategy, world_size, (*more, f"checkpointing={checkpointing}", TWO_LAYERS))


_ALL = {
    (name, more, world_size, kind): data_parallel(name, world_size, kind, *more)
    for world_size, kinds in CHECKPOINTING.items()
    for kind, (name, more) in itertools.product(kinds, STRATEGIES)
}

DATA_PARALLEL = [
    *(data_parallel("single", 1, kind) for kind in CHECKPOINTING[2]),
    *(each for key, each in _ALL.items() if key[:2] in ALSO or key[2:] == (2, "none")),
]

# DeepSpeed's settings for speed, whose layout and training are proven, and not the papers' volumes.
TUNED = [Combination(f"zero{stage}_tuned", 2, (TWO_LAYERS,)) for stage in (1, 2, 3)]

# --- tensor and pipeline parallelism

SEQUENCES, SEQ_LEN, VOCABULARY = 2, 32, 258  # a vocabulary that four ranks cannot halve

TENSOR = ("tp", "tp_sp")

PIPELINE = ("pp_gpipe", "pp_1f1b", "pp_interleaved", "pp_zero_bubble")

TENSOR_SIZE = Size(layers=2, micro_batches=2)

PIPELINE_SIZE = Size(layers=4, micro_batches=4)

# By world size. pp_interleaved has two stages a rank, and four ranks would need another model: see LONG.
PIPELINES = {2: PIPELINE, 4: tuple(strategy for strategy in PIPELINE if strategy != "pp_interleaved")}


def model_parallel(strategy: str, world_size: int = 2, checkpointing: str = "none") -> Combination:
    """Return the combination of a strategy of tensor or pipeline parallelism, in the size that suits it."""
    size = PIPELINE_SIZE if strategy in PIPELINE else TENSOR_SIZE
    if strategy == "pp_interleaved" and world_size == 4:
        size = size._replace(layers=8)
    return Combination(strategy, world_size, (f"checkpointing={checkpointing}", *size.options()))


TIED = "model.tie_word_embeddings=true"  # in a pipeline both ends have the table


def tied_ends(strategy: str) -> Combination:
    """Return the combination of a pipeline whose embedding and head are one table."""
    untied = model_parallel(strategy)
    return untied._replace(options=(*untied.options, TIED))


MODEL_PARALLEL = [
    *(model_parallel(strategy) for strategy in TENSOR + PIPELINE),
    model_parallel("pp_1f1b", checkpointing="full"),
    *(model_parallel(strategy, 4) for strategy in ("pp_gpipe", "pp_1f1b")),
    *(model_parallel("single", 1, kind) for kind in CHECKPOINTING[2]),
]

_MORE_MODEL_PARALLEL = [
    *(model_parallel(strategy, checkpointing="full") for strategy in TENSOR + PIPELINE),
    *(model_parallel(strategy, 4, kind) for kind in CHECKPOINTING[2] for strategy in TENSOR + PIPELINE),
]

# Schedules whose stages are several on a rank; those of whole or halved stages add nothing and are long.
TIED_ENDS = [tied_ends("pp_interleaved")]

# --- precision: the layouts in which each must mean the same

PRECISION_LAYOUTS = {
    "bf16": "single,ddp,zero1,zero3,fsdp_full_shard,tp_sp,pp_zero_bubble",
    "fp16_mixed": "single,ddp,fsdp_full_shard,fsdp_shard_grad_op,tp_sp,pp_zero_bubble,zero2,zero3",
    "bf16_mixed": "single,ddp,zero2,zero3,fsdp_full_shard,tp,pp_1f1b",
}

MORE_IN_BF16 = ("zero1", "fsdp_shard_grad_op", "fsdp_no_shard", "pp_interleaved")


def in_precision(precision: str) -> list[Combination]:
    """Return one combination for each layout of this precision; DeepSpeed has fp16 where a CPU has kernels for it."""
    has_all = precision != "fp16_mixed" or torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return [
        Combination(strategy, 1 if strategy == "single" else 2, (f"precision={precision}", TWO_LAYERS))
        for strategy in PRECISION_LAYOUTS[precision].split(",")
        if has_all or not strategy.startswith("zero")
    ]


COMBINATIONS = [*DATA_PARALLEL, *TUNED, *MODEL_PARALLEL, *TIED_ENDS, *in_precision("bf16_mixed")]

LONG = [
    *(each for each in _ALL.values() if each not in DATA_PARALLEL),
    *(each for each in _MORE_MODEL_PARALLEL if each not in MODEL_PARALLEL),
    *map(tied_ends, ("pp_gpipe", "pp_1f1b", "pp_zero_bubble")),
    *(Combination(name, 2, ("precision=bf16_mixed",)) for name in MORE_IN_BF16),
]
