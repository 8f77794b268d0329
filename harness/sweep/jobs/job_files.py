"""Files of jobs that the user submits: what those of Kubernetes and of SkyPilot have in common."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.config.fingerprint import short_hash
from harness.config.schema import ClusterConfig
from harness.sweep.jobs.job import (
    NODE_PROGRAM,
    PORT,
    JobCluster,
    JobResources,
    JobRun,
    NodeRequest,
    node_request,
    printable_lines,
)
from harness.util.files import atomic_write_text


@dataclass(frozen=True, kw_only=True)
class FileResources(JobResources):
    """The keys of hydra.launcher that every kind of file has."""

    python: str | None = None  # the interpreter on the nodes; None: the one that runs this command


class JobFiles(JobCluster):
    """A cluster for which files of jobs are written. They run the same program on every node, in a shared folder."""

    resources: FileResources

    def request(self, cluster: ClusterConfig, launch: str) -> NodeRequest:
        """Return what a job requests of each node. Raises UserError if GPUs are wanted and nothing says how many."""
        return node_request(self.resources, cluster, launch, source="a file of jobs")

    def script(self, run: JobRun, rank: str, address: str) -> str:
        """Return what a node runs, with expressions of shell for its rank and its leader's address.

        Raises UserError for a path or a line of shell that would be read otherwise.
        """
        run.write_values()
        count = self.request(run.config.cluster, run.config.launch).nodes
        program = shlex.join(
            [self.resources.python or sys.executable, "-m", NODE_PROGRAM, str(run.message().resolve())]
        )
        lines = [
            f"cd {shlex.quote(str(Path.cwd()))} || exit",
            *self.resources.setup,
            f"exec {program} {count} {rank} {address} {PORT}",
        ]
        return printable_lines(lines, self.launcher) + "\n"


def job_name(run: JobRun) -> str:
    """Return a run's name as DNS takes it: at most 50 letters, digits and hyphens, its own in all comparisons."""
    key = short_hash({"comparison": str(run.comparison.path.resolve()), "run": run.name})
    words = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")
    return f"h-{words[:37].rstrip('-')}-{key}"


def merged(values: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    """Return values with further ones: groups are merged, lists continued, and all else is replaced."""
    result = dict(values)
    for key, value in further.items():
        before = result.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            value = merged(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            value = before + value
        result[key] = value
    return result


class _Dumper(yaml.SafeDumper):
    """A writer of YAML that keeps the lines of a script."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def write_yaml(path: Path, comment: str, documents: Sequence[dict[str, Any]]) -> None:
    """Write documents of YAML below a comment."""
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, f"# {comment}\n{text}")
