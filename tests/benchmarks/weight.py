"""How much code there is: what each package weighs, what it repeats, and how much of it one command enters.

    python -m tests.benchmarks.weight --before ../older-clone --out results/weight.json
    python -m tests.benchmarks.weight --write-budget

Any checkout can be weighed, and so old and new code are counted by one script. Statements and nodes are those of
syntax trees: neither changes with formatting or comments, and a docstring is no statement.
"""

import ast
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.support.campaigns import FLAG, parse_options

ROOT = Path(__file__).parents[2]

BUDGET = ROOT / "tests" / "support" / "budget.toml"
ROUNDED = {"files": 1, "statements": 10, "nodes": 100, "other_lines": 10}  # the figures of a budget, and their units
BUDGET_HEAD = """\
# What each package may weigh at most; tests/unit/test_budget.py holds the code to it. Where less is enough, lower it:
# `python -m tests.benchmarks.weight --write-budget`. A commit that needs more raises it, and says for what.
# Statements and nodes are those of syntax trees without docstrings; other lines are those of files that are not Python.
"""

REPEATED_TOKENS = 40  # the length from which a run of tokens counts as standing twice

COMMANDS = {
    "plan": ("plan", "strategy=zero3", "model=7b", "cluster=8xh100"),
    "run": ("strategy=zero3", "model=tiny", "world_size=2", "train.steps=3", "train.warmup_steps=1", "force=true"),
}

# Runs a command of the harness in this process and prints the files of the package whose functions it entered.
ENTERED = """
import pathlib, sys, threading
import harness.cli.main
entered = set()
profile = lambda frame, event, _: event == "call" and entered.add(frame.f_code.co_filename)
threading.setprofile(profile)
sys.setprofile(profile)
try:
    status = harness.cli.main.main(sys.argv[2:])
finally:
    sys.setprofile(None)
    threading.setprofile(None)
package = str(pathlib.Path(harness.__file__).parent)
pathlib.Path(sys.argv[1]).write_text("\\n".join(sorted(name for name in entered if name.startswith(package))))
sys.exit(status)
"""

UNITS = ("files", "lines", "statements", "nodes", "other_lines")

Weights = dict[str, int]


def main() -> None:
    options = parse_options(
        __doc__,
        before={"type": Path, "help": "a checkout of the code before the change"},
        out={"type": Path, "help": "a JSON file for the figures"},
        write_budget=FLAG | {"help": "make today's weight the budget, and write it"},
    )
    if options.write_budget:
        BUDGET.write_text(budget_text())
        return
    checkouts = {"before": options.before, "after": ROOT}
    figures = {when: weigh(root) for when, root in checkouts.items() if root}
    print_table(figures)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def weigh(root: Path) -> dict[str, Weights]:
    """Return the figures of a checkout: of each package, of all of `harness` and of `tests`."""
    rows = measured_budget(root)
    modules = module_sources(root / "harness")
    rows["structure"] = {
        "functions used once": functions_used_once(modules.values()),
        "levels of imports": import_levels(modules),
        f"tokens in runs of {REPEATED_TOKENS} that stand twice": repeated_tokens(modules.values()),
        **{f"files entered by a {name}": files_entered(root, command) for name, command in COMMANDS.items()},
    }
    return rows


