"""How many small faults the unit tests catch, and how many branches they run, in any checkout.

    python -m tests.benchmarks.mutants --root ../older-clone --scratch /tmp/before --out results/mutants_before.json

One operator, number or condition in the cost model, the proofs or the records is changed at a time. The unit tests that
run its line are then run, until one fails. What was done in `--scratch` is not done again.
"""

import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.campaigns import REQUIRED_PATH, parse_options

ROOT = Path(__file__).parents[2]

PACKAGES = ("cost_model", "proof", "records")

SETTINGS = "[run]\nbranch = true\nsource = harness\ndynamic_context = test_function\ndata_file = {data}\n"

LONGEST_SECONDS = 300  # of a mutant's tests: one that runs longer is caught

OTHER_COMPARISON = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OTHER_OPERATOR = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}


class Mutant(NamedTuple):
    """A file with one node changed: which, on which line, and what it was and became."""

    path: str
    line: int
    change: str
    source: str


def main() -> None:
    options = parse_options(
        __doc__,
        root={"default": ROOT, "help": "the checkout"},
        scratch=REQUIRED_PATH,
        out=REQUIRED_PATH,
        count={"default": 60},
        seed={"default": 34},
    )
    clone = options.scratch / "clone"
    if not clone.exists():
        shutil.copytree(options.root, clone, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    tests, branches = covering_tests(clone, options.scratch)
    chosen = random.Random(options.seed).sample(list(mutants(clone)), options.count)
    results: list[dict[str, object]] = []
    for mutant in chosen:
        caught = is_caught(clone, mutant, tests.get(f"{mutant.path}:{mutant.line}", []))
        results.append({"file": mutant.path, "line": mutant.line, "change": mutant.change, "caught": caught})
        print(results[-1], flush=True)
    summary = {"caught": sum(bool(entry["caught"]) for entry in results), "of": len(results), **branches}
    print(summary)
    options.out.write_text(json.dumps({**summary, "mutants": results}, indent=1) + "\n")


def run(clone: Path, *command: str, timeout: float | None = None) -> int:
    """Run Python in a checkout and return its exit status."""
    environment = os.environ | {"PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1"}
    full = [sys.executable, "-W", "ignore", "-m", *command]
    done = subprocess.run(full, cwd=clone, env=environment, capture_output=True, timeout=timeout, check=False)
    return done.returncode


def covering_tests(clone: Path, scratch: Path) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Return the test functions that run each line, by `file:line`, and the share of branches that any test runs."""
    settings, report = scratch / "coverage.ini", scratch / "coverage.json"
    settings.write_text(SETTINGS.format(data=scratch / "coverage.data"))
    if not report.exists():
        run(clone, "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-n", "0", "-q", "tests/unit")
        run(clone, "coverage", "json", f"--rcfile={settings}", "--show-contexts", "-o", str(report))
    measured = json.loads(report.read_text())
    tests = {
        f"{path}:{line}": sorted(filter(None, map(test_of, contexts)))
        for path, file in measured["files"].items()
        for line, contexts in file["contexts"].items()
    }
    totals = measured["totals"]
    return tests, {"branches_percent": 100 * totals["covered_branches"] / totals["num_branches"]}


def test_of(context: str) -> str:
    """Return the test that a context of coverage names, such as tests.unit.test_plan.test_a_plan; '' for none."""
    parts = context.split(".")
    is_test = parts[:2] == ["tests", "unit"] and parts[-1].startswith("test_")
    return f"{'/'.join(parts[:3])}.py::{parts[-1]}" if is_test else ""


def mutants(clone: Path) -> Iterator[Mutant]:
    """Yield every mutant of the packages, in the order of their files."""
    for package in PACKAGES:
        for path in sorted((clone / "harness" / package).rglob("*.py")):
            source = path.read_text()
            tree = ast.parse(source)
            for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
                for node in ast.walk(ast.Module(function.body, [])):
                    yield from mutants_of(tree, node, str(path.relative_to(clone)))


def mutants_of(tree: ast.Module, node: ast.AST, path: str) -> Iterator[Mutant]:
    """Yield the mutant of a node, if there is one; the tree is left as it was."""
    before = copy.copy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER_COMPARISON:
        node.ops = [OTHER_COMPARISON[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.BinOp) and type(node.op) in OTHER_OPERATOR:
        node.op = OTHER_OPERATOR[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
    else:
        return
    change = f"{ast.unparse(before)} -> {ast.unparse(node)}"
    mutant = Mutant(path, getattr(node, "lineno", 0), change[:200], ast.unparse(tree))
    node.__dict__.update(before.__dict__)
    yield mutant


def is_caught(clone: Path, mutant: Mutant, tests: Sequence[str]) -> bool:
    """Return whether a test fails that runs the mutant's line."""
    if not tests:
        return False
    path = clone / mutant.path
    original = path.read_text()
    path.write_text(mutant.source)
    try:
        return run(clone, "pytest", "-n", "0", "-q", "-x", *tests, timeout=LONGEST_SECONDS) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original)


if __name__ == "__main__":
    main()
