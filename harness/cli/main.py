"""The entry of the command line: the first argument decides which command runs, and what is imported for it."""

import io
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import __version__
from harness.cli.commands import COMMANDS, KINDS, run_word
from harness.cli.notice import import_slowly
from harness.config.locations import files_in
from harness.launcher.signals import end_unrecorded, restored_handlers
from harness.util.text import UserError, run_command

# Words that other programs have, which are no command because settings alone make runs.
RUN_WORDS = ("run", "train", "launch", "start", "bench", "benchmark", "sweep", "measure", "harness", "fit")

# What starts one process for each rank: the variables that it gives them of their rank and their number, and the one of
# a shell that only the first of them shows. Batch scripts and shells of salloc have SLURM_NTASKS alone, and run once.
STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", ""),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_PTY_PORT"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a mistake in it is one line of output."""
    if arguments is None:
        open_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: run_words(words))


def open_streams() -> None:
    """Open standard streams that are closed to nothing, lest files get their numbers, and let them take any text."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # They stay open as long as the process.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run_words(words: Sequence[str]) -> int | None:
    """Run what the words of a command line ask for, and return its exit status, 0 for None.

    The first one is a command word, `--help` or `--version`; anything else is an override of the configuration that is
    then run. Without words the help is shown and nothing is trained. Raises UserError for a mistake.
    """
    if len(words) == 2 and "help" in words and (commands := COMMANDS.keys() & set(words)):
        words = [*commands, "--help"]
    is_run = bool(words) and words[0] not in COMMANDS
    if not words or words[0] == "help" or (is_run and {"-h", "--help"} & set(words)):
        print(help_text())
        return None
    if words[0] in ("--version", "-V"):
        print(f"harness {__version__}")
        return None
    if is_run and words[0].removeprefix("--") in COMMANDS:
        raise UserError(f"{words[0]} is not an option: type harness {shlex.join([words[0][2:], *words[1:]])}")
    if is_run and re.fullmatch(r"[A-Za-z]\w*", words[0]) and not "".join(words[1:2]).startswith("="):
        raise UserError(unknown_command_text(words))
    if is_run or COMMANDS[words[0]].get("starts_ranks"):
        refuse_copies(os.environ)
    if is_run:
        with restored_handlers():
            end_unrecorded()
            status: int = import_slowly("harness.cli.compose", "harness: loading").main(words)
        return status
    return run_word(words[0], words[1:])


def refuse_copies(variables: Mapping[str, str]) -> None:
    """Raise UserError if these environment variables are of one of several processes that run the same command."""
    for starter, (rank, size, shell) in STARTERS.items():
        if {rank, size} <= variables.keys() and variables[size] not in ("", "1") and shell not in variables:
            raise UserError(
                f"{starter} must not start the harness, which starts the ranks itself ({rank}={variables[rank]} and"
                f" {size}={variables[size]} are set): leave out {starter}, and add hydra/launcher=slurm for several"
                " nodes"
            )


def unknown_command_text(words: Sequence[str]) -> str:
    """Return why a first word cannot be run, with what to type instead."""
    import difflib

    from harness.config.mistakes import PROGRAMS, WORDS, choices_of, foreign_line, group_names, preset, similar_choices

    word, rest = words[0], list(words[1:])
    problem = f"{word} is neither a command nor KEY=VALUE"
    if word in PROGRAMS and rest:
        return f"{problem}: {foreign_line(words, ())}"
    if rest and word in group_names() and rest[0] in choices_of(word):
        return f"{problem}: type harness {word}={rest[0]}"
    if instead := preset(word):
        return f"{problem}: type harness {instead}"
    if word in WORDS:
        return f"{problem}: {WORDS[word]} {shlex.join(rest) if ' harness ' in WORDS[word] else ''}".rstrip()
    if word in RUN_WORDS:
        names = [f"sweeps={name}" if name in choices_of("sweeps") else name for name in rest]
        return f"{problem}, because settings alone make runs: type harness {' '.join(names) or 'strategy=zero3'}"
    if word in group_names():
        names = [
            *(similar_choices(word, rest[0]) if rest else ()),
            f"{word}=NAME with one of {', '.join(choices_of(word))}",
        ]
        return f"{problem}: type harness {names[0]}"
    if word == "version":
        return f"{problem}: type harness --version"
    if word in ("list", *KINDS):
        return f"{problem}: type harness ls {word if word in KINDS else ''.join(rest[:1]) or 'strategies'}"
    similar = difflib.get_close_matches(word, COMMANDS, 1)
    remedy = f"type harness {similar[0]}" if similar else f"choose {', '.join(COMMANDS)}, or write KEY=VALUE"
    return f"{problem}: {remedy}"


# The groups of which the help lists the names.
GROUPS = (
    *("model", "strategy", "checkpointing", "precision", "optimizer", "adapter", "data", "cluster", "train", "proof"),
    "tracking",
)
_WIDTH = 100


def help_text() -> str:
    """Return the help: usage, commands, examples, configuration groups and sweeps."""
    commands = "\n".join(f"  {word:<8} {command['summary']}" for word, command in COMMANDS.items())
    groups = "\n".join(
        textwrap.fill(
            " ".join(files_in(group)),
            _WIDTH,
            initial_indent=f"  {group:<14}",
            subsequent_indent=" " * 16,
            break_on_hyphens=False,
        )
        for group in (*GROUPS, "sweeps")
    )
    text = Path(__file__).with_name("help.txt").read_text("utf-8").rstrip("\n")
    return text.format(version=__version__, commands=commands, groups=groups)