def package_weights(folder: Path) -> dict[str, Weights]:
    """Return the weight of every package of a folder, and of the folder's own files as that of the folder."""
    packages = sorted(path for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py")))
    own = [path for path in folder.iterdir() if path.is_file()]
    return {folder.name: files_weight(own)} | {f"{folder.name}/{path.name}": folder_weight(path) for path in packages}


def folder_weight(folder: Path) -> Weights:
    """Return the weight of all files below a folder."""
    return files_weight(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def files_weight(paths: Iterable[Path]) -> Weights:
    """Return the number of Python files, their lines, statements and nodes, and the lines of other files."""
    weights = [file_weight(path) for path in paths if path.suffix != ".pyc"]
    return {unit: sum(weight.get(unit, 0) for weight in weights) for unit in UNITS}


def file_weight(path: Path) -> Weights:
    """Return what a file adds to a weight."""
    lines = path.read_bytes().count(b"\n")
    if path.suffix != ".py":
        return {"other_lines": lines}
    nodes = syntax_nodes(path.read_text())
    return {"files": 1, "lines": lines, "statements": sum(map(is_statement, nodes)), "nodes": len(nodes)}


@cache
def syntax_nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def is_statement(node: ast.AST) -> bool:
    """Return whether a node is a statement other than a docstring or another string that stands alone."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return not isinstance(node.value.value, str)
    return isinstance(node, ast.stmt)


def module_sources(package: Path) -> dict[str, str]:
    """Return the source of every module of a package by its dotted name."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }


def functions_used_once(sources: Collection[str]) -> int:
    """Return how many functions at the top of a module have a name that stands at one other place of the package."""
    words = Counter(word for source in sources for word in re.findall(r"\b\w+\b", source))
    nodes = [node for source in sources for node in ast.parse(source).body]
    return sum(words[node.name] == 2 for node in nodes if isinstance(node, ast.FunctionDef))


def import_levels(modules: dict[str, str]) -> int:
    """Return the number of modules on the longest path of imports, of those at the top of modules and in functions."""
    graph = {name: set(imported(source, modules)) for name, source in modules.items()}

    @cache
    def level(name: str) -> int:
        return 1 + max((level(target) for target in graph[name] - {name}), default=0)

    return max(map(level, graph))


def imported(source: str, modules: Collection[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports."""
    for node in syntax_nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names if node.module in modules)


def repeated_tokens(sources: Iterator[str] | Sequence[str]) -> int:
    """Return how many tokens are part of a run of REPEATED_TOKENS that stands twice, imports left out."""
    files = [list(runs_of(significant_tokens(source))) for source in sources]
    counts = Counter(itertools.chain(*files))
    starts = [[start for start, run in enumerate(runs) if counts[run] > 1] for runs in files]
    return sum(len({start + offset for start in own for offset in range(REPEATED_TOKENS)}) for own in starts)


def runs_of(tokens: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every run of REPEATED_TOKENS tokens."""
    for start in range(len(tokens) - REPEATED_TOKENS + 1):
        yield tuple(tokens[start : start + REPEATED_TOKENS])


def significant_tokens(source: str) -> list[str]:
    """Return the tokens of a source without comments, line ends and lines that import."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    nodes = [node for node in syntax_nodes(source) if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type not in skipped and token.start[0] not in imports]


def files_entered(root: Path, command: Sequence[str]) -> int:
    """Return how many files of a checkout have a function that a command's own process enters."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "entered"
        words = [*command] if command[0] == "plan" else [*command, f"results_dir={scratch}/results"]
        subprocess.run([sys.executable, "-c", ENTERED, out, *words], cwd=root, check=True, capture_output=True)
        return len(out.read_text().split("\n"))


def budget_text(root: Path = ROOT) -> str:
    """Return today's weight as a budget in TOML, each figure rounded up."""
    lines = [BUDGET_HEAD]
    for row, weights in measured_budget(root).items():
        lines += [f'["{row}"]', *(f"{name} = {-(-weights[name] // unit) * unit}" for name, unit in ROUNDED.items()), ""]
    return "\n".join(lines)


def measured_budget(root: Path = ROOT) -> dict[str, Weights]:
    """Return what the rows of a budget weigh in a checkout."""
    in_all = {"harness in all": folder_weight(root / "harness"), "tests in all": folder_weight(root / "tests")}
    return package_weights(root / "harness") | in_all


def print_table(figures: dict[str, dict[str, Weights]]) -> None:
    """Print a row for each figure, with what it was before."""
    for row, weights in figures["after"].items():
        for name, value in weights.items():
            before = figures.get("before", {}).get(row, {}).get(name)
            was = "" if before is None else f"{before:10,} -> "
            print(f"{row:24} {name:44} {was}{value:10,}")


if __name__ == "__main__":
    main()
