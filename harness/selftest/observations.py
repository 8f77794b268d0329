"""Checks of the self-test's steps that observe more than records: trace files, free memory, and whole commands."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from harness.config.schema import ClusterConfig
from harness.hardware.cuda_devices import wait_for_release
from harness.hardware.nvml import visible_device_ids
from harness.records.provenance import versions
from harness.records.run_folder import comparison_folder
from harness.records.schema import Record
from harness.records.store import read_record
from harness.runner.resolve import detect_machine
from harness.selftest.bench import COMPARISON, Bench, StepFailedError, StepSkippedError
from harness.selftest.checks import ran, require, require_status
from harness.selftest.rank_variants import trace_path
from harness.sweep.slurm.commands import slurm_output
from harness.util.native_build import compiler_problem
from harness.util.text import count_text, format_bytes, one_line

DEVICE_ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace file's events on a GPU

COMMAND_SECONDS = 600.0  # the time limit of a whole command

SHORT = ("model=tiny", "train.global_batch=8", "train.seq_len=64", "train.steps=3", "train.warmup_steps=3")


def trace_files_are_whole(bench: Bench, records: Sequence[Record]) -> str:
    """Require a trace file of every rank that lists operators and, of a GPU, its kernels; return what they have."""
    (record,) = records
    words = []
    for rank in range(record.row["world_size"]):
        path = trace_path(bench.folder(record), rank)
        try:
            events = json.loads(path.read_text())["traceEvents"]
        except (OSError, ValueError, KeyError) as error:
            raise StepFailedError(f"rank {rank} left no trace file that can be read: {one_line(error)}") from None
        counts = Counter(event.get("cat") for event in events if event.get("ph") == "X")
        on_device = sum(counts[category] for category in DEVICE_ACTIVITIES)
        listed = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"
        is_whole = counts["cpu_op"] > 0 and (counts["kernel"] > 0 or not bench.gpus)
        require(is_whole, f"the trace file of rank {rank} lists {listed}: {path}")
        words.append(f"{counts['cpu_op']:,} operators and {on_device:,} activities of a device")
    size = format_bytes(sum(trace_path(bench.folder(record), rank).stat().st_size for rank in range(len(words))))
    return f"{size} of trace files with {'; '.join(words)}"


def memory_is_released(bench: Bench, records: Sequence[Record]) -> str:
    """Require that devices become as free as they were before this command; return after how many seconds."""
    cluster, started = ClusterConfig("local", device=bench.device), time.monotonic()
    problem = wait_for_release(bench.machine.free_bytes, lambda: detect_machine(cluster).free_bytes)
    require(not problem, str(problem))
    return f"the memory of an ended run was free {time.monotonic() - started:.1f} s after its record was written"


def side_by_side(bench: Bench, _: Sequence[Record]) -> str:
    """Require that runs side by side are proven, and that nn.DataParallel has as many devices as others."""
    strategies = ("dp", "ddp") if bench.gpus > 1 else ("single", "ddp")
    devices = min(bench.gpus, 2)
    options = [f"world_size={bench.world_size}", "sweep.parallel=2", "precision=fp32"]
    options += [f"cluster.gpus_per_node={devices}", f"train.micro_batch={devices}"] if devices else []
    records = run_command(bench, "side-by-side", f"strategy={','.join(strategies)}", *options)
    require_status(records, "ok")
    for record in records if devices else ():
        count = sum(rank.devices for rank in record.ranks)
        problem = f"{record.row['strategy']} had {count_text(count, 'device')} and not {devices}"
        require(count == devices, problem)
    return ran(bench, records)


def two_nodes(bench: Bench, _: Sequence[Record]) -> str:
    """Require that a job of Slurm on two nodes proves its run; skip where Slurm has no two nodes."""
    listed = slurm_output("sinfo", "-h", "-N", "-o", "%N")
    nodes = set((listed or "").split())
    if len(nodes) < 2:
        has = "there is none here" if listed is None else f"sinfo lists {len(nodes)}"
        raise StepSkippedError(f"needs a Slurm with two nodes; {has}")
    records = run_command(bench, "two-nodes", "strategy=ddp", "hydra/launcher=slurm", "cluster.nodes=2")
    require_status(records, "ok")
    return ran(bench, records)


def run_command(bench: Bench, name: str, *overrides: str) -> list[Record]:
    """Run a whole command in a process of its own and return the records of its comparison.

    Raises StepFailedError if it fails before any run has a record.
    """
    folder = bench.results_dir / COMPARISON / "commands"
    own = (f"name={name}", f"results_dir={folder}", f"cluster.device={bench.device}", "tracking=none", "force=true")
    words = ("-m", "harness", "-m", *own, *SHORT, *overrides)
    done = run_python(*words, seconds=COMMAND_SECONDS)
    records = [read_record(run.path) for run in comparison_folder(name, str(folder)).recorded_runs()]
    require(bool(records), f"{' '.join(words)} ended with {done.returncode}: {one_line(done.stderr[-500:])}")
    return records


def run_python(
    *words: str, seconds: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own to its end. Raises StepFailedError if that takes longer than `seconds`."""
    command, environment = [sys.executable, *words], os.environ | (variables or {})
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepFailedError(one_line(error)) from None


