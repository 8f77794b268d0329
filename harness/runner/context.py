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
    """The surroundings of a run, which do not change what it measures."""

    entry: Callable[[str], None] = worker_entry  # what every rank runs; the tests have others
    models: Sequence[ModelConfig] = ()  # suggested where a smaller one would fit
    on_progress: ProgressFn = lambda _: None
    log: LogFn = lambda _: None
    nodes: NodeGroup | None = None  # the other nodes, where the machine is more than this one


@dataclass(frozen=True)
class Reference:
    """The single-process run to compare with, or the reason why there is none."""

    rank: RankReport | None  # the report of its only rank
    note: str  # what was compared with, or why nothing was
    failure: Cells | None = None  # status and reason of a row that cannot be proven because this run failed
