"""What a model from outside says of itself, asked once and kept with the run: plain data. Imports no torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HFModelInfo:
    """A causal language model of the transformers library as its own configuration makes it.

    Operations are of one sequence of train.seq_len tokens, as they run on a CPU.
    """

    config: dict[str, Any]  # its config.json, which the ranks build from
    shapes: dict[str, tuple[int, ...]]  # every parameter; a tied one once
    layers: tuple[str, ...]  # paths of the decoder layers
    head: str  # path of the head
    tensor_plan: dict[str, str]  # how its own plan cuts modules, by their paths: of placement.CUT_DIMENSION, or a word
    unfinished: tuple[str, ...]  # modules of layers that a checkpointed second forward does not run to their end
    unfinished_are_linear: bool  # and not torch's functions called in another way
    forward_flops: int
    layers_flops: int  # of forward, in the decoder layers
    step_flops: int  # forward and backward
    remade_flops: int  # of backward: scores that a fused attention kernel makes again, wherever there is one
    again_flops: int  # what full checkpointing adds

    def is_in_decoder_layer(self, name: str) -> bool:
        """Whether a parameter or module is part of a decoder layer."""
        return any(name.startswith(f"{layer}.") for layer in self.layers)
