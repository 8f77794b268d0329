"""The configuration of activation checkpointing and of activation offload."""

from dataclasses import dataclass
from typing import Literal, get_args

from harness.config.validation import require, require_one_of, require_positive

Checkpointing = Literal["none", "full", "every_n", "selective", "attention"]

RECOMPUTING_MODES = ("full", "every_n", "selective")  # the modes that call a layer's forward a second time


@dataclass(frozen=True)
class CheckpointingConfig:
    """The selection of the parts of forward that backward computes a second time instead of saving their results."""

    name: Checkpointing  # The kind of checkpointing.
    every: int = 1  # The n of every_n: the last of every n decoder layers is checkpointed, counted through all stages.
    # Whether the host's memory holds the activations that layers keep for backward.
    offload_activations: bool = False

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
