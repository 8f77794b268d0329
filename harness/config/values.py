"""A configuration in plain values, as Hydra composes it and as files store it; its values are not checked yet."""

from collections.abc import Sequence
from typing import Any, TypedDict

GroupValues = dict[str, Any]  # the values of one group; harness.config.from_dict checks their keys and types


class ConfigValues(TypedDict, total=False):
    """The keys of a whole configuration: those of RunConfig and those of CommandConfig.

    A group or a key may be missing in the record of an earlier version.
    """

    name: str
    results_dir: str
    proof: GroupValues
    tracking: GroupValues
    measure: GroupValues
    sweep: GroupValues
    plan: GroupValues
    repeats: int
    timeout_seconds: float
    hang_seconds: float
    preflight: bool
    retry: Sequence[str]
    stop_after: Sequence[str | int | float]
    force: bool
    model: GroupValues
    strategy: GroupValues
    checkpointing: GroupValues
    precision: GroupValues
    data: GroupValues
    cluster: GroupValues
    train: GroupValues
    world_size: int | None
    repeat: int
    launch: str
    simulate: GroupValues
