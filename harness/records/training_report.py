"""What one rank reports of a training itself: losses, gradient norms, and fingerprints of gradients and updates."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dimension of a whole tensor


class TensorFingerprint(NamedTuple):
    """A rank's shard of a tensor, reduced to two numbers. NaN is None after it was written to a file."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    square: float | None  # sum of squares
    projection: float | None  # inner product with the parameter's random vector of unit variance


class StateShard(NamedTuple):
    """A rank's shard of a parameter, gradient or optimizer state, without its values."""

    name: str
    state_name: str  # which optimizer state it is; empty for the values themselves
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    dtype: str


def tensors(cls: Callable[..., NamedTuple]) -> Any:
    """Return a field of fingerprints or shards, which a rank's file has as arrays, because there are many."""

    def read(entries: Sequence[Sequence[Any]]) -> list[NamedTuple]:
        return [cls(*map(_as_tuples, entry)) for entry in entries]

    return field(default=(), metadata={"read": read})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


# The keys of attributes in a rank's file where these are others.
FILE_KEYS = {
    "peak_rss_bytes": "peak_host_bytes",
    "gradient_bytes_by_device": "placed_gradients",
    "max_in_flight_micro_batches": "in_flight",
    "host_usage": "used",
    "time_breakdown": "traced",
    "non_torch_bytes": "outside_bytes",
    "num_alloc_retries": "allocation_retries",
    "num_ooms": "out_of_memory_errors",
    "dropout_seed": "masks_seed",
    "dropout_rng_ranks": "masks_ranks",
    "host_state": "on_host",
    "state_bytes_by_device": "placed",
    "parameter_shards": "parameters",
    "optimizer_shards": "optimizer",
    "rss_bytes": "host_bytes",
}


class FromJson:
    """A frozen dataclass that is read from JSON: unknown keys are ignored, and missing ones leave the default."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build the dataclass from the values of a file."""
        known: dict[str, Any] = {}
        for entry in dataclasses.fields(cls):  # type: ignore[arg-type]
            value = values.get(FILE_KEYS.get(entry.name, entry.name))
            if value is not None:
                read = entry.metadata.get("read")
                known[entry.name] = read(value) if read else value
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class TrainingReport(FromJson):
    """The evidence of what one rank trained, by which two trainings are compared.

    Losses and gradient norms cover every step, and are None where they are not finite. The first gradients, moments and
    updates are those of the first step whose gradients did not overflow.
    """

    losses: Sequence[float | None] = ()
    grad_norms: Sequence[float | None] = ()
    skipped_steps: int = 0  # because gradients overflowed
    first_gradients: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
    first_moments: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
    # The differences between the parameters, or their masters, after the first update and the initial weights.
    first_updates: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
    last_gradients: Sequence[TensorFingerprint] = tensors(TensorFingerprint)
