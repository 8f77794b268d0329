"""How a fault is planted: what replaces a function of the rank's code calls it with other arguments, or not at all."""

import functools
import os
import pkgutil
from collections.abc import Callable
from typing import Any

Entry = Callable[[str], None]

Change = Callable[..., Any]  # takes the ordinary function, and then its arguments


def replaces(*targets: str, of_rank: int | None = None, worker: Entry | None = None) -> Callable[[Change], Entry]:
    """Return a decorator that makes an entry of ranks, whose worker has the decorated function in the targets' places.

    Args:
        targets: the functions and methods that are replaced, by the dotted names under which they are called.
        of_rank: the only rank that has the fault; without it all have it.
        worker: the entry that runs then, by default that of real ranks.
    """

    def entry_of(change: Change) -> Entry:
        @functools.wraps(change)
        def entry(run_dir: str) -> None:
            if of_rank in (None, rank()):
                plant(change, *targets)
            (worker or pkgutil.resolve_name("harness.worker.main.main"))(run_dir)

        return entry

    return entry_of


def plant(change: Change, *targets: str) -> None:
    """Replace each target by a function that calls `change` with the ordinary one and its arguments."""
    for target in targets:
        path, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(path)
        setattr(owner, name, changed(change, getattr(owner, name)))


def changed(change: Change, ordinary: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ordinary, updated=())  # DDP reads the signature of its hooks
    def call(*arguments: Any, **keywords: Any) -> Any:
        return change(ordinary, *arguments, **keywords)

    return call


def rank() -> int:
    """Return this process's rank among all of the run."""
    return int(os.environ["RANK"])
