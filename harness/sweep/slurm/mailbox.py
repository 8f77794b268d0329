"""The files by which a command and the nodes of its cluster jobs tell each other; either may be gone meanwhile.

results/NAME/.jobs/KEY.json          values of a combination, and the job that has them
results/NAME/.jobs/KEY.begun.json    the runs that its node made of them, as soon as they are begun
results/NAME/.jobs/KEY.answer.json   the same when all have their record
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.config.fingerprint import result_affecting_keys, short_hash
from harness.records.run_folder import ComparisonFolder
from harness.sweep.queued_run import QueuedRun
from harness.sweep.slurm import commands


def job_key(values: dict[str, Any]) -> str:
    """Of all that affects the result, as far as it is known before a node is."""
    return short_hash(result_affecting_keys(values))


def message_file(item: QueuedRun, what: str = "") -> Path:
    return ComparisonFolder(item.folder).jobs / f"{item.name}{what and '.'}{what}.json"


def read_run_ids(path: Path) -> list[str]:
    """The runs that a node named; none if it did not."""
    try:
        return list(json.loads(path.read_text())["runs"])
    except (OSError, ValueError, TypeError, KeyError):
        return []


def submitted_job(item: QueuedRun) -> str | None:
    try:
        job = json.loads(message_file(item).read_text())["job"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return str(job) if job else None


def running_jobs(folder: Path) -> dict[str, str]:
    """Slurm's state of every run of a comparison that it has not done with."""
    jobs: dict[str, str] = {}
    for path in ComparisonFolder(folder).jobs.glob("*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            jobs[str(json.loads(path.read_text())["job"])] = path.stem
    found = commands.squeue_states(set(jobs)) or {}
    return {jobs[job]: state for job, state in found.items()}
