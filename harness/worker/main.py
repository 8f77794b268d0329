"""The code of every rank: read the run file, train, and write the rank's report. A rank does not use Hydra."""

import dataclasses
import errno
import gc
import os
import re
import socket
import traceback
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from harness.engines.base import load_engine
from harness.hardware.machine import usable_cores
from harness.measure.kernels import attention_backend_priority, prefers_cudnn
from harness.measure.memory import DeviceMemory
from harness.measure.memory_ownership import state_fields
from harness.measure.native_allocator import load_allocator
from harness.measure.operator_log import load_operator_log
from harness.measure.step_trace import StepTrace
from harness.models.dropout_rng import dropout_rng_ranks, dropout_seed
from harness.probe import Probe
from harness.records.evidence import StartUp
from harness.records.heartbeat import HeartbeatWriter
from harness.records.rank_report import RankReport, TrainingReport
from harness.records.run_folder import RunFolder, RunSpec, read_run_spec
from harness.tensors.fp32_sums import fp32_sums
from harness.util.files import atomic_write_json
from harness.util.redact import redacted
from harness.util.text import one_line
from harness.worker.batches import Batches
from harness.worker.checkpoint import resume, save_checkpoint
from harness.worker.perturbed_training import train_perturbed
from harness.worker.process_group import JoinRanks, process_group
from harness.worker.train_loop import train


def main(run_dir: str) -> None:
    """Run one rank, from its run file to its report. A failure is reported and then raised."""
    directory, rank = Path(run_dir), int(os.environ["RANK"])
    report_rank(directory, rank, HeartbeatWriter(directory, rank), process_group)


def report_rank(directory: Path, rank: int, heartbeat: HeartbeatWriter, join_ranks: JoinRanks) -> None:
    """Run a rank that joins the others in its own way, and write its report. A failure is reported and then raised."""
    report = RankReport(rank, socket.gethostname(), os.getpid(), "error", usable_cores())
    try:
        report = run_rank(read_run_spec(directory), report, heartbeat, directory, join_ranks)
    except BaseException as error:
        explained = with_remedy(error)
        report = report_failure(report, explained, heartbeat)
        if explained is not error:
            raise explained from error
        raise
    finally:
        atomic_write_json(RunFolder(directory).rank_report(rank), report.to_json())


def report_failure(report: RankReport, error: BaseException, heartbeat: HeartbeatWriter) -> RankReport:
    """Return the report with the error, and with the phase and the memory of the rank when it failed."""
    out_of_memory = out_of_memory_error(error)
    last = heartbeat.sample()
    return dataclasses.replace(
        report,
        status="oom" if out_of_memory else "error",
        phase=last.phase,
        step=last.step,
        allocated_bytes=last.allocated_bytes,
        rss_bytes=last.host_bytes,
        error=type(out_of_memory or error).__name__,
        reason=redacted(one_line(out_of_memory or error)),
        traceback=redacted(traceback.format_exc()),
    )


def run_rank(
    spec: RunSpec, report: RankReport, heartbeat: HeartbeatWriter, directory: Path, join_ranks: JoinRanks
) -> RankReport:
    """Join the other ranks and train. Return the report of this rank, whose identity is filled in already."""
    allocator = load_allocator(Path(spec.allocator)) if spec.allocator else None
    heartbeat("joining")
    with (
        join_ranks(spec) as (mesh, device),
        attention_backend_priority(prefers_cudnn(device) and not spec.layout.gathers_keys),
        fp32_sums(),
    ):
        memory = DeviceMemory(device, allocator, spec.config.cluster.memory_budget_bytes)
        heartbeat.allocated_bytes = memory.allocated_bytes
        report = build_and_train(spec, report, heartbeat, directory, mesh, memory)
        if report.checkpoint is not None:
            seconds, step = resume(spec, report.rank, memory, mesh, heartbeat, RunFolder(directory).checkpoint)
            checkpoint = report.checkpoint._replace(load_seconds=seconds, resumed=step)
            report = dataclasses.replace(report, checkpoint=checkpoint)
        if spec.perturbs:
            report = dataclasses.replace(report, perturbed=perturb(spec, report.rank, heartbeat, mesh, memory))
        return report


