"""What the launcher's tests run in ranks: module-level functions, importable there."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def nothing(_: str) -> None:
    pass


def all_reduce(run_dir: str) -> None:
    """Writes what this rank sees and the sum over ranks of rank + 1."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "DS_ACCELERATOR")
    seen = {name: os.environ.get(name) for name in names} | {"path": os.environ["PATH"], "sum": total.item()}
    (Path(run_dir) / f"seen_{dist.get_rank()}.json").write_text(json.dumps(seen))
    print("printed")
    print("complained", file=sys.stderr)
    os.system("echo from a child process")
    dist.destroy_process_group()


def one_raises(_: str) -> None:
    """Rank 1 raises; the others wait for it in a collective."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        print("a word before the end")
        raise ValueError("the boom of rank 1")
    dist.all_reduce(torch.ones(1))


def one_is_killed(_: str) -> None:
    """Rank 1 is killed as by the kernel; the others' collective then breaks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        print("a word before the end")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def one_leaves(_: str) -> None:
    """Rank 1 is gone without a word and without an error."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        os._exit(0)
    time.sleep(3600)


def hangs_in_collective(run_dir: str) -> None:
    """Rank 1 never comes, and both close their ears to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pid = Path(run_dir) / f"pid_{os.environ['RANK']}"
    written = pid.with_suffix(".tmp")
    written.write_text(str(os.getpid()))
    written.replace(pid)  # who waits for the file may read it at once
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    if dist.get_rank() == 1:
        time.sleep(3600)
    dist.all_reduce(torch.ones(1))


def _forked() -> int:
    """The exit status of a process that this rank forks, as a data loader does."""
    child = os.fork()
    if child == 0:
        os._exit(7)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def describe(run_dir: str) -> None:
    """Writes what this rank found already there."""
    modules = ("deepspeed", "torch.distributed.fsdp", "torch.distributed.pipelining")
    status = Path(f"/proc/{os.getppid()}/status")
    seen = {
        "imported": [name for name in modules if name in sys.modules],
        "cuda_initialized": torch.cuda.is_initialized(),
        "process_group": dist.is_initialized(),
        "forked": _forked(),
        "forkserver_threads": int(status.read_text().split("Threads:")[1].split()[0]) if status.exists() else None,
    }
    (Path(run_dir) / f"seen_{os.environ['RANK']}.json").write_text(json.dumps(seen))
