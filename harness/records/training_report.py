"""What one rank reports of a training itself: losses, gradient norms, and fingerprints of gradients and updates."""

import dataclasses
from collections.abc import Mapping, Sequence
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


def read_fingerprints(entries: Sequence[Sequence[Any]]) -> list[TensorFingerprint]:
    """Return the fingerprints in a rank's file, which are arrays there."""
    return [
        TensorFingerprint(name, tuple(shape), tuple((start, stop) for start, stop in box), square, projection)
        for name, shape, box, square, projection in entries
    ]


def read_shards(entries: Sequence[Sequence[Any]]) -> list[StateShard]:
    """Return the shards in a rank's file, which are arrays there."""
    return [
        StateShard(name, state_name, tuple(shape), tuple((start, stop) for start, stop in box), dtype)
        for name, state_name, shape, box, dtype in entries
    ]


_AS_ARRAY = (TensorFingerprint, StateShard)  # written as JSON arrays, because there are many


def fingerprints() -> Any:
    """Return a field of fingerprints."""
    return field(default=(), metadata={"read": read_fingerprints})


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


def to_plain(value: Any) -> Any:
    """Return dataclasses and named tuples as the plain values that stand for them in a file."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = dataclasses.fields(value)
        return {FILE_KEYS.get(e.name, e.name): to_plain(getattr(value, e.name)) for e in entries}
    if isinstance(value, tuple) and hasattr(value, "_asdict") and not isinstance(value, _AS_ARRAY):
        return {key: to_plain(entry) for key, entry in value._asdict().items()}
    if isinstance(value, Mapping):
        return {key: to_plain(entry) for key, entry in value.items()}
    return [to_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, kw_only=True)
class TrainingReport(FromJson):
    """The evidence of what one rank trained, by which two trainings are compared.

    Losses and gradient norms cover every step, and are None where they are not finite. The first gradients, moments and
    updates are those of the first step whose gradients did not overflow.
    """

    losses: Sequence[float | None] = ()
    grad_norms: Sequence[float | None] = ()
    skipped_steps: int = 0  # because gradients overflowed
    first_gradients: Sequence[TensorFingerprint] = fingerprints()
    first_moments: Sequence[TensorFingerprint] = fingerprints()
    # The differences between the parameters, or their masters, after the first update and the initial weights.
    first_updates: Sequence[TensorFingerprint] = fingerprints()
    last_gradients: Sequence[TensorFingerprint] = fingerprints()
