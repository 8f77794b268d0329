"""The messages between a command and its tracking process, one line of JSON each."""

from typing import Literal, TypedDict

from harness.config.values import ConfigValues, GroupValues

Task = Literal["start_run", "finish_run", "log_table"]  # the method of a tracker that a message leads to


class Message(TypedDict, total=False):
    """A message of the command. One that closes the connection has no other key than `do`."""

    do: Task | Literal["close"]
    tracking: GroupValues
    folder: str  # of the run, or for a table of the comparison
    upload: float  # the seconds that the server has to answer; 0: what it does not accept is written offline
    hint: str  # the end of a message to the user: the command that sends the data later
    config: ConfigValues  # of a run that has started


class Answer(TypedDict, total=False):
    """A message of the tracking process: a folder that is done, with its problem, or a line for the user."""

    done: str
    problem: str | None  # why the data are not where the configuration says
    log: str
    has_hint: bool  # whether the line names the command that sends the data later
