"""What a job of Slurm requests, by tables of what sinfo reports on sites that are not here."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.config.command import CommandConfig
from harness.config.schema import ClusterConfig, RunConfig
from harness.sweep.slurm import commands
from harness.sweep.slurm.commands import (
    SlurmResources,
    batch_script,
    gpus_among,
    query_node_shape,
    sbatch_directives,
)
from harness.sweep.slurm.queue import SlurmQueue
from harness.util.text import UserError

# What `sinfo --noheader --format="%P %c %G"` prints. The default partition has a star.
SITES = {
    "GPUs of one kind": (["gpu* 128 gpu:h100:8(S:0-1)"], (8, 128)),
    "several resources": (["gpu* 64+ gpu:a100:4(S:0,1),nic:2,shard:16"], (4, 64)),
    "two kinds in a node": (["gpu* 24 gpu:tesla:2(S:0),gpu:kepler:1(S:1)"], (3, 24)),
    "nodes of two sizes": (["gpu* 128 gpu:8", "gpu* 32 gpu:4", "gpu* 16 (null)"], (4, 32)),
    "another partition": (["cpu* 16 (null)", "gpu 128 gpu:8"], (0, 16)),
    "no GPUs": (["main* 4 (null)"], (0, 4)),
    "no default partition": (["gpu 128 gpu:8"], (None, None)),
    "no answer": ([], (None, None)),
}


@pytest.mark.parametrize(("site", "shape"), SITES.values(), ids=SITES, indirect=["site"])
def test_the_shape_of_the_default_partitions_nodes(site: None, shape: tuple[int | None, int | None]) -> None:
    assert query_node_shape(None) == shape


@pytest.mark.parametrize("site", [["cpu* 16 (null)", "gpu 128 gpu:8"]], indirect=True)
def test_a_partition_is_found_by_its_name() -> None:
    assert query_node_shape("gpu") == (8, 128) and query_node_shape("cpu") == (0, 16)
    assert gpus_among("gres/gpu=2,nic:3") == 2 and gpus_among("gpu") == 1 and gpus_among("(null)") == 0


@pytest.fixture(autouse=True)
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make sinfo report a GPU partition with eight GPUs and 128 cores, or what the test's parameter says."""
    lines = getattr(request, "param", ["gpu* 128 gpu:h100:8(S:0-1)"])

    def run(*words: str, **_: Any) -> subprocess.CompletedProcess[str] | None:
        assert words[0] == "sinfo"
        return None if lines is None else subprocess.CompletedProcess(words, 0, "\n".join(lines), "")

    commands.query_node_shape.cache_clear()
    monkeypatch.setattr(commands, "run_slurm_command", run)
    yield
    commands.query_node_shape.cache_clear()


def options_of(resources: SlurmResources, launch: str, cluster: dict[str, Any]) -> dict[str, str]:
    """Return the options of sbatch in the header of a job."""
    return dict(re.findall(r"^#SBATCH --([^=\n]+)=(.*)$", sbatch_header(resources, launch, cluster), re.M))


def sbatch_header(resources: SlurmResources, launch: str, cluster: dict[str, Any]) -> str:
    config = object.__new__(RunConfig)
    object.__setattr__(config, "cluster", ClusterConfig("site", **cluster))
    object.__setattr__(config, "launch", launch)
    return sbatch_directives(resources, config, CommandConfig())


def request_of(
    resources: SlurmResources | None = None, launch: str = "processes", **cluster: Any
) -> tuple[str | None, str | None]:
    """Return the GPUs and cores that the header of a job requests."""
    options = options_of(resources or SlurmResources(), launch, cluster)
    return options.get("gpus-per-node"), options.get("cpus-per-task")


def test_a_job_gets_all_gpus_of_a_node_and_their_share_of_its_cores() -> None:
    assert request_of() == ("8", "128")
    assert request_of(device="cuda", gpus_per_node=2) == ("2", "32")
    assert request_of(SlurmResources(gpus_per_node=4)) == ("4", "64")
    assert request_of(SlurmResources(cpus_per_task=12)) == ("8", "12")


def test_a_job_on_the_cpu_gets_a_core_for_each_rank() -> None:
    assert request_of(device="cpu") == (None, "2") and request_of(device="cpu", gpus_per_node=4) == (None, "4")


def test_a_rank_that_runs_alone_gets_one_gpu_and_its_share_of_the_cores() -> None:
    """cluster.gpus_per_node says how many ranks share a node in the predicted time, not what the job uses."""
    for cluster in ({}, {"gpus_per_node": 4}, {"device": "cuda", "gpus_per_node": 2}):
        assert request_of(launch="virtual", **cluster) == ("1", "16")
    assert request_of(SlurmResources(gpus_per_node=2), launch="virtual") == ("2", "32")
    assert request_of(SlurmResources(gres="gpu:h100:1"), launch="virtual") == (None, "16")
    assert request_of(launch="virtual", device="cpu", gpus_per_node=4) == (None, "4")


