"""The ways in which a run, a launch and a rank can end."""

from typing import Literal, get_args

RankStatus = Literal["", "ok", "oom", "error"]  # "" for a rank that has reported nothing yet

LaunchStatus = Literal["ok", "oom", "error", "timeout", "interrupted"]

RunStatus = Literal["ok", "oom", "refused", "timeout", "error", "interrupted"]

STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)
