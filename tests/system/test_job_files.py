"""Files of jobs for Kubernetes and SkyPilot: valid by their schemas, and what is in them makes a run on two nodes."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.commands import ROOT, SMALL, Done, long, only_row, run_harness

KUBERNETES = (
    "hydra/launcher=kubernetes",
    "hydra.launcher.image=registry.example/harness:1",
    "hydra.launcher.claim=shared",
    "hydra.launcher.mount=/shared",
)

LAUNCHERS = {"kubernetes": KUBERNETES, "skypilot": ("hydra/launcher=skypilot",)}

RUN = ("strategy=ddp", "cluster.device=cpu", "cluster.nodes=2", "proof.reference=false", *SMALL)

VERSIONS = ("1.29", "1.31")  # of Kubernetes

BY_FEATURE = {
    "GPUs": ("cluster.device=cuda", "cluster.gpus_per_node=8"),
    "AMD's GPUs": ("cluster.device=cuda", "cluster.gpus_per_node=8", "hydra.launcher.gpu_resource=amd.com/gpu"),
    "a namespace, a secret, memory": (
        *("hydra.launcher.namespace=ml", "hydra.launcher.secret=tokens", "hydra.launcher.mem_gb=64"),
    ),
    "further keys of a pod": (
        "+hydra.launcher.pod={hostNetwork: true, nodeSelector: {gpu: h100},"
        " tolerations: [{key: gpu, operator: Exists}], volumes: [{name: more, emptyDir: {}}]}",
    ),
}


def write(results: Path, launcher: str, *arguments: str, status: int = 0) -> Done:
    done = run_harness(results, "name=jobs", *RUN, *LAUNCHERS[launcher], *arguments)
    assert done.returncode == status, done.stderr
    return done


def documents(results: Path, launcher: str = "kubernetes") -> list[dict[str, Any]]:
    pattern = {"kubernetes": "kubernetes.yaml", "skypilot": "skypilot/*.yaml"}[launcher]
    return [part for path in sorted((results / "jobs").glob(pattern)) for part in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("settings", [(), *BY_FEATURE.values()], ids=["plain", *BY_FEATURE])
def test_files_of_kubernetes_keep_its_schema(settings: tuple[str, ...], tmp_path: Path) -> None:
    done = write(tmp_path, "kubernetes", *settings)
    assert done.stdout.strip() == f"kubectl apply -f {tmp_path}/jobs/kubernetes.yaml"
    service, job = documents(tmp_path)
    for version in VERSIONS:
        for document in (service, job):
            kubernetes_validate.validate(document, version, strict=True)
    pod = job["spec"]["template"]["spec"]
    assert (service["kind"], job["spec"]["completions"], pod["subdomain"]) == (
        "Service",
        2,
        service["metadata"]["name"],
    )
    limits = pod["containers"][0]["resources"]["limits"]
    assert {name for name in limits if "gpu" in name} == {
        "GPUs": {"nvidia.com/gpu"},
        "AMD's GPUs": {"amd.com/gpu"},
    }.get(next((name for name, value in BY_FEATURE.items() if value == settings), ""), set())
    if settings == BY_FEATURE["further keys of a pod"]:
        assert pod["hostNetwork"] and [volume["name"] for volume in pod["volumes"]] == ["shared", "shm", "more"]


def test_the_schema_notices_a_key_that_kubernetes_does_not_have(tmp_path: Path) -> None:
    write(tmp_path, "kubernetes", "+hydra.launcher.pod={hostNetworks: true}")
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNetworks"):
        kubernetes_validate.validate(documents(tmp_path)[1], VERSIONS[-1], strict=True)


def expanded_by_kubernetes(text: str) -> str:
    """Return an argument of a container as Kubernetes passes it on: $(NAME) is a variable and $$ is $."""
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", text)
    return text.replace("$$", "$")


def scripts_of_nodes(results: Path, launcher: str) -> list[tuple[list[str], dict[str, str]]]:
    """Return what each node of the run runs, with the variables that it has there."""
    if launcher == "kubernetes":
        service, job = documents(results)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        name = service["metadata"]["name"]
        # The cluster's name service says which address a pod has.
        command = [
            expanded_by_kubernetes(word).replace(f"{name}-0.{name}", "127.0.0.1") for word in container["command"]
        ]
        return [(command, {"JOB_COMPLETION_INDEX": str(rank)}) for rank in range(job["spec"]["completions"])]
    (task,) = documents(results, "skypilot")
    ips = "\n".join(["127.0.0.1"] * task["num_nodes"])
    return [
        (["bash", "-c", task["run"]], {"SKYPILOT_NODE_IPS": ips, "SKYPILOT_NODE_RANK": str(rank)})
        for rank in range(task["num_nodes"])
    ]


def run_node(entry: tuple[list[str], dict[str, str]]) -> subprocess.CompletedProcess[str]:
    command, variables = entry
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("launcher", ["kubernetes", long("skypilot")])
def test_what_is_in_a_file_makes_the_run_on_two_nodes(launcher: str, tmp_path: Path) -> None:
    """The checkout and the results lie in folders with blanks, quotes and what a shell and Kubernetes replace."""
    checkout, results = tmp_path / "my $HOME $(PATH) 'checkout'", tmp_path / 'my $$ "results" `id`'
    for part in ("harness", "conf", "sweeps"):
        shutil.copytree(ROOT / part, checkout / part)
    settings = (f"results_dir={json.dumps(str(results))}", "tracking=none", "name=jobs", *LAUNCHERS[launcher], *RUN)
    setup = "hydra.launcher.setup=['export SET_UP=$((1 + 1))', 'pwd']"
    words = [sys.executable, "-m", "harness", *settings, setup]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with ThreadPoolExecutor(2) as pool:
        nodes = list(pool.map(run_node, scripts_of_nodes(results, launcher)))
    assert [node.returncode for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert all(node.stdout.startswith(f"{checkout}\n") for node in nodes)
    again = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "is recorded" in again.stderr and "apply" not in again.stdout
    row = only_row(results, "jobs")
    assert (row.status, row.world_size) == ("ok", 4), row.reason


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_line_break_in_a_line_of_shell_is_refused(launcher: str, tmp_path: Path) -> None:
    done = write(tmp_path, launcher, 'hydra.launcher.setup=["a\nplanted"]', status=2)
    assert f"hydra/launcher={launcher} cannot write a control character" in done.stderr
    assert documents(tmp_path, launcher) == []


def test_a_sweep_has_a_file_for_every_run_and_names_that_dns_takes(tmp_path: Path) -> None:
    sweep = (
        "-m",
        "train.seed=0,1",
        "model.name='Llama_3.1 (8B) with a name longer than a label of DNS may be'",
    )
    commands = write(tmp_path, "skypilot", *sweep).stdout.splitlines()
    assert len(commands) == len(documents(tmp_path, "skypilot")) == 2
    assert all(command.startswith("sky jobs launch --yes ") for command in commands)
    write(tmp_path, "kubernetes", *sweep)
    names = [document["metadata"]["name"] for document in documents(tmp_path)]
    assert len(names) == 4 and len(set(names)) == 2
    assert all(re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", name) and len(name) <= 60 for name in names)


SECRET = "hf_aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3f"

REFUSALS = {
    "no image": ("kubernetes", ("hydra.launcher.image=null",), "hydra.launcher.image=null"),
    "no number of GPUs": ("kubernetes", ("cluster.device=cuda",), "cluster.gpus_per_node=null"),
    "no name of a GPU": (
        *("skypilot", ("cluster.device=cuda", "cluster.gpus_per_node=8"), "hydra.launcher.accelerator=null"),
    ),
    "a secret": (
        *(
            "skypilot",
            ("+hydra.launcher.task={envs: {HF_TOKEN: hf_aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3f}}",),
            "holds a secret",
        ),
    ),
}


@pytest.mark.parametrize(("launcher", "settings", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_no_file_can_be_written_for_is_one_line(
    launcher: str, settings: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = write(tmp_path, launcher, *settings, status=2)
    assert words in done.stderr and len(done.stderr.strip().splitlines()) == 1


# Prints the schema of a task, by the library in the environment that runs it.
SCHEMA = "import json; from sky.utils import schemas; print(json.dumps(schemas.get_task_schema()))"


@pytest.fixture(scope="module")
def validate_task(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], None]:
    """Return SkyPilot's own check of a task, from an environment of its own: dev has no room for it."""
    folder = tmp_path_factory.mktemp("skypilot")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "skypilot"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"SkyPilot cannot be installed: {done.stderr[-300:]}")
    schema = json.loads(subprocess.run([python, "-c", SCHEMA], capture_output=True, text=True, check=True).stdout)
    import jsonschema

    return lambda task: jsonschema.Draft7Validator(schema).validate(task)


@pytest.mark.long
def test_files_of_skypilot_keep_its_schema(validate_task: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    gpus = (
        "cluster.device=cuda",
        "cluster.gpus_per_node=8",
        "hydra.launcher.accelerator=H100",
        "hydra.launcher.mem_gb=64",
    )
    further = "+hydra.launcher.task={volumes: {/shared: shared}, resources: {use_spot: true}}"
    for name, settings in (("plain", ()), ("GPUs", (*gpus, further))):
        write(tmp_path / name, "skypilot", *settings)
        (task,) = documents(tmp_path / name, "skypilot")
        validate_task(task)
    assert task["resources"] == {"cpus": "16+", "accelerators": "H100:8", "memory": "64+", "use_spot": True}
    with pytest.raises(Exception, match="Additional properties"):
        validate_task(task | {"number_of_nodes": 2})
