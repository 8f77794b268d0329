"""The optimizers as data: what each keeps, allocates, reads and writes for a parameter.

Engines, proof, planner and simulation read OPTIMIZERS, and `optimizer.name` chooses among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from harness.config.from_dict import Finite, one_of, require

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}  # bytes per element, by torch's dtype names


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for each tensor that it updates; by default it is as wide as a master."""

    dtype: str | None = None  # of a narrow state, by torch's name
    least: int = 0  # the elements from which on a tensor's state is narrow
    block: int = 1  # the elements of a narrow state that share a scale; only blocks as long as this have one
    block_bytes: int = 0  # of a scale
    table_bytes: int = 0  # of the values that the codes of a narrow state stand for

    def dtype_of(self, elements: int, master: str) -> str:
        """Return the dtype of the state of a tensor with so many elements and masters of this dtype."""
        is_narrow = self.dtype is not None and elements >= self.least and elements % self.block == 0
        return self.dtype if self.dtype is not None and is_narrow else master

    def bytes(self, elements: int, master: str) -> int:
        """Return the bytes of the state of a tensor with so many elements."""
        if self.dtype_of(elements, master) != self.dtype:
            return DTYPE_BYTES[master] * elements
        return DTYPE_BYTES[self.dtype] * elements + elements // self.block * self.block_bytes + self.table_bytes


@dataclass(frozen=True)
class UpdateRule:
    """A class of optimizer: its update of one parameter, and what that takes."""

    name: str  # of the class
    settings: tuple[str, ...]  # its arguments that are keys of `train` or of `optimizer`
    states: Mapping[str, State]  # by torch's names
    gradient_state: str  # the state that tells the clipped gradient after the first update
    update_bytes: float  # read and written for each parameter in 16-bit mixed precision, by one pass over all tensors
    module: str = "torch.optim"  # where the class is
    library: str = "torch"  # that must be installed
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further ones
    formula: str | None = None  # of the first update, in harness.measure.optimizer_steps; None needs whole matrices
    foreach_copies: int = (
        0  # the masters' copies that torch's foreach operators make at once; a fused kernel makes none
    )
    temporary_bytes: int = 0  # for each element of the tensor that is updated, where that is one after another
    decoding_bytes: int = 0  # for each element of one whose states are narrow, beside these
    compiled_bytes: int = 0  # for each element of one whose states are narrow, where a compiler fuses the update
    kernels: Mapping[str, str] = field(default_factory=dict)  # fused or foreach, by the operator that shows that it ran
    # The products of a Newton-Schulz iteration and its number, for an update that needs the whole matrix.
    iterations: int = 0

    def temporaries(self, elements: int, master: str, is_compiled: bool) -> int:
        """Return the bytes of temporaries while a tensor with so many elements is updated by itself."""
        is_narrow = any(state.dtype_of(elements, master) != master for state in self.states.values())
        if is_compiled:
            return elements * self.compiled_bytes * is_narrow
        return elements * (self.temporary_bytes + self.decoding_bytes * is_narrow)


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: the rule of all parameters, and perhaps another one of the matrices in the model's layers."""

    rule: UpdateRule
    of_matrices: UpdateRule | None = None
    # Why it cannot update a flat buffer of all parameters, as DeepSpeed has it; empty where it can.
    flat_problem: str = ""
    script: str = ""  # the class by which an exported script trains the same; empty where none does
    trainer: str = ""  # its name in the arguments of transformers' Trainer; empty where it has none

    @property
    def rules(self) -> tuple[UpdateRule, ...]:
        """All rules."""
        return (self.rule, *([self.of_matrices] if self.of_matrices else []))

    @property
    def needs_whole(self) -> bool:
        """Whether an update needs whole matrices."""
        return any(rule.iterations for rule in self.rules)

    @property
    def states(self) -> dict[str, State]:
        """The states of all rules."""
        return {name: state for rule in self.rules for name, state in rule.states.items()}

    def keeps(self, state_name: str, is_matrix: bool) -> bool:
        """Return whether a parameter has a state of this name, if that is one of the optimizer's."""
        return state_name not in self.states or state_name in self.rule_of(is_matrix).states

    def rule_of(self, is_matrix: bool) -> UpdateRule:
        """Return the rule of a parameter that is, or is not, a matrix of a layer."""
        return self.of_matrices if self.of_matrices and is_matrix else self.rule


LR, DECAY = "lr", "weight_decay"
LOW_BIT = "harness.engines.torch.low_bit"

