"""Process groups without a bound device and early time limits, a virtual rank's group, and errors of exhausted memory.

No GPU is here: where a run has GPUs, gloo's group stands in for NCCL's, and the calls that name a device are recorded.
"""

import errno
import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistBackendError, ProcessGroup, distributed_c10d

from harness.config.schema import RunConfig
from harness.config.strategy import AXES
from harness.cost_model.timing.step_time import StepTime
from harness.data.corpus import Corpus
from harness.layout.layout import resolve_layout
from harness.measure.memory import DeviceMemory
from harness.metrics.columns import virtual_columns
from harness.records.heartbeat import HeartbeatWriter
from harness.records.rank_report import PhaseShare, RankReport, TimeBreakdown
from harness.records.run_folder import RunFolder, RunSpec, read_run_spec
from harness.simulator.deepspeed_process import fill_padding
from harness.simulator.process_group import fake_process_group
from harness.simulator.virtual_rank import RECEIVED_GRADIENT, RECEIVED_HIDDEN_STATE, fill_received, own_vocabulary
from harness.worker import main as worker_main
from harness.worker import process_group as groups
from harness.worker.main import SystemLimitError, out_of_memory_error, perturb, with_remedy
from tests.support.commands import compose_config, long


@pytest.fixture
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
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.usefixtures("single_rank")
def test_no_group_times_out_before_the_run_does(config: RunConfig) -> None:
    """A limit of torch, 10 minutes for NCCL and 30 for gloo, would end a run of 2 hours, or race hang_seconds."""
    expected = timedelta(seconds=7200 + groups.MARGIN_SECONDS)
    with groups.process_group(run_spec(config)) as (mesh, _):
        assert mesh.mesh_dim_names == AXES
        later = dist.new_group([0])  # as DeepSpeed makes its groups
        all_groups = [distributed_c10d._get_default_group(), later, *(mesh.get_group(axis) for axis in AXES)]
        assert {timeout_of(group) for group in all_groups} == {expected}
        assert distributed_c10d._get_default_timeout(dist.Backend("nccl")) == expected


@pytest.mark.usefixtures("single_rank")
def test_an_infinite_time_limit_is_one_that_torch_can_add_to_a_clock(config: RunConfig) -> None:
    assert timedelta(days=1) < groups.collective_timeout(math.inf) < timedelta(days=60)
    with groups.process_group(run_spec(config, timeout_seconds=math.inf)):
        dist.barrier()


@pytest.mark.usefixtures("single_rank")
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


# A step of 1 s, of which stand-ins for collectives take 0.2 s in forward and 0.1 s in backward.
REPORT = RankReport(
    status="ok",
    device_name="cpu",
    step_seconds=(1.0,),
    phase_seconds={"data": (0.1,), "forward": (0.3,), "backward": (0.4,), "optimizer": (0.1,)},
    time_breakdown=TimeBreakdown(
        1.0, {"forward": PhaseShare(0.3, 0.2, 0.0), "backward": PhaseShare(0.4, 0.1, 0.0)}, overlapped_seconds=0.0
    ),
)

PREDICTED = StepTime(
    compute_seconds=9.0,
    exposed_communication_seconds={"dp_shard": 0.5, "tp": 0.25},
    bubble_seconds=0.125,
    optimizer_seconds=9.0,
    other_seconds=9.0,
    micro_batches=1,
    forward_seconds=9.0,
    backward_seconds=9.0,
    hidden_communication_seconds=9.0,
)


def test_an_estimated_step_is_measured_computing_and_predicted_communication() -> None:
    layout = resolve_layout(compose_config("strategy=fsdp_full_shard").strategy, 4)
    columns = virtual_columns(layout, [REPORT], PREDICTED)
    assert columns["predicted_communication_seconds"] == pytest.approx(0.875)
    assert columns["estimated_step_seconds"] == pytest.approx(1.0 - 0.3 + 0.875)
    parts = [columns[f"{name}_seconds"] for name in ("data", "forward", "backward", "optimizer", "other")]
    assert parts == pytest.approx([0.1, 0.1, 0.3, 0.1, 0.1])
    assert not {"step_seconds", "tokens_per_second", "exposed_communication_seconds"} & columns.keys()


def test_no_step_is_estimated_without_known_hardware() -> None:
    layout = resolve_layout(compose_config("strategy=fsdp_full_shard").strategy, 4)
    assert (
        not {"estimated_step_seconds", "predicted_communication_seconds"}
        & virtual_columns(layout, [REPORT], None).keys()
    )


WORLD_SIZE = 4

