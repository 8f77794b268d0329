"""Names and sizes that keep the code readable: no private word is a whole name, no file or function is long."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness

ROOT = Path(harness.__file__).parent

FORBIDDEN = {"found", "told", "asked", "held", "kept", "said", "made", "taken", "seen", "given", "this", "one", "means"}

FILE_LINES, FUNCTION_LINES = 320, 90


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every function, class, parameter, variable, attribute and alias that is defined."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name


def long_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every function that is longer than FUNCTION_LINES."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines"


def problems(name: str, source: str) -> list[str]:
    """Return what is wrong with a module of this name and source."""
    tree = ast.parse(source)
    result = [f"{name} is a forbidden name"] if Path(name).stem in FORBIDDEN else []
    result += [f"{name}:{line}: {word} is a forbidden name" for line, word in names(tree) if word in FORBIDDEN]
    result += [f"{name}:{line}: {text}" for line, text in long_functions(tree)]
    lines = source.count("\n")
    return result + ([f"{name} has {lines} lines"] if lines > FILE_LINES else [])


def test_names_and_sizes() -> None:
    modules = sorted(ROOT.rglob("*.py"))
    assert len(modules) > 100
    assert [text for path in modules for text in problems(str(path.relative_to(ROOT)), path.read_text())] == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("report/told.py", "", ["report/told.py is a forbidden name"]),
        ("a.py", "def found():\n    pass\n", ["a.py:1: found is a forbidden name"]),
        ("a.py", "class made:\n    pass\n", ["a.py:1: made is a forbidden name"]),
        ("a.py", "class A:\n    def b(self, *, this=0):\n        pass\n", ["a.py:2: this is a forbidden name"]),
        ("a.py", "b = lambda one: one\n", ["a.py:1: one is a forbidden name"]),
        ("a.py", "kept = [1]\n", ["a.py:1: kept is a forbidden name"]),
        ("a.py", "b = [taken for taken in c]\n", ["a.py:1: taken is a forbidden name"]),
        ("a.py", "b.seen = 1\n", ["a.py:1: seen is a forbidden name"]),
        ("a.py", "import b as given\n", ["a.py:1: given is a forbidden name"]),
        ("a.py", "def b():\n" + "    pass\n" * FUNCTION_LINES, [f"a.py:1: b has {FUNCTION_LINES + 1} lines"]),
        ("a.py", "\n" * (FILE_LINES + 1), [f"a.py has {FILE_LINES + 1} lines"]),
        ("a.py", "def found_layouts(asked_for, *, one_line):\n    held_bytes = 1\n", []),  # compounds
    ],
)
def test_a_forbidden_name_or_size_is_reported(name: str, source: str, expected: list[str]) -> None:
    assert problems(name, source) == expected
