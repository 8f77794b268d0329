"""The text of `harness --help`, made from the files in conf/ and sweeps/ without loading any of them."""

import textwrap

from harness import __version__
from harness.cli.commands import COMMANDS
from harness.config.locations import conf_folders, names_in, sweeps_folders

EXAMPLES = (
    ("harness strategy=zero3 model=tiny", "one run; ends with its row"),
    ("harness -m strategy=ddp,zero1,zero2,zero3 checkpointing=none,full", "a sweep over every combination"),
    ("harness sweeps=quickstart", "a named sweep, sweeps/quickstart.yaml"),
    ("harness report results/quickstart", "the report again, from the recorded files"),
    ("harness strategy=zero3 --cfg job", "print the whole configuration and run nothing"),
)
GROUPS = ("model", "strategy", "checkpointing", "precision", "data", "cluster", "train", "proof", "tracking")
_WIDTH = 100


def help_text() -> str:
    """Return the help: usage, commands, examples, configuration groups and sweeps."""
    lines = [
        f"harness {__version__}: compare training strategies by measuring them.",
        "",
        "usage: harness [-m] KEY=VALUE ...    run what the overrides describe (-m: every combination of comma lists)",
        "       harness COMMAND ...           work with recorded runs; `harness COMMAND --help` explains each",
        "       harness --help | --version",
        "",
        "commands:",
        *(f"  {word:<8} {about}" for word, (_, about) in COMMANDS.items()),
        "",
        "examples:",
        *(f"  {command}\n      {about}" for command, about in EXAMPLES),
        "",
        "configuration groups (GROUP=NAME), searched in ./conf first:",
        *(_listed(group, names_in(conf_folders(), group)) for group in GROUPS),
        _listed("sweeps", names_in(sweeps_folders(), "")),
    ]
    return "\n".join(lines)


def _listed(group: str, names: list[str]) -> str:
    return textwrap.fill(
        " ".join(names), _WIDTH, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16, break_on_hyphens=False
    )
