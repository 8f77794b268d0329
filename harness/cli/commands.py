"""Every command word: what its help says, the arguments that it takes, and its start."""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from harness.cli.notice import import_slowly
from harness.tracking.base import tracker_names

# What can be listed, each by its word in the singular, which is the group of the configuration that it is.
KINDS = {"strategies": "strategy", "models": "model", "clusters": "cluster", "sweeps": "sweep"}


def run_word(word: str, arguments: Sequence[str]) -> int | None:
    """Run `harness WORD` with these arguments and return its exit status, 0 for None.

    The parsed options that its module's main() takes have `settings`, the words that are none, and `fail`, which ends
    the program with a mistake in the arguments.
    """
    if (word, *arguments[:1]) == ("completion", "query"):  # the question of the shell's script
        print("\n".join(import_module("harness.cli.completion").candidates(" ".join(arguments[1:]))))
        return None
    command = COMMANDS[word]
    parser = ArgumentParser(prog=f"harness {word}", description=command.about, epilog=command.epilog)
    for names, options in command.arguments:
        parser.add_argument(*names, **options)
    parsed, settings = parser.parse_known_args(arguments, Namespace(fail=parser.error))
    if settings and not command.takes_settings:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    parsed.settings = settings
    status: int | None = import_slowly(f"harness.cli.{word}", f"harness {word}: loading").main(parsed)
    return status


