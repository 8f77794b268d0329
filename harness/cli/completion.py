"""harness completion bash|zsh|fish: a script for the shell, which asks this program what may follow."""

import ast
import importlib.util
import typing
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.cli.command import argument, command
from harness.cli.ls import KINDS
from harness.cli.main import COMMANDS
from harness.config.mistakes import choices_of, group_names, known_keys
from harness.util.errors import run_command

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

INSTALL = {
    "bash": 'write this line into ~/.bashrc: eval "$(harness completion bash)"',
    "zsh": 'write this line into ~/.zshrc: eval "$(harness completion zsh)"',
    "fish": "harness completion fish > ~/.config/fish/completions/harness.fish",
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
    if last.startswith("-"):
        yield from command_options(word)
    elif word == "ls":
        yield from KINDS
    elif word == "completion":
        yield from SHELLS
    elif word != "selftest":
        depth = 2 if word in ("export", "explain") and last.count("/") > 1 else 1
        yield from (str(path) for path in Path("results").glob("/".join("*" * depth)) if path.is_dir())


def command_options(word: str) -> list[str]:
    """Return the options of a command from its source, because importing the module can take seconds."""
    spec = importlib.util.find_spec(f"harness.cli.{word}")
    assert spec is not None and spec.origin is not None
    calls = [node for node in ast.walk(ast.parse(Path(spec.origin).read_text())) if isinstance(node, ast.Call)]
    table = [call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id == "argument"]
    names = [ast.literal_eval(argument) for arguments in table for argument in arguments]
    return ["--help", *(name for name in names if name.startswith("--"))]


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


@command(
    "completion",
    "Print the script that completes commands, groups, keys and values in a shell.",
    argument("shell", choices=list(SHELLS)),
    epilog="; ".join(f"{shell}: {how}" for shell, how in INSTALL.items()),
)
def print_script(options: Namespace) -> None:
    """Print the script of a shell."""
    print(SHELLS[options.shell], end="")


def main(arguments: Sequence[str]) -> int:
    """Run `harness completion`, or answer the script's own question, and return the exit status."""
    if arguments[:1] == ["query"]:
        return run_command(lambda: print("\n".join(candidates(" ".join(arguments[1:])))))
    return print_script(arguments)
