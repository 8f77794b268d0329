"""The entry of the command line: the first argument decides which command runs, and what is imported for it."""

import importlib
import re
import signal
import sys
from collections.abc import Sequence

from harness.cli.commands import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    The first argument is a command word, `--help` or `--version`; anything else is an override of the configuration
    that is then run. Without arguments the help is shown and nothing is trained.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends them without a traceback
        interruptible = True
    else:
        interruptible = False
    if not words or words[0] in ("-h", "--help", "help"):
        from harness.cli.help import help_text

        print(help_text())
        return 0
    if words[0] == "--version":
        from harness import __version__

        print(f"harness {__version__}")
        return 0
    if re.fullmatch(r"[A-Za-z]\w*", words[0]) and words[0] not in COMMANDS:
        print(unknown_command_text(words[0]), file=sys.stderr)
        return 2
    name, rest = (COMMANDS[words[0]][0], words[1:]) if words[0] in COMMANDS else ("harness.cli.run", words)
    module = importlib.import_module(name)
    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status: int = module.main(rest)
    return status


def unknown_command_text(word: str) -> str:
    """Return why a word cannot be run, with the command that is spelled most like it."""
    import difflib

    similar = difflib.get_close_matches(word, COMMANDS, 1)
    remedy = f"choose {similar[0]}" if similar else f"choose {', '.join(COMMANDS)}, or write KEY=VALUE"
    return f"{word} is neither a command nor KEY=VALUE: {remedy}"
