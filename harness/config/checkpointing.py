"""The configuration of activation checkpointing and of activation offload."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from harness.config.from_dict import Positive, require

Checkpointing = Literal["none", "full", "every_n", "selective", "attention"]
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
        is_every_n = self.name == "every_n"
        rule = f"is for checkpointing=every_n, not {self.name}: choose it, or 1"
        require(is_every_n or self.every == 1, "checkpointing.every", self.every, rule)
        require(not is_every_n or self.every > 1, "checkpointing.every", self.every, "is full: choose 2 or more")
        key, products = "checkpointing.saved_products", self.saved_products
        rule = f"is for checkpointing=selective, not {self.name}: choose it, or all"
        require(self.name == "selective" or products == "all", key, products, rule)

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
