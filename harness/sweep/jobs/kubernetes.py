"""Files for Kubernetes: every run is an Indexed Job with a pod for each node, and a Service by which these find it."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.config.from_dict import GroupValues, from_dict
from harness.sweep.jobs.job import JobRun
from harness.sweep.jobs.job_files import FileResources, JobFiles, job_name, merged, write_yaml
from harness.util.text import UserError, count_text


@dataclass(frozen=True, kw_only=True)
class KubernetesResources(FileResources):
    """The keys of hydra.launcher: what a job requests of Kubernetes."""

    image: str | None = None
    claim: str | None = None  # the PersistentVolumeClaim with the shared folder
    mount: str | None = None  # where it lies in a pod: the code, the environment and results_dir are in it
    namespace: str | None = None
    secret: str | None = None  # the Secret whose entries are variables of the environment, such as HF_TOKEN
    gpu_resource: str = "nvidia.com/gpu"
    pod: dict[str, Any] = field(default_factory=dict)  # further keys of a pod's spec


class Kubernetes(JobFiles):
    """Kubernetes, for which one file with all jobs of a comparison is written."""

    launcher, title = "kubernetes", "Kubernetes"

    def __init__(self, keys: GroupValues) -> None:
        self.resources: KubernetesResources = from_dict(KubernetesResources, keys, "hydra.launcher")
        for key in ("image", "claim", "mount"):
            if not getattr(self.resources, key):
                raise UserError(
                    f"hydra.launcher.{key}=null: name the image with the harness, the PersistentVolumeClaim with the"
                    " shared folder, and where a pod mounts it"
                )

    def write_files(self, runs: Sequence[JobRun]) -> list[str]:
        """Write the Jobs and Services of runs into one file, and return the command that submits them."""
        path = runs[0].comparison.path / "kubernetes.yaml"
        comment = f"{count_text(len(runs), 'run')}. A Job that failed is deleted before it is applied again."
        write_yaml(path, comment, [document for run in runs for document in self.documents(run)])
        return [f"kubectl apply -f {shlex.quote(str(path))}"]

    def documents(self, run: JobRun) -> list[dict[str, Any]]:
        """Return the Service and the Job of a run. The pod of the first node has the host name NAME-0.NAME."""
        name, request = job_name(run), self.request(run.config.cluster, run.config.launch)
        selector = {"job-name": name}
        meta: dict[str, Any] = {"name": name, "annotations": {"harness/run": f"{run.command.name}/{run.name}"}}
        if self.resources.namespace:
            meta["namespace"] = self.resources.namespace
        # Each name is a pod's own, known before the pod is ready.
        service = {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True}
        job = {
            "completions": request.nodes,
            "parallelism": request.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # the nodes of a run start together, so that none is started again alone
            "template": {"spec": merged(self.pod(run, name, selector), self.resources.pod)},
        }
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": job},
        ]

    def pod(self, run: JobRun, name: str, selector: dict[str, str]) -> dict[str, Any]:
        """Return the specification of a node's pod; no two of a run share a machine."""
        resources, request = self.resources, self.request(run.config.cluster, run.config.launch)
        limits: dict[str, Any] = {"cpu": str(request.cores)}
        if request.gpus:
            limits[resources.gpu_resource] = str(request.gpus)
        if resources.mem_gb:
            limits["memory"] = f"{resources.mem_gb:g}G"
        script = self.script(run, '"$JOB_COMPLETION_INDEX"', f"{name}-0.{name}")
        container: dict[str, Any] = {
            "name": "harness",
            "image": resources.image,
            # Kubernetes replaces $(NAME) in a command, and $$ by $.
            "command": ["bash", "-c", script.replace("$", "$$")],
            "resources": {"limits": limits},
            "volumeMounts": [
                {"name": "shared", "mountPath": resources.mount},
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        }
        if resources.secret:
            container["envFrom"] = [{"secretRef": {"name": resources.secret}}]
        apart = {"labelSelector": {"matchLabels": selector}, "topologyKey": "kubernetes.io/hostname"}
        return {
            "subdomain": name,
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": os.getuid(), "runAsGroup": os.getgid()},  # who owns the shared folder
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
            "containers": [container],
            "volumes": [
                {"name": "shared", "persistentVolumeClaim": {"claimName": resources.claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
