"""The needs of a run besides its plan: the ranks' entry point, callbacks for progress, and the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config.model import ModelConfig
from harness.launcher.multinode import NodeGroup
from harness.launcher.rank_entry import worker_entry
from harness.records.rank_report import RankReport
from harness.records.schema import Cells

LogFn = Callable[[str], None]  # called with one line for the user

ProgressFn = Callable[[Path], None]  # called with the run's folder several times a second while ranks run


@dataclass(frozen=True)
class RunContext:
    """The parts of a run's execution that do not change what it measures."""

    entry: Callable[[str], None] = worker_entry  # the function that every rank runs; tests replace it
    models: Sequence[ModelConfig] = ()  # candidates for the suggestion of a smaller model that would fit
    on_progress: ProgressFn = lambda _: None
    log: LogFn = lambda _: None
    nodes: NodeGroup | None = None  # the other nodes, where the machine is more than this one


@dataclass(frozen=True)
class Reference:
    """The single-process run to compare with, or the reason why there is none."""

    rank: RankReport | None  # the report of its only rank
    note: str  # what was compared with, or why nothing was
    failure: Cells | None = None  # status and reason of a row that cannot be proven because this run failed
