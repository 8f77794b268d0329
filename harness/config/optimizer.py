"""What an optimizer keeps for each parameter and what its update moves, for all that plans, builds and proves it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerState:
    """A tensor that an optimizer keeps for each parameter, divided among ranks as the optimizer is."""

    name: str  # torch's name of it
    width: float = 1.0  # of an element, in the width of a master


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of torch. Its update works element by element, and so sends nothing beside what the layout sends."""

    name: str  # its class in torch.optim
    settings: tuple[str, ...]  # its arguments that are keys of `train`
    states: tuple[OptimizerState, ...]
    gradient_state: str  # the state that is a multiple of the clipped gradient after the first update
    update_bytes: float  # read and written for each parameter in 16-bit mixed precision, by one pass over all tensors
    foreach_copies: int  # the masters' copies that torch's foreach operators make at once; the fused kernel makes none
    kernels: Mapping[str, str]  # the implementation, fused or foreach, by the operator that shows that it ran


# The update reads the gradient, and reads and writes master and both moments, in fp32; it writes the 16-bit weight.
ADAMW = OptimizerSpec(
    name="AdamW",
    settings=("lr", "betas", "eps", "weight_decay"),
    states=(OptimizerState("exp_avg"), OptimizerState("exp_avg_sq")),
    gradient_state="exp_avg",
    update_bytes=4 + 2 * 3 * 4 + 2,
    foreach_copies=1,  # the roots of all second moments
    kernels={"aten::_fused_adamw_": "fused", "aten::_foreach_sqrt": "foreach"},
)

OPTIMIZERS = (ADAMW,)
STATE_NAMES = tuple(dict.fromkeys(state.name for optimizer in OPTIMIZERS for state in optimizer.states))