# The collectives of engines that allocate their results, as calls with an input and a result of WORLD_SIZE or 1 parts.
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_gather_into_tensor": lambda part, whole: dist.all_gather_into_tensor(whole, part),
    "all_gather": lambda part, whole: dist.all_gather([*whole.chunk(WORLD_SIZE)], part),
    "reduce_scatter_tensor": lambda part, whole: dist.reduce_scatter_tensor(part, whole),
    "reduce_scatter": lambda part, whole: dist.reduce_scatter(part, [*whole.chunk(WORLD_SIZE)]),
    "all_to_all_single": lambda part, whole: dist.all_to_all_single(part, part.clone().fill_(1.0)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_fake_process_group_fills_results(name: str) -> None:
    part, whole = torch.ones(WORLD_SIZE), torch.ones(WORLD_SIZE * WORLD_SIZE)
    (whole if name.startswith("all_gather") else part).fill_(math.nan)
    with fake_process_group(WORLD_SIZE - 1, WORLD_SIZE):
        COLLECTIVES[name](part, whole)
    assert (part == 1).all() and (whole == 1).all()


@pytest.mark.parametrize("size", [RECEIVED_HIDDEN_STATE, RECEIVED_GRADIENT])
@pytest.mark.parametrize("hidden", [6, 7])
def test_received_values_are_normal_numbers_in_float16(size: float, hidden: int) -> None:
    received = torch.full((2, 3, hidden), math.nan, dtype=torch.float16, requires_grad=True)
    version = received._version
    fill_received(received, size)
    assert received.isfinite().all() and received.abs().min() >= torch.finfo(torch.float16).tiny
    assert received.std() > 0.9 * size and received._version == version


def test_ranks_divide_a_vocabulary_as_tensor_parallelism_does() -> None:
    layout = resolve_layout(compose_config("strategy=tp").strategy, 4)
    assert [len(own_vocabulary(258, layout, rank)) for rank in range(4)] == [65, 65, 65, 63]
    assert own_vocabulary(258, layout, 3) == range(195, 258)
    whole = resolve_layout(compose_config("strategy=tp", "strategy.vocabulary_parallel=false").strategy, 4)
    assert own_vocabulary(258, whole, 3) == range(258)


@pytest.mark.parametrize(("place", "expected"), [(0, [0, 1, 2]), (1, [3, 4, 0]), (2, [0, 1, 2])])
def test_the_padding_of_a_part_is_filled(place: int, expected: list[int]) -> None:
    whole, part = torch.arange(5.0), torch.full((3,), math.nan)
    valid = whole[3 * place : 3 * place + 3]
    part[: len(valid)] = valid
    fill_padding(part, whole, place)
    assert part.tolist() == expected


# Messages as users report them; the numbers are issues of the repositories.
EXHAUSTED: dict[str, BaseException] = {
    "torch's allocator": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 11.00 MiB is"
        " free."
    ),
    "CUDA's runtime (Comfy-Org/ComfyUI 14165)": torch.AcceleratorError(
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"
        " https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nCUDA kernel"
        " errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    ),
    "pinned memory": RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions."),
    "ROCm": RuntimeError("HIP error: out of memory"),
    "NCCL's buffers (NVIDIA/nccl 1235)": DistBackendError(
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, unhandled cuda error (run with"
        " NCCL_DEBUG=INFO for details), NCCL version 2.18.5\nncclUnhandledCudaError: Call to CUDA function"
        " failed.\nLast error:\nFailed to CUDA calloc 6291456 bytes"
    ),
    "NCCL's later wording": DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version"
        " 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    "cuBLAS (QwenLM/Qwen3 873)": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "NCCL on the host": DistBackendError(
        "ncclSystemError: System call failed.\nLast error:\nFailed to malloc 64 bytes"
    ),
    "the host's allocator": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
        " allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "a mapped file": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "Python": MemoryError(),
}

OTHER: dict[str, BaseException] = {
    "an illegal access": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "a lost connection": DistBackendError("NCCL error: remote process exited or there was a network error"),
    "cuBLAS without its library": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
    "a full disk": OSError(errno.ENOSPC, "No space left on device"),
    "a text about memory": ValueError("out of memory"),
    "a wrong shape": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    "an address": DistBackendError("Last error:\nCall to ibv_reg_mr failed with error Bad address"),
    "a cable": DistBackendError(
        "Last error:\nCall to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1"
    ),
    "another process's segment": DistBackendError(
        "Error while attaching to shared memory segment /dev/shm/nccl- (size 192814336), error: No such file or"
        " directory (2)"
    ),
    "a device's shared memory": RuntimeError(
        "out of resource: shared memory, Required: 262144, Hardware limit: 232448"
    ),
}

# The last warnings of NCCL where a limit of the system is too low, by words of the remedy.
LIMITS: dict[str, tuple[str, ...]] = {
    "ulimit -l unlimited": (
        "Call to ibv_reg_mr failed with error Cannot allocate memory",
        "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",  # NVIDIA/nccl-tests 206
        "Call to ibv_create_cq failed with error Cannot allocate memory",  # NVIDIA/nccl 1191
        "Call to ibv_create_qp failed",  # NCCL's guide, under InfiniBand
        "NET/OFI Unable to register memory (type = 1) for device 0. RC: 12, Error: Cannot allocate memory",  # 563
    ),
    "--shm-size=1g": (
        "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device"
        " (28)",  # pytorch/ci-infra 490
        "Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)",
        "Error while creating shared memory segment /dev/shm/nccl-KWfVyt (size 5967872)",  # NVIDIA/nccl-tests 166
        "Call to posix_fallocate failed : No space left on device",  # NVIDIA/nccl 290
    ),
}


def nccl_error(last_warning: str) -> DistBackendError:
    return DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with"
        " NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclSystemError: System call (e.g. socket, malloc) or"
        f" external library call failed or device error. \nLast error:\n{last_warning}"
    )


