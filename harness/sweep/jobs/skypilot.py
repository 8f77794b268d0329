"""Files for SkyPilot: every run is a task, whose nodes SkyPilot starts on any cloud or on Kubernetes."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.config.from_dict import GroupValues, from_dict
from harness.sweep.jobs.job import JobRun
from harness.sweep.jobs.job_files import FileResources, JobFiles, job_name, merged, write_yaml
from harness.util.text import UserError


@dataclass(frozen=True, kw_only=True)
class SkypilotResources(FileResources):
    """The keys of hydra.launcher: what a task requests of SkyPilot."""

    accelerator: str | None = None
    task: dict[str, Any] = field(default_factory=dict)  # further keys of a task


class Skypilot(JobFiles):
    """SkyPilot, for which the file of a task is written for each run."""

    launcher, title = "skypilot", "SkyPilot"

    def __init__(self, keys: GroupValues) -> None:
        self.resources: SkypilotResources = from_dict(SkypilotResources, keys, "hydra.launcher")

    def write_files(self, runs: Sequence[JobRun]) -> list[str]:
        """Write the tasks of runs, and return the commands that submit them."""
        commands = []
        for run in runs:
            path = run.comparison.path / "skypilot" / f"{run.name}.yaml"
            write_yaml(path, f"{run.command.name}/{run.name}", [self.task(run)])
            commands.append(f"sky jobs launch --yes --detach-run {shlex.quote(str(path))}")
        return commands

    def task(self, run: JobRun) -> dict[str, Any]:
        """Return the task of a run. Raises UserError if it needs GPUs and nothing says which."""
        request = self.request(run.config.cluster, run.config.launch)
        resources: dict[str, Any] = {"cpus": f"{request.cores}+"}
        if request.gpus:
            if not self.resources.accelerator:
                raise UserError("hydra.launcher.accelerator=null: name the GPU as `sky gpus list` does, such as H100")
            resources["accelerators"] = f"{self.resources.accelerator}:{request.gpus}"
        if self.resources.mem_gb:
            resources["memory"] = f"{self.resources.mem_gb:g}+"
        task = {
            "name": job_name(run),
            "num_nodes": request.nodes,
            "resources": resources,
            # The first of the addresses, which stand in lines, is that of rank 0.
            "run": self.script(run, '"$SKYPILOT_NODE_RANK"', "\"${SKYPILOT_NODE_IPS%%$'\\n'*}\""),
        }
        return merged(task, self.resources.task)