def build_and_train(
    spec: RunSpec,
    report: RankReport,
    heartbeat: HeartbeatWriter,
    directory: Path,
    mesh: DeviceMesh,
    memory: DeviceMemory,
) -> RankReport:
    """Build the engine and train.

    The engine is released on return, so that nothing outlives the process groups that it communicates over.
    """
    probe, device = Probe(), memory.device
    heartbeat("building")
    memory.reset_peak()
    memory.enforce_limit()
    engine = load_engine(spec.layout.engine).build(spec.config, spec.layout, mesh, device, probe)
    start_peak_bytes = memory.peak_allocated_bytes()
    gc.collect()  # nothing is collected while it trains, and would be in the memory of every step
    torch.manual_seed(dropout_seed(spec.config.train.seed, spec.layout, report.rank))
    batches = Batches(spec.corpus, spec.config, spec.layout, report.rank, device)
    snapshot = RunFolder(directory).memory_snapshot(report.rank) if spec.memory_snapshot else None
    trace = StepTrace(device, load_operator_log(Path(spec.operator_log)) if spec.operator_log else None)
    report = train(report, engine, probe, batches, spec.config, spec.layout, memory, trace, heartbeat, snapshot)
    heartbeat("finishing", spec.config.train.total_steps)
    report = dataclasses.replace(
        report,
        status="ok",
        start_peak_bytes=start_peak_bytes,
        start_up=with_marks(report.start_up, heartbeat),
        devices=engine.devices,
        skipped_steps=engine.skipped_steps,
        device_name=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        dropout_seed=torch.initial_seed(),
        dropout_rng_ranks=dropout_rng_ranks(engine.model),
        **state_fields(engine, report.profiled.gradient_bytes_by_device),
    )
    if spec.config.train.save != "none":
        folder = RunFolder(directory).checkpoint
        saved = save_checkpoint(engine, probe, batches, spec, report.rank, memory, heartbeat, folder)
        report = dataclasses.replace(report, checkpoint=saved)
    engine.close()
    return report


def with_marks(start_up: StartUp, heartbeat: HeartbeatWriter) -> StartUp:
    """Return the parts of a rank's start with those that end where a phase of its heartbeat begins."""
    marks = [heartbeat.phase_starts[phase] for phase in ("joining", "building", "warm-up")]
    import_seconds, join_seconds, build_seconds = (end - start for start, end in pairwise((0.0, *marks)))
    return start_up._replace(import_seconds=import_seconds, join_seconds=join_seconds, build_seconds=build_seconds)


def perturb(
    spec: RunSpec, rank: int, heartbeat: HeartbeatWriter, mesh: DeviceMesh, memory: DeviceMemory
) -> TrainingReport | None:
    """Train a second time with other rounding, after the first engine was released, and return the evidence of it.

    The memory budget does not apply to it. Return None if a single process has no memory for it: a divided product
    needs a little more than a whole one.
    """
    memory = dataclasses.replace(memory, budget_bytes=None)
    gc.collect()
    memory.empty_cache()
    probe = Probe()
    try:
        engine = load_engine(spec.layout.engine).build(spec.config, spec.layout, mesh, memory.device, probe)
        batches = Batches(spec.corpus, spec.config, spec.layout, rank, memory.device)
        report = train_perturbed(engine, probe, batches, spec.config, memory, heartbeat)
    except Exception as error:
        if mesh.size() > 1 or out_of_memory_error(error) is None:  # several ranks wait for this one
            raise
        return None
    engine.close()
    return report


