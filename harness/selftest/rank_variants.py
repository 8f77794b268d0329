"""Entry points of ranks that differ from every other run's: in what they write, connect, or leave no memory for."""

import importlib
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from harness.launcher.rank_entry import worker_entry
from harness.records.run_folder import RunFolder

# More than the addresses of a process: no machine grants the request, and none is slowed down by trying.
IMPOSSIBLE_BYTES = 2**47

LEFT_BYTES = 64 * 2**20  # on a device that is filled on purpose: too little for NCCL's buffers


def trace_path(folder: RunFolder, rank: int) -> Path:
    """Return the file that a traced rank writes."""
    return folder.path / "traces" / f"rank_{rank:05d}.json"


def traced_rank(run_dir: str) -> None:
    """Run a rank whose traced steps are recorded by torch's profiler, and written in its file format."""
    step_trace: Any = importlib.import_module("harness.measure.step_trace")
    worker: Any = importlib.import_module("harness.worker.main")
    tracer, path = step_trace.ProfilerTracer, trace_path(RunFolder(Path(run_dir)), int(os.environ["RANK"]))
    end = tracer.end

    def end_and_export(self: Any) -> None:
        end(self)
        path.parent.mkdir(exist_ok=True)
        self.profiler.export_chrome_trace(str(path))

    no_log = mock.patch.object(worker, "load_operator_log", lambda path: None)  # the profiler traces a CPU as well
    with mock.patch.object(tracer, "end", end_and_export), no_log:
        worker_entry(run_dir)


def bound_rank(run_dir: str) -> None:
    """Run a rank whose process group is bound to its device, as torch's examples do with `device_id`."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    join_bound = partial(distributed.init_process_group, device_id=device)
    with mock.patch.object(distributed, "init_process_group", join_bound):
        worker_entry(run_dir)


def rank_without_host_memory(run_dir: str) -> None:
    """Run a rank that requests more memory of the host than there can be: pinned memory where there is a GPU."""
    torch: Any = importlib.import_module("torch")
    worker: Any = importlib.import_module("harness.worker.main")

    def request(*_: Any) -> None:
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    with mock.patch.object(worker, "build_and_train", request):
        worker_entry(run_dir)


def rank_without_memory_for_nccl(run_dir: str) -> None:
    """Run a rank on a device that has LEFT_BYTES free when the ranks join."""
    torch: Any = importlib.import_module("torch")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    free, _ = torch.cuda.mem_get_info(device)
    filling = torch.empty(max(0, free - LEFT_BYTES), dtype=torch.uint8, device=device)
    worker_entry(run_dir)
    del filling


_POLL_SECONDS = 0.002
_FIRST_STEP = 2  # the fault happens once the rank has reached this step


def killed_rank(run_dir: str) -> None:
    """Run a rank; the last rank of the world is killed by SIGKILL while it trains."""
    _raise_in_training(run_dir, signal.SIGKILL)


def hanging_rank(run_dir: str) -> None:
    """Run a rank; the main thread of the last rank of the world sleeps from some moment of its training on."""
    signal.signal(signal.SIGALRM, lambda *_: time.sleep(24 * 3600))  # Python runs it in the main thread
    _raise_in_training(run_dir, signal.SIGALRM)


def _raise_in_training(run_dir: str, number: signal.Signals) -> None:
    """Run a rank that gets a signal, from another thread, once the last rank of the world has reached _FIRST_STEP."""
    rank = int(os.environ["RANK"])

    def wait_and_raise() -> None:
        while (beat := RunFolder(Path(run_dir)).read_heartbeat(rank)) is None or beat.step < _FIRST_STEP:
            time.sleep(_POLL_SECONDS)
        signal.raise_signal(number)

    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        threading.Thread(target=wait_and_raise, daemon=True).start()
    worker_entry(run_dir)
