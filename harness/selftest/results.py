"""The results of the self-test's steps, and the file that keeps them from one command to the next.

The same file is what a bug report needs: versions, devices, the outcome of every step, and for its runs the row, the
proof and the ends of the logs. It has no secrets, no host name and no name of the home folder.
"""

import dataclasses
import re
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.records.provenance import git_commit, versions
from harness.records.run_folder import RunFolder
from harness.records.schema import Record
from harness.selftest.bench import COMPARISON, Bench
from harness.util.files import JsonObject, atomic_write_json, read_json_object
from harness.util.redact import map_texts, redacted

Outcome = Literal["passed", "failed", "skipped"]

FILE_NAME = "selftest.json"
LOG_CHARACTERS = 4000  # the most characters of the end of a log


@dataclass(frozen=True)
class SelfTestResult:
    """The result of one step."""

    outcome: Outcome
    detail: str  # one line
    seconds: float
    runs: list[JsonObject] = field(default_factory=list)  # a summary of each run
    traceback: str = ""  # of an error of the harness itself


class ResultsFile:
    """The results of all steps so far, in results_dir/selftest/selftest.json.

    Results of other versions or another device are dropped when the file is read, because they say nothing about these.
    """

    def __init__(self, bench: Bench) -> None:
        """Read the results that an earlier command left."""
        self.path = bench.results_dir / COMPARISON / FILE_NAME
        machine = bench.machine
        self.identity: JsonObject = {
            "versions": versions(),
            "device": machine.device,
            "device_name": machine.device_name,
            "devices": machine.devices,
        }
        self.environment = bench.environment
        self.steps: dict[str, SelfTestResult] = {}
        stored = read_json_object(self.path)
        if stored.get("identity") == anonymous(self.identity):
            with suppress(TypeError):  # an earlier version of this package, which may lack or have other values
                self.steps = {name: SelfTestResult(**values) for name, values in stored["steps"].items()}

    def passed(self, step: str) -> bool:
        """Return whether a step has passed already."""
        return step in self.steps and self.steps[step].outcome == "passed"

    def add(self, step: str, result: SelfTestResult) -> None:
        """Store the result of a step and write the file."""
        self.steps[step] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "identity": self.identity,
            "commit": git_commit(),
            "environment": self.environment,
            "steps": {name: dataclasses.asdict(result) for name, result in self.steps.items()},
        }
        atomic_write_json(self.path, anonymous(content))


def run_summary(record: Record, folder: RunFolder, with_logs: bool) -> JsonObject:
    """Return what a bug report needs of one run: its row, proof and notes, and the ends of its logs if requested."""
    summary: JsonObject = {"row": record.row, "proof": record.proof, "notes": record.notes}
    if with_logs:
        paths = sorted(folder.logs.glob("*")) if folder.logs.is_dir() else []
        ends = {path.name: path.read_text(errors="replace")[-LOG_CHARACTERS:] for path in paths}
        summary["logs"] = {name: end for name, end in ends.items() if end}
        keys = ("rank", "status", "phase", "step", "error", "reason", "traceback")
        summary["ranks"] = [{key: entry.get(key) for key in keys} for entry in record.rank_entries]
    return summary


def anonymous(value: Any) -> Any:
    """Return a copy of nested plain values without secrets, the name of this host, and the home folder."""

    def without_names(text: str) -> str:
        for name, replacement in ((str(Path.home()), "~"), (socket.gethostname(), "HOST")):
            if len(name) > 1:
                text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", replacement, text)
        return text

    return map_texts(redacted(value), without_names)
