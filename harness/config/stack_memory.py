"""What an implementation of training allocates, as data: the memory side of a stack. Imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StackMemory:
    """The tensors that an implementation allocates where implementations differ."""

    # The engines whose memory this is: harness is our own, which the exact model predicts from widths and layout, and
    # described is another implementation, which the fields below describe.
    kind: Literal["harness", "described"] = "described"
    master_bytes: int = 4  # The bytes per parameter of the optimizer's master weights; 0 means there are none.
    moment_bytes: int = 8  # The bytes per parameter of both moments of Adam.
    main_gradient_bytes: int = 4  # The bytes per parameter of the buffer that accumulates gradients.
