"""The description of a Hugging Face model that is traced once and stored with the run: plain data, without torch."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class HFModelInfo:
    """A causal language model of the transformers library, as its own configuration builds it.

    FLOPs are those of one sequence of train.seq_len tokens, as it runs on a CPU. Equality compares all fields; the hash
    leaves out those that are dicts.
    """

    config: dict[str, Any] = field(hash=False)  # The contents of its config.json, from which the ranks build it.
    # The shape of every parameter by its name; a tied one appears once.
    shapes: dict[str, tuple[int, ...]] = field(hash=False)
    layers: tuple[str, ...]  # The paths of the decoder layers, in order.
    head: str  # The path of the head.
    # The tensor-parallel style of each module by its path: a key of harness.layout.layer_spec.SHARD_DIM, or the
    # library's name of a style that is not supported.
    tensor_plan: dict[str, str] = field(hash=False)
    # The paths of modules in layers that the recomputation of a checkpointed layer does not run to their end.
    not_recomputed_modules: tuple[str, ...] = field(metadata={"old_key": "unfinished"})
    # Whether all of these are nn.Linear modules, and none calls torch's functions in another way.
    not_recomputed_are_linear: bool = field(metadata={"old_key": "unfinished_are_linear"})
    forward_flops: int  # The FLOPs of forward.
    layers_flops: int  # The part of forward_flops in the decoder layers.
    step_flops: int  # The FLOPs of forward and backward.
    # The FLOPs of the scores that backward recomputes wherever a fused kernel computes attention.
    attention_recompute_flops: int = field(metadata={"old_key": "remade_flops"})
    # The FLOPs that full checkpointing adds to step_flops.
    checkpoint_recompute_flops: int = field(metadata={"old_key": "again_flops"})
