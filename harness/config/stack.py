"""The configuration of a stack: what differs between implementations that train the same layout. Imports no torch.

Only the planner reads it, and it is no part of a run's identity.
"""

from dataclasses import dataclass, field

import yaml

from harness.config.from_dict import from_dict
from harness.config.locations import conf_folders, files_in
from harness.config.stack_memory import StackMemory
from harness.config.stack_timing import StackTiming
from harness.util.errors import UserError


@dataclass(frozen=True)
class StackConfig:
    """An implementation of distributed training, described by what its source says it allocates and overlaps."""

    name: str  # The name of the stack.
    source: str  # The repository, version and files that the values are from.
    memory: StackMemory = field(default_factory=StackMemory)
    timing: StackTiming = field(default_factory=StackTiming)


def stack_names() -> list[str]:
    """Return the names of all stacks that have a file."""
    return list(files_in(conf_folders(), "stack"))


def load_stack(name: str) -> StackConfig:
    """Return the stack of this name as its file in conf/stack has it. Raises UserError if there is none."""
    files = files_in(conf_folders(), "stack")
    if name not in files:
        raise UserError(f"stack={name} is not known: choose {', '.join(files)}")
    stack: StackConfig = from_dict(StackConfig, yaml.safe_load(files[name].read_text()))
    return stack
