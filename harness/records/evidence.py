"""Small parts of a rank's report, which are tuples: what its optimizers and its dropout did, and its start."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=NamedTuple)


def read_tuple(cls: Callable[..., T], values: Sequence[Any]) -> T:
    """Return the named tuple that a rank's file has as an array."""
    return cls(*map(_as_tuples, values))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


class DrawnMasks(NamedTuple):
    """The dropout masks of a step; those inside fused attention are not among them."""

    elements: int = 0  # of the masks of first forwards
    nonzero: int = 0  # of these elements
    second: int = 0  # masks that were drawn in second forwards
    changed: int = 0  # of these, those that no first forward drew
    last: float | None = (
        None  # a sum over the last first one, of a branch of the residual stream, that tells it from others
    )


class UpdateReport(NamedTuple):
    """What a rank's optimizers have updated so far."""

    settings: tuple[tuple[Any, ...], ...] = ()  # of any group: (key, value) of each
    elements: tuple[tuple[int, int], ...] = ()  # (steps, elements that were updated in so many), padding included


class UpdateExcess(NamedTuple):
    """How far the worst first update is from the optimizer's formula: more than 1 is not its."""

    name: str = ""  # of the parameter
    excess: float = 0.0


class StartUp(NamedTuple):
    """The seconds from the start of a rank's process to the end of its first step, one after another."""

    import_seconds: float = 0.0  # until it joins; modules that its parent process had imported cost nothing here
    join_seconds: float = 0.0  # until all ranks have joined the process group
    build_seconds: float = 0.0  # until the first step begins: the engine, the data and the measurements
    first_step_seconds: float = 0.0  # of the first step, without the fingerprints that the harness takes in it
    compile_seconds: float = 0.0  # of the first step, those in which torch.compile compiled


class CheckpointReport(NamedTuple):
    """What a checkpoint cost a rank, and the step after it: without an interruption, and from the files.

    A step is exact texts by names: numbers and digests of tensors.
    """

    save_seconds: float = 0.0  # that training waited
    save_total_seconds: float = 0.0  # until the files were complete
    load_seconds: float = 0.0  # of a new engine
    rank_bytes: int = 0  # of the files that this rank wrote
    bytes: int = 0  # of all files
    save_peak_bytes: int | None = None  # the most on the device while training waited
    file_system: str = ""
    uninterrupted: Mapping[str, str] = {}
    resumed: Mapping[str, str] = {}
