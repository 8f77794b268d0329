"""A training step as a tape of allocations, of which peaks, their parts and their phases are readings. No torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

Bytes = dict[str, int]  # by what fills them: gradients, buffers, activations, loss, temporaries

PARTS = ("gradients", "buffers", "activations", "loss", "temporaries")  # of a rank's bytes beside its state


class Moment(NamedTuple):
    """All that is allocated at a moment of a step."""

    total: int
    phase: str  # forward, backward or optimizer
    live: Bytes  # by the names of tensors

    @property
    def parts(self) -> Bytes:
        """The bytes by the parts that the names begin with."""
        parts = dict.fromkeys(PARTS, 0)
        for name, size in self.live.items():
            parts[name.partition("_")[0]] += size
        return parts


@dataclass
class Tape:
    """The moments of a step, or of a pass through one of its stages, in their order.

    A tensor's name begins with the part that it belongs to: `buffers_flat`. Tensors that always come and go together
    share a name.
    """

    live: Bytes = field(init=False, default_factory=dict)
    moments: list[Moment] = field(init=False, default_factory=list)
    phase: str = field(init=False, default="forward")

    def put(self, **sizes: int) -> None:
        """Allocate these tensors, or change their sizes."""
        self.live.update(sizes)
        self.moments.append(Moment(sum(self.live.values()), self.phase, self.live.copy()))

    def drop(self, *names: str) -> None:
        """Free these tensors, as far as they exist."""
        for name in names:
            self.live.pop(name, None)

    def touch(self, **sizes: int) -> None:
        """Allocate temporary tensors and free them."""
        self.put(**sizes)
        self.drop(*sizes)

    @property
    def highest(self) -> Moment:
        """The first of the moments with most bytes."""
        return max(self.moments, key=lambda moment: moment.total)