def test_a_simulation_gets_one_node_without_gpus() -> None:
    """The cluster of a simulation is the one that it describes, and not where it runs."""
    for launch, nodes in (("processes", "4"), ("simulated", "1")):
        options = options_of(SlurmResources(), launch, {"device": "cuda", "gpus_per_node": 8, "nodes": 4})
        assert options["nodes"] == nodes and options["ntasks-per-node"] == "1"
        assert options.get("gpus-per-node") == ("8" if launch == "processes" else None)
    assert request_of(launch="simulated") == request_of(launch="simulated", device="cuda", gpus_per_node=8)
    assert request_of(launch="simulated") == (None, "2")
    assert SlurmQueue({}).requested_device(ClusterConfig("site"), "simulated") == "cpu"
    assert SlurmQueue({}).requested_device(ClusterConfig("site"), "virtual") == "cuda"


@pytest.mark.parametrize("site", [["main* 4 (null)"]], indirect=True)
def test_a_rank_that_runs_alone_is_on_the_cpu_where_a_site_has_no_gpus() -> None:
    assert request_of(launch="virtual") == (None, "2")


@pytest.mark.parametrize("site", [None], indirect=True, ids=["sinfo is missing"])
def test_a_simulation_asks_nothing_of_the_site(site: None) -> None:
    assert request_of(launch="simulated", device="cuda", gpus_per_node=8) == (None, "2")


@pytest.mark.parametrize(
    "resources",
    [
        SlurmResources(gres="gpu:a100:4"),
        SlurmResources(additional_parameters={"gpus_per_task": "a100:4"}),
        SlurmResources(additional_parameters={"gpus": 4}),
        SlurmResources(additional_parameters={"tres_per_node": "gres/gpu:4"}),
    ],
    ids=["gres", "gpus_per_task", "gpus", "tres_per_node"],
)
def test_gpus_that_are_requested_otherwise_are_not_requested_again(resources: SlurmResources) -> None:
    assert request_of(resources) == (None, "64")


@pytest.mark.parametrize("site", [["main* 4 (null)"]], indirect=True)
def test_a_site_without_gpus_runs_on_the_cpu_unless_gpus_are_wanted() -> None:
    assert request_of() == (None, "2")
    with pytest.raises(UserError, match=r"sinfo reports no node with GPUs: .*cluster\.device=cpu"):
        request_of(device="cuda")
    assert request_of(gpus_per_node=4) == ("4", "8")


@pytest.mark.parametrize("site", [None, []], indirect=True, ids=["sinfo is missing", "sinfo is silent"])
def test_a_site_that_does_not_tell_must_be_told_the_number(site: None) -> None:
    for device in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"cluster\.gpus_per_node=null.*sinfo does not report"):
            request_of(device=device)
    assert request_of(gpus_per_node=4) == ("4", "8") and request_of(device="cpu") == (None, "2")


@pytest.mark.parametrize(
    "planted",
    [
        {"partition": "a\nplanted"},
        {"account": "a\rplanted"},
        {"qos": "a\vplanted"},
        {"additional_parameters": {"comment": "a\nplanted"}},
        {"additional_parameters": {"comment\nplanted": True}},
        {"setup": ("a\nplanted",)},
        {"srun_args": ("a\x85planted",)},
    ],
    ids=str,
)
def test_a_value_that_would_add_a_line_is_refused(planted: dict[str, Any], tmp_path: Path) -> None:
    resources = SlurmResources(**planted)
    with pytest.raises(UserError, match=r"^hydra/launcher=slurm .*control character.*planted") as refusal:
        batch_script(
            sbatch_header(resources, "processes", {"device": "cpu"}), resources, [tmp_path / "values.json"], tmp_path
        )
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("name", ["a\nb", "a\\b"])
def test_a_folder_that_slurm_cannot_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"control character|without a backslash"):
        batch_script("", SlurmResources(), [tmp_path / "values.json"], tmp_path / name)


def test_srun_gets_the_cores_of_the_job(tmp_path: Any) -> None:
    """Bash expands the line as a job does: with the number of cores, and in a job that has none requested, without."""
    script = batch_script("", SlurmResources(srun_args=("--mpi=none",)), [tmp_path / "values.json"], tmp_path)
    line = next(line for line in script.splitlines() if line.startswith("srun "))
    for variable, option in (("SLURM_CPUS_PER_TASK=16", "--cpus-per-task=16 "), ("", "")):
        shell = f'srun() {{ echo "$@"; }}; files=(values.json); SLURM_ARRAY_TASK_ID=0; {variable}\n{line}'
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, env={})
        assert done.stdout.startswith(f"{option}--mpi=none ") and done.stdout.endswith("values.json\n")
