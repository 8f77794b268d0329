"""The assembly of a script from its snippets and the user's part, in a fixed order."""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent

from harness.export import runtime
from harness.export.recorded_run import RecordedRun
from harness.export.snippets import Snippet
from harness.export.templates import END, RULER, RUNTIME_IMPORTS


def assemble(
    run: RecordedRun,
    library: str,
    imports: Iterable[str],
    snippets: Iterable[Snippet],
    user_part: Iterable[str],
    main: Iterable[str],
) -> str:
    """Return the whole script: header, imports, constants, the user's part, helpers, main().

    `user_part` are the functions that the user is meant to replace; `main` are the lines of main().
    """
    snippets = list(snippets)
    train, layout = run.config.train, run.layout
    lines = dict.fromkeys([*imports, *(line for snippet in snippets for line in snippet.imports)])
    settings = dict.fromkeys(
        [
            f"STEPS = {train.total_steps}",
            f"MICRO_BATCHES = {run.micro_batches}  # per rank and step: {train.global_batch} sequences in micro-batches"
            f" of {train.micro_batch} over {layout.dp} data-parallel ranks",
            *(snippet.settings for snippet in snippets if snippet.settings),
        ]
    )
    functions = "\n\n\n".join(user_part).replace("DTYPE", init_dtype(run))
    body = indent_under("def main():", "\n".join(main))
    top = [
        header(run, library),
        sorted_imports(lines),
        "\n".join(settings),
        f"{RULER}\n# Yours: the model and its data. As it stands they are the run's, so that losses can be compared.",
        runtime_imports(run, functions + body),
    ]
    rest = [functions, RULER, *(snippet.functions for snippet in snippets if snippet.functions), body, END]
    return "\n\n".join(top) + "\n\n\n" + "\n\n\n".join(rest) + "\n"


def runtime_imports(run: RecordedRun, code: str) -> str:
    """Return the import of the names of harness.export.runtime that the code uses, and the line that reads the run."""
    names = [name for name in runtime.__all__ if name == "read_run_spec" or re.search(rf"\b{name}\b", code)]
    return RUNTIME_IMPORTS.format(names=", ".join(names), run_folder=run_folder_expression(run))


def sorted_imports(imports: Iterable[str]) -> str:
    """Return import lines in order: the standard library before other modules, `import` before `from`."""

    def sort_key(line: str) -> tuple[bool, bool, str]:
        return line.split()[1].split(".")[0] not in sys.stdlib_module_names, line.startswith("from"), line

    ordered = sorted(imports, key=sort_key)
    standard = [line for line in ordered if not sort_key(line)[0]]
    return "\n".join([*standard, "", *ordered[len(standard) :]])


def header(run: RecordedRun, library: str) -> str:
    """Return the docstring of the script."""
    config = run.config
    return (
        f'"""{config.strategy.name} in plain {library}: {run.layout.world_size} ranks, {config.precision.name},'
        f" checkpointing {config.checkpointing.name}.\n\nExported from the run {run.directory.name}. It prints the loss"
        ' of every step, to be compared with the run\'s steps.jsonl.\n"""'
    )


def run_folder_expression(run: RecordedRun) -> str:
    """Return Python code for the run's folder, relative to the script if the script lies inside it."""
    if run.target == run.directory / "export":
        return "Path(__file__).resolve().parents[1]"
    return f"Path({os.fspath(Path(run.directory))!r})"


def init_dtype(run: RecordedRun) -> str:
    """Return the dtype of initial parameters: that of the masters, where the library makes 16-bit copies of them."""
    return f"torch.{run.config.precision.master}"


def indent_under(opening: str, lines: str) -> str:
    """Return the lines as the block under `opening`, such as a `for` or `with` line."""
    return f"{opening}\n{indent(lines, ' ' * 4)}"


def step_loop(step: Iterable[str]) -> str:
    """Return the loop over all steps."""
    return indent_under("for step in range(STEPS):", "\n".join(step))
