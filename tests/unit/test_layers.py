"""The layer rule, names and sizes: imports go to the left and in no cycle, no private word is a whole name."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import harness

ROOT = Path(harness.__file__).parent

# Left to right.
LAYERS = (
    *("util", "config", "hardware", "layout", "cost_model", "data", "records", "tensors", "probe", "models", "engines"),
    *("measure", "launcher", "worker", "simulator", "metrics", "proof", "runner", "planner", "sweep"),
    *(("foreign", "export", "tracking", "report"), ("calibration", "selftest"), ("cli", "api")),
)

POSITION = {
    package: position
    for position, entry in enumerate(LAYERS)
    for package in (entry if isinstance(entry, tuple) else (entry,))
}

WITHOUT_TORCH = ("util", "config", "hardware", "layout", "cost_model", "data", "records", "metrics", "proof", "report")

# Parents start ranks by name, so that they never load what only runs in a rank.
FORBIDDEN = {"launcher": ("models", "worker"), "runner": ("models", "worker"), "sweep": ("models", "worker")}

Sources = dict[str, str]  # module name -> source


def sources() -> Sources:
    """Return the source of every module of the package by its dotted name."""
    paths = {path.relative_to(ROOT.parent).with_suffix(""): path for path in ROOT.rglob("*.py")}
    return {".".join(place.parts).removesuffix(".__init__"): path.read_text() for place, path in paths.items()}


def imports(name: str, modules: Sources) -> Iterator[str]:
    """Yield every module that a module imports: at its top, inside functions, and for type checking only."""
    for node in ast.walk(ast.parse(modules[name])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relative to itself"
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (entry if entry in modules else str(node.module) for entry in full)


def package_of(module: str) -> str:
    """Return the layer of a module: the second part of its name."""
    return module.split(".")[1] if "." in module else ""


def layer_problems(modules: Sources) -> list[str]:
    """Return one line for every import that breaks the rule."""
    problems = []
    for name in sorted(modules):
        package = package_of(name)
        if package and package not in POSITION and package != "__main__":
            problems.append(f"{name} is in no layer")
        for target in imports(name, modules):
            target_package = package_of(target) if target.startswith("harness.") else ""
            if target_package in FORBIDDEN.get(package, ()):
                problems.append(f"{name} imports {target}")
            both_have_layers = package in POSITION and target_package in POSITION
            if both_have_layers and package != target_package and POSITION[target_package] >= POSITION[package]:
                problems.append(f"{name} imports {target}, which is not to its left")
            if package in WITHOUT_TORCH and target.split(".")[0] == "torch":
                problems.append(f"{name} imports torch")
    return problems


def cycle(modules: Sources) -> list[str]:
    """Return modules that import each other, the first again at the end; an empty list if there are none."""
    graph = {name: {target for target in imports(name, modules) if target != name} & modules.keys() for name in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_every_package_imports_only_to_its_left() -> None:
    assert layer_problems(sources()) == []


def test_no_modules_import_each_other() -> None:
    assert cycle(sources()) == []


@pytest.mark.parametrize(
    ("module", "line", "problem"),
    [
        (
            "harness.layout.layout",
            "from harness.report import view",
            "harness.layout.layout imports harness.report.view",
        ),
        ("harness.records.store", "import torch", "harness.records.store imports torch"),
        ("harness.proof.verify", "def f():\n    import torch.distributed", "harness.proof.verify imports torch"),
        ("harness.report.view", "from harness.tracking import base", "not to its left"),
        (
            "harness.runner.run",
            "from harness.models import decoder",
            "harness.runner.run imports harness.models.decoder",
        ),
        ("harness.attic", "", "harness.attic is in no layer"),
    ],
)
def test_a_forbidden_import_is_reported(module: str, line: str, problem: str) -> None:
    modules = sources()
    modules[module] = modules.get(module, "") + f"\n{line}\n"
    assert any(problem in entry for entry in layer_problems(modules))


def test_a_lazy_import_cycle_is_reported() -> None:
    modules = sources()
    modules["harness.util.text"] += "\ndef f():\n    from harness.util import locks\n"
    assert "harness.util.text" in cycle(modules)


PRIVATE = {"found", "told", "asked", "held", "kept", "said", "made", "taken", "seen", "given", "this", "one", "means"}

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
    result = [f"{name} is a forbidden name"] if Path(name).stem in PRIVATE else []
    result += [f"{name}:{line}: {word} is a forbidden name" for line, word in names(tree) if word in PRIVATE]
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