@pytest.mark.parametrize(
    ("error", "is_exhausted"),
    [(error, errors is EXHAUSTED) for errors in (EXHAUSTED, OTHER) for error in errors.values()],
    ids=(*EXHAUSTED, *OTHER),
)
def test_memory_that_ran_out_is_recognized_whoever_reports_it(error: BaseException, is_exhausted: bool) -> None:
    assert out_of_memory_error(error) is (error if is_exhausted else None)


@pytest.mark.parametrize(
    ("remedy", "warning"), [(remedy, warning) for remedy, warnings in LIMITS.items() for warning in warnings]
)
def test_a_limit_of_the_system_is_no_lack_of_memory(remedy: str, warning: str) -> None:
    """As one, the run would be an oom, and every larger run would be pruned."""
    error = RuntimeError("stage 1 failed in forward")
    error.__cause__ = nccl_error(warning)
    explained = with_remedy(error)
    assert isinstance(explained, SystemLimitError) and remedy in str(explained) and warning in str(explained)
    assert "\n" not in str(explained) and explained.__cause__ is error
    assert out_of_memory_error(error) is out_of_memory_error(explained) is None


@pytest.mark.parametrize("error", [*EXHAUSTED.values(), *OTHER.values()], ids=[*EXHAUSTED, *OTHER])
def test_other_errors_have_no_remedy(error: BaseException) -> None:
    assert with_remedy(error) is error


def test_the_line_of_a_rank_has_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise nccl_error(LIMITS["ulimit -l unlimited"][0])

    monkeypatch.setattr(worker_main, "run_rank", fails)
    monkeypatch.setattr(worker_main, "read_run_spec", lambda _: None)
    folder = RunFolder(tmp_path)
    folder.ranks.mkdir()
    with pytest.raises(SystemLimitError, match="ulimit -l unlimited"):  # the launcher writes what a rank raises
        worker_main.report_rank(tmp_path, 0, HeartbeatWriter(tmp_path, 0), fails)  # type: ignore[arg-type]
    report = RankReport.from_json(json.loads(folder.rank_report(0).read_text()))
    assert (report.status, report.error) == ("error", "SystemLimitError") and "ulimit" in report.reason


def test_what_torch_raises_for_a_tensor_that_is_too_large_is_recognized() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert out_of_memory_error(raised.value) is raised.value


@pytest.mark.parametrize("error", EXHAUSTED.values(), ids=EXHAUSTED)
def test_an_error_of_a_clean_up_does_not_hide_what_it_cleans_up(error: BaseException) -> None:
    """Pipelines wrap errors (`from`), and what runs in a finally or except block raises over them."""
    with pytest.raises(RuntimeError) as wrapped:
        try:
            try:
                raise error
            finally:
                raise RuntimeError("CUDA error: unspecified launch failure")
        except RuntimeError as clean_up:
            raise RuntimeError("stage 1 failed in forward") from clean_up
    assert out_of_memory_error(wrapped.value) is error
    assert out_of_memory_error(BaseExceptionGroup("ranks", [ValueError(), RuntimeError("x"), error])) is error


def test_errors_that_lead_to_each_other_are_no_endless_loop() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__context__, second.__context__ = second, first
    assert out_of_memory_error(first) is None


@pytest.mark.parametrize(
    ("error", "ranks", "is_raised"),
    [
        (EXHAUSTED["CUDA's runtime (Comfy-Org/ComfyUI 14165)"], 1, False),
        long(EXHAUSTED["torch's allocator"], 1, False),
        (EXHAUSTED["torch's allocator"], 2, True),
        (OTHER["an illegal access"], 1, True),
    ],
)
def test_a_single_process_may_lack_memory_for_its_second_training(
    error: BaseException, ranks: int, is_raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reports that memory ran out, the first training counts; other ranks would wait for this one."""

    def build(*_: object) -> None:
        raise error

    monkeypatch.setattr(worker_main, "load_engine", lambda _: SimpleNamespace(build=build))
    spec, mesh = SimpleNamespace(layout=SimpleNamespace(engine=""), config=None), SimpleNamespace(size=lambda: ranks)
    arguments: Any = (spec, 0, lambda *_: None, mesh, DeviceMemory(torch.device("cpu")))
    with pytest.raises(type(error)) if is_raised else nullcontext():
        assert perturb(*arguments) is None