LIBRARIES = ("torch", "deepspeed", "accelerate")  # the libraries without which an engine is missing

_SHORT_UUID = 8  # hexadecimal digits of a UUID that CUDA_VISIBLE_DEVICES may be shortened to

_PROBE_SECONDS = 120.0  # the time limit of a process that looks at devices

# Processes of their own print what is asked of CUDA, because it reads its variables once per process.
_SEEN_DEVICES = """
from harness.config.schema import ClusterConfig
from harness.runner.resolve import detect_machine
print(detect_machine(ClusterConfig("local", device="cuda")).devices)
"""

_UUID = """
import torch
print(torch.cuda.get_device_properties(0).uuid)
"""


def describe_environment(bench: Bench, records: Sequence[Record]) -> str:
    """Require the libraries of all engines, and on a CPU a compiler; return versions."""
    installed = versions()
    missing = [name for name in LIBRARIES if installed[name] is None]
    require(not missing, f"not installed: {', '.join(missing)}; install the package with all that it depends on")
    problem, environment = compiler_problem(), bench.environment
    require(not problem or bench.machine.device != "cpu", f"memory is not counted on a CPU: {problem}")
    words = [f"{name} {installed[name]}" for name in ("python", *LIBRARIES)]
    words += [f"{name} {environment[name]}" for name in ("cuda", "nccl", "driver") if environment.get(name)]
    return ", ".join([*words, str(environment.get("compiler") or problem or "a compiler of unknown version")])


def describe_devices(bench: Bench, records: Sequence[Record]) -> str:
    """Require that a CUDA device is seen under each of its names; return the devices and their memory."""
    machine = bench.machine
    free = format_bytes(min(machine.free_bytes))
    if machine.device == "cpu":
        return f"the processor, {machine.cores} cores, {free} of memory free"
    total = "" if machine.device_bytes is None else f" of {format_bytes(machine.device_bytes)}"
    names = names_of_first_device(bench)
    for name in names:
        count = seen_devices(name)
        require(count == 1, f"with CUDA_VISIBLE_DEVICES={name} the harness sees {count} devices, and not 1")
    return f"{machine.devices} x {machine.device_name}, {free}{total} free, the first seen under {len(names)} names"


def names_of_first_device(bench: Bench) -> list[str]:
    """Return the names that CUDA_VISIBLE_DEVICES may have for the first device: its number, and UUIDs where CUDA's are.

    ROCm has other UUIDs, and an instance of a device that MIG partitions has only its own.
    """
    first = visible_device_ids(1)[0].strip()
    if bench.environment.get("cuda") is None or first.startswith("MIG-"):
        return [first]
    uuid = f"GPU-{_probe(_UUID, {})}"
    return [first, uuid, uuid[: len("GPU-") + _SHORT_UUID]]


def seen_devices(visible: str) -> int:
    """Return how many CUDA devices the harness sees under this CUDA_VISIBLE_DEVICES. Raises StepFailedError."""
    return int(_probe(_SEEN_DEVICES, {"CUDA_VISIBLE_DEVICES": visible}))


def _probe(code: str, variables: dict[str, str]) -> str:
    """Return the last line that a Python process prints. Raises StepFailedError if it fails."""
    done = run_python("-c", code, seconds=_PROBE_SECONDS, variables=variables)
    setting = " ".join(f"{name}={value}" for name, value in variables.items()) or "the devices as they are"
    require(not done.returncode, f"with {setting}: {one_line(done.stderr[-500:])}")
    return done.stdout.strip().rpartition("\n")[2]
