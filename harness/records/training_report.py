"""What one rank reports of a training itself: losses, gradient norms, and fingerprints of gradients and updates."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.records.json_fields import FromJson, keyed
from harness.records.tensor_shards import TensorFingerprint, read_fingerprints


@dataclass(frozen=True, kw_only=True)
class TrainingReport(FromJson):
    """The evidence of what one rank trained, by which two trainings are compared.

    Losses and gradient norms cover every step, and are None where they are not finite. The first gradients, moments and
    updates are those of the first step whose gradients did not overflow.
    """

    losses: Sequence[float | None] = ()
    grad_norms: Sequence[float | None] = ()
    skipped_steps: int = 0  # because gradients overflowed
    first_gradients: Sequence[TensorFingerprint] = field(
        default=(), metadata=keyed("first_gradients", read_fingerprints)
    )
    first_moments: Sequence[TensorFingerprint] = field(default=(), metadata=keyed("first_moments", read_fingerprints))
    # The differences between the parameters, or their masters, after the first update and the initial weights.
    first_updates: Sequence[TensorFingerprint] = field(default=(), metadata=keyed("first_updates", read_fingerprints))
    last_gradients: Sequence[TensorFingerprint] = field(default=(), metadata=keyed("last_gradients", read_fingerprints))
