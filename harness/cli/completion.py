"""harness completion bash|zsh|fish: a script for the shell, which asks this program what may follow."""

import typing
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from harness.cli.commands import CHOICES, COMMANDS
from harness.config.mistakes import choices_of, group_names, known_keys

SHELLS = {
    # bash begins a new word after each of its word breaks, `=` and `:` among them: it wants what follows the last one.
    "bash": """_harness() {
    local line="${COMP_LINE:0:COMP_POINT}" word begun IFS=$'\\n'
    word="${line##*[[:space:]]}"
    begun=""
    if [[ $COMP_WORDBREAKS == *=* ]]; then begun="${word%"${word##*[=:]}"}"; fi
    COMPREPLY=($("${COMP_WORDS[0]/#\\~/$HOME}" completion query "$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$begun"}")
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]]; then compopt -o nospace; fi
}
complete -o default -F _harness harness
""",
    "zsh": """#compdef harness
_harness() {
    local -a candidates
    candidates=("${(@f)$("${words[1]}" completion query "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$candidates" ]]; then compadd -S '' -- $candidates; else _files; fi
}
if (( ! $+functions[compdef] )); then autoload -Uz compinit && compinit; fi
compdef _harness harness
""",
    "fish": """complete -c harness -e
complete -c harness -a '(harness completion query (commandline -cp) 2>/dev/null)'
""",
}

OPTIONS = ("-m", "--help", "--version", "--cfg")


def candidates(line: str) -> list[str]:
    """Return the words that may stand in the place of the last one of a command line, which may be empty or begun.

    A key that needs a value ends with `=`, a group of keys with a dot.
    """
    words = line.split()
    last = words.pop() if words and not line[-1:].isspace() else ""
    earlier = words[1:]
    if earlier and earlier[0] in COMMANDS:
        choices: Iterator[str] = _command_words(earlier[0], last)
    elif earlier[-1:] == ["--cfg"]:
        choices = iter(("job", "hydra", "all"))
    else:
        choices = _settings(last)
        if not earlier:
            choices = iter((*COMMANDS, *choices))
    return [word for word in choices if word.startswith(last)]


def _command_words(word: str, last: str) -> Iterator[str]:
    """Yield what may follow a command word: its options, and the folders or names that it takes."""
    arguments = COMMANDS[word]["arguments"]
    if last.startswith("-"):
        yield from ("--help", *(name for name in arguments if name.startswith("--")))
    elif word in ("ls", "completion"):
        yield from CHOICES["kinds" if word == "ls" else "shells"]
    elif word not in ("selftest", "import"):
        depth = 2 if word in ("export", "explain") and last.count("/") > 1 else 1
        yield from (str(path) for path in Path("results").glob("/".join("*" * depth)) if path.is_dir())


def _settings(last: str) -> Iterator[str]:
    """Yield the settings and options of a run."""
    key, equals, value = last.partition("=")
    if equals:
        before, comma, _ = value.rpartition(",")
        yield from (f"{key}={before}{comma}{choice}" for choice in _values(key))
        return
    yield from OPTIONS
    yield from (f"{group}=" for group in group_names())
    keys = known_keys()
    owners = {name.partition(".")[0] for name in keys if "." in name}
    for name in keys:
        owner, dot, _ = name.partition(".")
        if (not dot and name not in owners) or (dot and last.startswith(f"{owner}.")):
            yield f"{name}="
    if "." not in last:
        yield from (f"{owner}." for owner in sorted(owners))


def _values(key: str) -> Iterator[str]:
    """Yield the values of a group, or of a key that has few."""
    if key in group_names():
        yield from choices_of(key)
        return
    hint = known_keys().get(key)
    if hint is bool:
        yield from ("true", "false")
    elif typing.get_origin(hint) is typing.Literal:
        yield from map(str, typing.get_args(hint))


def main(options: Namespace) -> None:
    """Print the script of a shell."""
    print(SHELLS[options.shell], end="")