# What libraries say whose memory does not come from torch's allocator, with the class of the error that torch raises:
#   CUDA's runtime, whatever called it (contexts, kernels, pinned memory): AcceleratorError, "CUDA error: out of
#       memory".
#   NCCL's buffers, which are allocated at a group's first collective: DistBackendError, "Failed to CUDA calloc 8388608
#       bytes" or "Cuda failure 2 'out of memory'"; of the host, "Failed to malloc 64 bytes" (its src/include/alloc.h).
#   cuBLAS and cuDNN, at their first use: RuntimeError, "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)".
#   The host: RuntimeError, "DefaultCPUAllocator: can't allocate memory"; a mapped or shared file, "Cannot allocate
#       memory (12)".
_MESSAGES = re.compile(
    r"out of memory|OutOfMemory|failed to (?:malloc|cuda (?:host )?(?:calloc|malloc|alloc))"
    r"|(?:CUBLAS|CUBLASLT|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|(?:can't|cannot) allocate memory",
    re.IGNORECASE,
)

# What NCCL says where a limit of the system is too low, in words that resemble the above, and what raises the limit.
# Only the line of its last warning is in the DistBackendError:
#   Memory that a network card shall access must be locked (src/misc/ibvwrap.cc): "Call to ibv_reg_mr failed with error
#       Cannot allocate memory", or with nothing behind "failed" in older releases; by the plugin for EFA, "NET/OFI
#       Unable to register memory (type = 1) for device 0. RC: 12, Error: Cannot allocate memory".
#   Processes exchange buffers in /dev/shm (src/misc/shmutils.cc): "Error while creating shared memory segment
#       /dev/shm/nccl-LCQB3K (size 9637888), error: No space left on device (28)", older releases without the error.
_LIMITS = {
    re.compile(pattern, re.IGNORECASE | re.MULTILINE): remedy
    for pattern, remedy in (
        (
            r"(?:\bibv_|\bNET/).*cannot allocate memory|call to ibv_(?:reg_mr|create_[cq]p?)\w* failed\s*$",
            "the limit on locked memory is too low for the network card: set `ulimit -l unlimited` where the ranks of a"
            " node are started, and --ulimit memlock=-1 for a container",
        ),
        (
            r"(?:/dev/shm|shared memory|fallocate).*(?:no space left|cannot allocate memory)"
            r"|(?:creating shared memory segment|failed to extend /dev/shm)[^,]*$",
            "/dev/shm is too small or full: a container gets more with --shm-size=1g, and /dev/shm/nccl-* of dead"
            " processes can be removed",
        ),
    )
}


def out_of_memory_error(error: BaseException | None) -> BaseException | None:
    """Return the error that says that memory ran out, or None: the error itself, or one that led to it.

    torch's pipeline stages wrap the errors that they raise, which are then causes. A clean-up that fails because memory
    ran out raises another error, of which the first is the context.
    """
    return next((entry for entry in _chain(error) if _is_out_of_memory(entry)), None)


class SystemLimitError(RuntimeError):
    """A limit of the system was too low for a library; the message has the remedy."""


def with_remedy(error: BaseException) -> BaseException:
    """Return the error, or if a limit of the system led to it, a SystemLimitError with its message and the remedy."""
    for entry in _chain(error):
        if remedy := _remedy(entry):
            limit = SystemLimitError(f"{one_line(entry)}; {remedy}")
            limit.__cause__ = error
            return limit
    return error


def _remedy(error: BaseException) -> str | None:
    """Return what raises the limit that an error of torch names, or None if it names none."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    return next((remedy for pattern, remedy in _LIMITS.items() if pattern.search(text)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all that led to it, each once: causes and contexts, and the members of exception groups."""
    waiting, visited = [error], set()
    while waiting:
        entry = waiting.pop(0)
        if entry is None or id(entry) in visited:
            continue
        visited.add(id(entry))
        yield entry
        waiting += [entry.__cause__, entry.__context__]
        if isinstance(entry, BaseExceptionGroup):
            waiting += entry.exceptions


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out. All errors of torch are RuntimeErrors."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None and _remedy(error) is None
