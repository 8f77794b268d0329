"""TODO harness.engines.deepspeed.shm_collective."""

import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from filelock import FileLock

from harness.util.native_build import make_extension_folder, file_digest, require_compiler, run_build

_DEEPSPEED_OP = "deepspeed_shm_comm"

# With the operator built, a rank holds torch's lock for the second in which ninja finds nothing to do.
_LOCK_STALE_SECONDS = 30.0


def build_deepspeed_comm(cache: Path) -> dict[str, str]:
    """What a rank's environment must hold for DeepSpeed on a CPU, its shared-memory collective built (about 30 s).

    DeepSpeed builds that operator in every rank when its communication starts and has no way round it: without a
    compiler the rank dies of ninja's error. torch guards such a build with a bare file `lock`, on which ranks wait
    for ever if its owner was killed; here the build happens once, under our own lock, and stale ones are removed.
    The build runs in a process of its own, which holds our lock itself and so may outlive the caller.

    Raises UserError without a compiler, and RuntimeError with the build's last words if it fails.
    """
    # ninja rebuilds when a command changes: another environment's paths or compiler need a folder of their own.
    commands = f"{sys.prefix} {os.environ.get('CXX', '')}"
    folder = make_extension_folder(cache, "torch_extensions", commands, "torch", "deepspeed")
    environment = {
        "TORCH_EXTENSIONS_DIR": str(folder),
        "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))),  # ninja
        "DS_ACCELERATOR": "cpu",
    }
    require_compiler()
    if not _is_complete(folder):
        root = str(Path(__file__).parents[3])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", __name__, str(folder)]
        run_build(command, f"DeepSpeed's {_DEEPSPEED_OP}", os.environ | environment | {"PYTHONPATH": paths})
    _clear_stale_lock(folder / _DEEPSPEED_OP / "lock")
    return environment


def _is_complete(folder: Path) -> bool:
    """Whether the library that was built is there, and whole."""
    try:
        return (folder / "complete").read_text() == file_digest(folder / _DEEPSPEED_OP / f"{_DEEPSPEED_OP}.so")
    except (OSError, ValueError):
        return False


def _build_deepspeed_comm_here(folder: Path) -> None:
    """Build in this process. Until the build is complete no rank starts, so whoever holds our lock builds alone."""
    with FileLock(folder / "build.lock"):
        if _is_complete(folder):
            return
        shutil.rmtree(folder / _DEEPSPEED_OP, ignore_errors=True)  # ninja would take what is damaged for new
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
        (folder / "complete").write_text(file_digest(folder / _DEEPSPEED_OP / f"{_DEEPSPEED_OP}.so"))


def _clear_stale_lock(lock: Path) -> None:
    """Remove the lock a killed rank left; wait while it may belong to a live rank of another run."""
    while True:
        try:
            age_seconds = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if not 0 <= age_seconds <= _LOCK_STALE_SECONDS:  # below 0: the clock was put back since
            lock.unlink(missing_ok=True)
            return
        time.sleep(0.2)


if __name__ == "__main__":
    _build_deepspeed_comm_here(Path(sys.argv[1]))
