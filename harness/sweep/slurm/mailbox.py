"""The messages between a command and the nodes of its jobs: files, as either side may be gone for a while.

results/NAME/.jobs/KEY.json          the values of a combination, and the job that was submitted for it
results/NAME/.jobs/KEY.started.json  the runs that its node has started for it
results/NAME/.jobs/KEY.answer.json   the same, once all of them have their record
"""

import json
from contextlib import suppress
from pathlib import Path

from harness.config.fingerprint import result_affecting_keys, short_hash, with_old_keys
from harness.config.values import ConfigValues
from harness.records.run_folder import ComparisonFolder
from harness.sweep.slurm import commands


def job_key(values: ConfigValues) -> str:
    """Return the hash of everything that affects the result and is known before a node is assigned."""
    return short_hash(with_old_keys(result_affecting_keys(values)))


def message_file(comparison: ComparisonFolder, name: str, kind: str = "") -> Path:
    """Return the file of a combination's values, or of its node's message of kind `started` or `answer`."""
    return comparison.jobs / f"{name}{kind and '.'}{kind}.json"


def read_run_ids(path: Path) -> list[str]:
    """Return the runs that a node's message names; none if there is no message."""
    try:
        return list(json.loads(path.read_text())["runs"])
    except (OSError, ValueError, TypeError, KeyError):
        return []


def submitted_job(path: Path) -> str | None:
    """Return the job that was submitted for the combination in this file, None if none was."""
    try:
        job = json.loads(path.read_text())["job"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return str(job) if job else None


def running_jobs(comparison: ComparisonFolder) -> dict[str, str]:
    """Return Slurm's state of every combination of a comparison that has a job in the queue."""
    jobs: dict[str, str] = {}
    for path in comparison.jobs.glob("*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            jobs[str(json.loads(path.read_text())["job"])] = path.stem
    states = commands.squeue_states(set(jobs)) or {}
    return {jobs[job]: state for job, state in states.items()}
