"""Process groups: no bound device, and no time limit below the harness's own, for whatever group a library makes.

No GPU is here: where a run has GPUs, gloo's group stands in for NCCL's, and the calls that name a device are recorded.
"""

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from harness.config.schema import RunConfig
from harness.config.strategy import AXES
from harness.data.corpus import Corpus
from harness.layout.layout import resolve_layout
from harness.records.run_folder import RunSpec, read_run_spec
from harness.worker import process_group as groups
from tests.support.commands import compose_config


@pytest.fixture(autouse=True)
def single_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process a world of one rank, and restore what joining changes."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (names | {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed_c10d, "default_pg_timeout", distributed_c10d.default_pg_timeout)
    monkeypatch.setattr(distributed_c10d, "default_pg_nccl_timeout", distributed_c10d.default_pg_nccl_timeout)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose_config("strategy=single", "model=tiny")


def run_spec(config: RunConfig, **changes: Any) -> RunSpec:
    values: dict[str, Any] = {"device": "cpu", "threads": 1, "timeout_seconds": 7200.0}
    layout = resolve_layout(config.strategy, 1)
    return RunSpec("run", config, layout, Corpus(None, "synthetic"), **values | changes)


def timeout_of(group: ProcessGroup) -> timedelta:
    options: Any = group._get_backend(torch.device("cpu")).options
    timeout: timedelta = options._timeout
    return timeout


def test_no_group_times_out_before_the_run_does(config: RunConfig) -> None:
    """A limit of torch, 10 minutes for NCCL and 30 for gloo, would end a run of 2 hours, or race hang_seconds."""
    expected = timedelta(seconds=7200 + groups.MARGIN_SECONDS)
    with groups.process_group(run_spec(config)) as (mesh, _):
        assert mesh.mesh_dim_names == AXES
        later = dist.new_group([0])  # as DeepSpeed makes its groups
        assert isinstance(later, ProcessGroup)
        all_groups = [distributed_c10d._get_default_group(), later, *(mesh.get_group(axis) for axis in AXES)]
        assert {timeout_of(group) for group in all_groups} == {expected}
        assert distributed_c10d._get_default_timeout(dist.Backend("nccl")) == expected


def test_an_infinite_time_limit_is_one_that_torch_can_add_to_a_clock(config: RunConfig) -> None:
    assert timedelta(days=1) < groups.collective_timeout(math.inf) < timedelta(days=60)
    with groups.process_group(run_spec(config, timeout_seconds=math.inf)):
        dist.barrier()


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_group_of_gpus_binds_no_device_and_connects_before_the_model_is_built(
    config: RunConfig, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier names the device. Otherwise gloo would run it where a run has both, and NCCL connect in a step."""
    spec = run_spec(config, device="cuda")
    object.__setattr__(spec.layout, "offload", offload)
    calls: list[tuple[str, Any]] = []
    join, barrier, mesh_of = dist.init_process_group, dist.barrier, groups.init_device_mesh

    def join_gloo(backend: str, **options: Any) -> None:
        calls.append(("join", (backend, options.get("device_id"))))
        join("gloo", timeout=options["timeout"])

    def record_barrier(*_: Any, device_ids: list[int] | None = None) -> None:
        calls.append(("barrier", device_ids))
        barrier()

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", str(device))))
    monkeypatch.setattr(dist, "init_process_group", join_gloo)
    monkeypatch.setattr(dist, "barrier", record_barrier)
    monkeypatch.setattr(groups, "init_device_mesh", lambda _, *rest, **names: mesh_of("cpu", *rest, **names))
    with groups.process_group(spec):
        assert distributed_c10d._get_default_group().bound_device_id is None
    backend = "nccl" if offload == "none" else "cpu:gloo,cuda:nccl"
    assert calls == [("device", "cuda:0"), ("join", (backend, None)), ("barrier", [0])]


def test_a_run_file_carries_the_time_limit(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    run_spec(config, timeout_seconds=5400.0).write(tmp_path)
    assert read_run_spec(tmp_path).timeout_seconds == 5400.0