def argument(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return an argument of a command, as add_argument() of argparse takes it."""
    return names, options


def parse_share(text: str) -> float:
    """Return a percentage such as 5% as a fraction. Raises ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if not match:
        raise ArgumentTypeError(f"{text} is not a percentage: write 5%, or 0% for no growth at all")
    return float(match[1]) / 100


def plural(word: str) -> str:
    """Return the kind that a group of the configuration has in `harness ls`: strategies for strategy."""
    return next((kind for kind, group in KINDS.items() if group == word), word)


class Command(NamedTuple):
    """A command word: the text and the table of its arguments, and whether it also takes settings of runs."""

    about: str
    arguments: Sequence[tuple[tuple[str, ...], dict[str, Any]]]
    epilog: str | None = None
    takes_settings: bool = False


COMPARISON = argument("folder", type=Path, metavar="results/NAME", help="the folder of one comparison")
RUN = argument("run", type=Path, metavar="results/NAME/RUN", help="the folder of one run")
DEVICES = {"choices": ("auto", "cpu", "cuda"), "default": "auto"}

COMMANDS = {
    "plan": Command(
        "Predict memory and time of layouts on any cluster; without a strategy, search for the best.",
        [
            argument("--explain", action="store_true", help="also print the arithmetic of each figure"),
            argument(
                "--report",
                type=Path,
                metavar="FILE",
                help="write a search as FILE.html, or as FILE.md with figures/ and plans.csv beside it",
            ),
        ],
        epilog="KEY=VALUE are the settings of runs, such as model=70b.",
        takes_settings=True,
    ),
    "calibrate": Command(
        "Measure this machine into a cluster file of the current folder, conf/cluster/NAME.yaml: matrix products,"
        " attention, memory, launches, and collectives of its ranks by message size. `harness plan cluster=NAME` then"
        " plans for it, and runs on it predict their step time. It takes about a minute; let nothing else run.",
        [
            argument("--name", help="the name of the cluster; the default is made of ranks and device"),
            argument("--device", **DEVICES, help="the kind of device"),
            argument("--ranks", type=int, help="the ranks that measure; the default is one for each GPU, or 2"),
            argument("--quick", action="store_true", help="a few seconds, with fewer sizes and repetitions"),
            argument("--overwrite", action="store_true", help="replace a file of this name"),
        ],
    ),
    "status": Command("Show how far the commands of a comparison are, while they run or after.", [COMPARISON]),
    "report": Command(
        "Show the comparison of recorded runs as a table, a page to read and files of rows.",
        [
            argument("folders", type=Path, nargs="+", metavar="results/NAME", help="the folders of comparisons"),
            argument("--to", type=Path, metavar="results/NAME", help="where to write; otherwise beside the records"),
            argument("--pivot", metavar="COLUMN", help="a table of strategies against this column of runs.csv"),
            argument("--fits-in", metavar="SIZE", help="recommend what is fastest in so much memory, such as 24GiB"),
            argument(
                "--export",
                metavar="FORMAT,…",
                help="also write the comparison and its charts into the folder export:"
                " any of csv, svg, png, pdf, latex",
            ),
            argument("--width", metavar="SIZE", help="the width of exported charts in a paper, such as 84mm"),
            argument(
                "--statistic",
                choices=("median", "mean"),
                default="median",
                help="how exported speeds are summarized: median [min, max] or mean ± sd",
            ),
        ],
    ),
    "explain": Command(
        "Show what each figure of a run was computed from: terms that add up to it, each with its counter or formula.",
        [
            RUN,
            argument("columns", nargs="*", metavar="COLUMN", help="columns of runs.csv; otherwise all that are known"),
        ],
    ),
    "diff": Command(
        "Show what changed from one comparison to another: runs, figures, versions and machine. With --fail-above, show"
        " what regressed instead, and exit with status 1 if anything did: memory, bytes sent or FLOPs grew by more than"
        " the limit, a speed fell by more than it and left the range of its undisturbed repeats, or a run that was ok"
        " fails or is missing.",
        [
            argument("A", type=Path, metavar="results/A", help="the folder of one comparison, or its runs.csv"),
            argument("B", type=Path, metavar="results/B", help="the folder of one comparison, or its runs.csv"),
            argument(
                "--fail-above", type=parse_share, metavar="SHARE", help="the limit, such as 5%%; A is the baseline"
            ),
            argument("--across-versions", action="store_true", help="compare speeds although versions differ"),
            argument("--json", action="store_true", help="print what regressed as JSON"),
        ],
    ),
    "sync": Command(
        "Send the runs that the tracker's server does not have yet, and their table, from the records.",
        [
            COMPARISON,
            argument("--tracker", choices=tracker_names(), default="wandb"),
            argument("--project", help="by default the runs' own, tracking.project"),
            argument("--entity", help="user or team; by default the runs' own, tracking.entity"),
            argument("--again", action="store_true", help="also send what was sent before, and replace it"),
            argument(
                "--timeout",
                type=float,
                default=30.0,
                help="seconds that the server has to start a run, and again to receive all of it;"
                " by default %(default)g",
            ),
        ],
    ),
    "export": Command(
        "Write a recorded run as configuration of Accelerate, DeepSpeed and torchrun, with a script that trains alike.",
        [RUN, argument("--to", type=Path, metavar="DIR", help="where to write instead of RUN/export")],
    ),
    "selftest": Command(
        "Show what of this installation works: versions, devices, and real runs with what must come of each. Steps that"
        " have passed are not repeated by a later call. The exit status is 0 only if no step failed.",
        [
            argument("--only", metavar="STEP,...", help="run these steps alone; --list names them all"),
            argument("--again", action="store_true", help="repeat steps that have passed before"),
            argument("--list", action="store_true", help="name the steps, what each shows, and what it needs"),
            argument("--device", **DEVICES, help="the device of the runs"),
            argument("--to", type=Path, default=Path("results"), metavar="DIR", help="the folder of the results"),
        ],
    ),
    "completion": Command(
        "Print the script that completes commands, groups, keys and values in a shell.",
        [argument("shell", choices=["bash", "zsh", "fish"])],
        epilog='bash: write this line into ~/.bashrc: eval "$(harness completion bash)"; zsh: write this line into'
        ' ~/.zshrc: eval "$(harness completion zsh)"; fish: harness completion fish >'
        " ~/.config/fish/completions/harness.fish",
    ),
    "ls": Command("List what can be chosen on the command line.", [argument("kind", choices=[*KINDS], type=plural)]),
}