# The update by torch/optim/adamw.py with fused=True is one pass: it reads the gradient, reads and writes master and
# both moments, in fp32, and writes the 16-bit weight.
ADAMW = UpdateRule(
    "AdamW",
    settings=(LR, "betas", "eps", DECAY),
    states={"exp_avg": State(), "exp_avg_sq": State()},
    gradient_state="exp_avg",
    update_bytes=4 + 2 * 3 * 4 + 2,
    formula="adamw",
    foreach_copies=1,  # the roots of all second moments
    kernels={"aten::_fused_adamw_": "fused", "aten::_foreach_sqrt": "foreach"},
)

# torch has no fused kernel of SGD for sharded tensors. Its foreach operators add the weight decay to copies of all
# gradients. Its pass reads the gradient, reads and writes master and momentum, and writes the 16-bit weight.
SGD = UpdateRule(
    "SGD",
    settings=(LR, "momentum", DECAY),
    states={"momentum_buffer": State()},
    gradient_state="momentum_buffer",
    update_bytes=4 + 2 * 2 * 4 + 2,
    arguments={"foreach": True},
    formula="sgd",
    foreach_copies=1,
)


def low_bit(name: str, state: State, update_bytes: float, decoding_bytes: int, compiled_bytes: int) -> UpdateRule:
    """Return the rule of torchao's AdamW with narrow states, which computes in fp32 with one tensor after another.

    A tensor's temporaries are those of its operators one by one, as they run on a CPU: six tensors in fp32 (torchao,
    single_param_adam), and what it takes to decode 8 bits and to encode them. A GPU runs them compiled: Inductor's code
    keeps both new moments of 8 bits in fp32 between two kernels, and nothing of others (torch 2.13).
    """
    states = {"exp_avg": state, "exp_avg_sq": state}
    return UpdateRule(
        name,
        ADAMW.settings,
        states,
        "exp_avg",
        update_bytes,
        module=LOW_BIT,
        library="torchao",
        formula="adamw",
        temporary_bytes=6 * 4,
        decoding_bytes=decoding_bytes,
        compiled_bytes=compiled_bytes,
    )


NARROW_FROM = 4096  # elements, by torchao/optim/adam.py (_new_buffer)
EIGHT_BIT = State("uint8", NARROW_FROM, block=256, block_bytes=4, table_bytes=256 * 4)

# The momentum and its update are elementwise. Five Newton-Schulz iterations of the whole matrix follow, in bf16
# (torch/optim/_muon.py). The rate is scaled so that an update is as large as AdamW's (arXiv 2502.16982, section 2.2).
MUON = UpdateRule(
    "Muon",
    settings=(LR, "momentum", DECAY),
    states={"momentum_buffer": State()},
    gradient_state="momentum_buffer",
    update_bytes=4 + 2 * 2 * 4 + 2,
    module="harness.engines.torch.muon",
    arguments={"adjust_lr_fn": "match_rms_adamw"},
    iterations=5,
)

OPTIMIZERS = {
    "adamw": OptimizerSpec(ADAMW, script="torch.optim.AdamW", trainer="adamw_torch"),
    "adamw_8bit": OptimizerSpec(
        low_bit("AdamW8bit", EIGHT_BIT, 4 + 2 * 4 + 2 * 2 * 1 + 2, decoding_bytes=29, compiled_bytes=8),
        flat_problem="a flat buffer has seldom a multiple of 256 elements, and torchao leaves others in 32 bits",
        script="torchao.optim.AdamW8bit",
        trainer="adamw_torch_8bit",
    ),
    "adamw_bf16": OptimizerSpec(
        low_bit("AdamWBf16", State("bfloat16"), 4 + 2 * 4 + 2 * 2 * 2 + 2, decoding_bytes=0, compiled_bytes=0)
    ),
    "sgd": OptimizerSpec(SGD, script="torch.optim.SGD"),
    "muon": OptimizerSpec(
        ADAMW, of_matrices=MUON, flat_problem="it needs whole matrices, and a flat buffer has parts of them"
    ),
}

STATE_NAMES = tuple(dict.fromkeys(name for optimizer in OPTIMIZERS.values() for name in optimizer.states))


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of a run, beside what `train` says about it."""

    name: Annotated[str, one_of(*OPTIMIZERS)] = "adamw"  # The name of the optimizer.
    momentum: Finite = 0.0  # The share of the momentum that the next step keeps; sgd and muon have one.

    def __post_init__(self) -> None:
        has_momentum = any("momentum" in rule.settings for rule in self.spec.rules)
        rule = f"is for optimizer=sgd or muon, not {self.name}: choose one of them, or 0"
        require(has_momentum or not self.momentum, "optimizer.momentum", self.momentum, rule)
        require(self.momentum < 1, "optimizer.momentum", self.momentum, "never decays: choose less than 1")

    @property
    def spec(self) -> OptimizerSpec:
        """What the optimizer does."""
        return OPTIMIZERS[self.name]
