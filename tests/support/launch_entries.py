"""Entry points of ranks for the launcher's tests, at the level of a module so that ranks can import them."""

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
    """Write the environment of this rank and the sum over ranks of rank + 1."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "DS_ACCELERATOR")
    result = {name: os.environ.get(name) for name in names} | {"path": os.environ["PATH"], "sum": total.item()}
    (Path(run_dir) / f"seen_{dist.get_rank()}.json").write_text(json.dumps(result))
    print("printed")
    print("complained", file=sys.stderr)
    os.system("echo from a child process")
    dist.destroy_process_group()


def one_raises(_: str) -> None:
    """Raise on rank 1 while the other ranks wait for it in a collective."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        print("a word before the end")
        raise ValueError("the boom of rank 1")
    dist.all_reduce(torch.ones(1))


def one_is_killed(_: str) -> None:
    """Kill rank 1 as the kernel does, which breaks the collective of the other ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        print("a word before the end")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def one_leaves(_: str) -> None:
    """Exit rank 1 without a message and without an error."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        os._exit(0)
    time.sleep(3600)


def hangs_in_collective(run_dir: str) -> None:
    """Keep rank 1 from a collective that rank 0 waits in, with SIGTERM ignored on both."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pid = Path(run_dir) / f"pid_{os.environ['RANK']}"
    written = pid.with_suffix(".tmp")
    written.write_text(str(os.getpid()))
    written.replace(pid)  # atomic, because a waiting test reads the file as soon as it exists
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    if dist.get_rank() == 1:
        time.sleep(3600)
    dist.all_reduce(torch.ones(1))


def describe(run_dir: str) -> None:
    """Write what this rank inherited: imported modules, CUDA, the process group, and the forkserver's threads.

    It forks a process, as a data loader does, and writes that one's exit status too.
    """
    child = os.fork()
    if child == 0:
        os._exit(7)
    modules = ("deepspeed", "torch.distributed.fsdp", "torch.distributed.pipelining")
    status = Path(f"/proc/{os.getppid()}/status")
    result = {
        "imported": [name for name in modules if name in sys.modules],
        "libraries": [name for name in ("peft", "torchao", "transformers.modeling_utils") if name in sys.modules],
        "cuda_initialized": torch.cuda.is_initialized(),
        "process_group": dist.is_initialized(),
        "forked": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
        "forkserver_threads": int(status.read_text().split("Threads:")[1].split()[0]) if status.exists() else None,
    }
    (Path(run_dir) / f"seen_{os.environ['RANK']}.json").write_text(json.dumps(result))


def leaks(_: str) -> None:
    """Print secrets of the environment as a library does, and raise with one."""
    print("connecting with", os.environ["A_SERVICE_PASS"], flush=True)
    os.system("echo $A_SERVICE_PASS from a child process")
    raise RuntimeError(f"401 for {os.environ['A_SERVICE_PASS']} at https://{os.environ['A_SERVICE_PASS']}@host")
