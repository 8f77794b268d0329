"""The entry of the command line: the first argument decides which command runs, and what is imported for it."""

import re
import sys
from collections.abc import Sequence

from harness.cli.commands import COMMANDS
from harness.cli.notice import import_slowly

HELP = ("-h", "--help")

# Words that other programs have, which are no command because settings alone make runs.
RUN_WORDS = ("run", "train", "launch", "start", "bench", "benchmark", "sweep")

LIST_WORDS = {"list": "", "strategies": "strategies", "models": "models", "clusters": "clusters", "sweeps": "sweeps"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    The first argument is a command word, `--help` or `--version`; anything else is an override of the configuration
    that is then run. Without arguments the help is shown and nothing is trained.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_run = bool(words) and words[0] not in COMMANDS
    if not words or words[0] == "help" or (is_run and set(HELP) & set(words)):
        from harness.cli.help import help_text

        print(help_text())
        return 0
    if words[0] == "--version":
        from harness import __version__

        print(f"harness {__version__}")
        return 0
    is_word = re.fullmatch(r"[A-Za-z]\w*", words[0]) and not "".join(words[1:2]).startswith("=")
    if is_run and is_word:
        print(unknown_command_text(words), file=sys.stderr)
        return 2
    name, rest = ("harness.cli.compose", words) if is_run else (COMMANDS[words[0]][0], words[1:])
    module = import_slowly(name, f"harness {words[0]}: loading" if not is_run else "harness: loading")
    status: int = module.main(rest)
    return status


def unknown_command_text(words: Sequence[str]) -> str:
    """Return why a first word cannot be run, with what to type instead."""
    import difflib

    from harness.config.mistakes import choices_of, group_names, similar_choices

    word, rest = words[0], list(words[1:])
    problem = f"{word} is neither a command nor KEY=VALUE"
    for group in (word, "strategy", "model", "sweeps"):
        name = rest[0] if word == group and rest else word
        if group in group_names() and name in choices_of(group):
            return f"{problem}: type harness {group}={name}"
    if word in group_names() and rest and similar_choices(word, rest[0]):
        return f"{problem}: type harness {similar_choices(word, rest[0])[0]}"
    if word in group_names():
        return f"{problem}: type harness {word}=NAME with one of {', '.join(choices_of(word))}"
    if word in RUN_WORDS:
        names = [f"sweeps={name}" if name in choices_of("sweeps") else name for name in rest]
        return f"{problem}, because settings alone make runs: type harness {' '.join(names) or 'strategy=zero3'}"
    if word == "version":
        return f"{problem}: type harness --version"
    if word in LIST_WORDS:
        return f"{problem}: type harness ls {LIST_WORDS[word] or ''.join(rest[:1]) or 'strategies'}"
    similar = difflib.get_close_matches(word, COMMANDS, 1)
    remedy = f"type harness {similar[0]}" if similar else f"choose {', '.join(COMMANDS)}, or write KEY=VALUE"
    return f"{problem}: {remedy}"
