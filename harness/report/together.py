"""Several folders as one comparison."""

from collections.abc import Sequence
from pathlib import Path

from harness.records import Found, Record
from harness.report.view import View, view


def together(found: Sequence[tuple[Path, Found]]) -> View:
    """The view of all folders' runs; of several folders a run's id begins with its folder's name, NAME/RUN.

    A name that several folders share is their whole path.
    """
    if len(found) == 1:
        return view(*found[0])
    names = [folder.resolve().name for folder, _ in found]
    names = [str(folder) if names.count(name) > 1 else name for (folder, _), name in zip(found, names, strict=True)]
    records, problems, running, folders = [], [], [], {}
    for name, (folder, its) in zip(names, found, strict=True):
        for record in its.records:
            run_id = f"{name}/{record['row']['run_id']}"
            folders[run_id] = folder / record["row"]["run_id"]
            records.append(_renamed(record, run_id, name))
        problems += its.problems
        running += [f"{name}/{record['row']['run_id']}" for record in its.running]
    return View(" + ".join(names), records, problems, running, folders)


def _renamed(record: Record, run_id: str, name: str) -> Record:
    return record | {"row": record["row"] | {"run_id": run_id, "name": name}}
