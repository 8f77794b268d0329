"""harness import FILE -- LAUNCH LINE: what a configuration of another program is here, key by key, and as files."""

import shlex
from argparse import Namespace
from collections.abc import Iterator

from harness.foreign.overrides import Imported, chosen_name, files, import_configuration, text_of
from harness.planner.plan import plans
from harness.util.files import atomic_write_text
from harness.util.redact import redacted
from harness.util.text import UserError, sanitize


def main(options: Namespace) -> None:
    """Print what each key becomes, and what has no equivalent, and write the strategy and a sweep.

    Raises UserError for a file or a line that cannot be read, and for files of that name that say something else.
    """
    file, settings = options.file, options.settings
    if file is not None and "=" in file.name and not file.exists():  # the first setting, where there is no file
        file, settings = None, [str(file), *settings]
    if file is None and not options.line:
        raise UserError("harness import takes a FILE, or a launch line after --: harness import -- torchrun train.py")
    imported = import_configuration(file, options.line, settings)
    origin = redacted(str(file or shlex.join(options.line)))
    name = chosen_name(options.name, file)
    written = files(name, sanitize(origin), imported)
    for path, text in written.items():
        if path.exists() and path.read_text() != text and not options.overwrite:
            raise UserError(f"{path} exists with other settings: choose another --name, or add --overwrite")
    for line in (*key_lines(imported), *command_lines(imported, name)):
        print(sanitize(line) if not line.startswith(" ") else f"  {sanitize(line)}")
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text)
        print(path)


def key_lines(imported: Imported) -> Iterator[str]:
    """Yield a line for each key, then what has no equivalent, what changes nothing of a step, and what is unknown."""
    translation = imported.translation
    facts = translation.facts
    differences, silent = [], []
    for reading in translation.readings:
        shown = dict.fromkeys(name for name in reading.names if not name.startswith("_") and name in facts)
        settings = " ".join(
            f"{name.removesuffix('.name').removeprefix('planned.')}={text_of(facts[name])}" for name in shown
        )
        if settings:
            yield f"{reading.key} = {reading.value} → {settings}"
        if reading.difference:
            differences.append(f" {reading.key} = {reading.value}: {reading.difference}")
        elif not settings and not any(name.startswith("@") for name in reading.names):
            silent.append(reading.key)
    differences += [f" {sentence}" for sentence in translation.holding("differences")]
    yield from ["", "No equivalent, and what that changes:", *differences] if differences else []
    lists = {
        "Without effect on a step": [*silent, *translation.nothing],
        "Variables of your shell, which are left out": translation.of_shell,
        "No equivalent is known": translation.unknown,
    }
    for head, keys in lists.items():
        if keys:
            yield f"{head}: {', '.join(dict.fromkeys(keys))}"


def command_lines(imported: Imported, name: str) -> Iterator[str]:
    """Yield the notes, whether the layout can be planned, and the commands that plan, run and compare it."""
    yield from ["", *imported.translation.holding("notes")]
    try:
        (plan,) = plans([*imported.words, "plan.simulate=false"])
        yield f"A device needs {plan.predictions[0].device_bytes / 2**30:.1f} GiB by the plan."
    except UserError as error:
        yield f"It cannot be planned as it is: {error}"
    yield f"harness plan {shlex.join(imported.words)}"
    yield f"python -m harness {shlex.join(imported.run_words)}"
    yield f"python -m harness sweeps={name}"
