"""The description of a Hugging Face model that is traced once and stored with the run: plain data, without torch."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class HFModelInfo:
    """A causal language model of the transformers library, as its own configuration builds it.

    FLOPs are those of one sequence of train.seq_len tokens, as it runs on a CPU.
    """

    config: dict[str, Any]  # its config.json, from which the ranks build it
    shapes: dict[str, tuple[int, ...]]  # of every parameter; a tied one appears once
    layers: tuple[str, ...]  # paths of the decoder layers
    head: str  # path of the head
    tensor_plan: dict[str, str]  # tensor-parallel style by module path: a key of tensor_plan.SHARD_DIM or the library's
    # Paths of modules in layers that the recomputation of a checkpointed layer does not run to their end.
    not_recomputed_modules: tuple[str, ...] = field(metadata={"old_key": "unfinished"})
    # Whether all of these are nn.Linear modules, and none calls torch's functions in another way.
    not_recomputed_are_linear: bool = field(metadata={"old_key": "unfinished_are_linear"})
    forward_flops: int
    layers_flops: int  # the part of forward in the decoder layers
    step_flops: int  # forward and backward
    # The scores that backward recomputes in a fused attention kernel, wherever there is one.
    attention_recompute_flops: int = field(metadata={"old_key": "remade_flops"})
    checkpoint_recompute_flops: int = field(metadata={"old_key": "again_flops"})  # what full checkpointing adds
