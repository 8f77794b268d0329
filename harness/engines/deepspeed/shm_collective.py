"""The build of DeepSpeed's shared-memory collective, which it needs on a CPU."""

import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from filelock import FileLock

from harness.util.native_build import file_digest, make_extension_folder, require_compiler, run_build

_DEEPSPEED_OP = "deepspeed_shm_comm"

# Once the operator is built, a rank holds torch's lock for about a second only, in which ninja finds nothing to build.
_LOCK_STALE_SECONDS = 30.0


def build_deepspeed_comm(cache: Path) -> dict[str, str]:
    """Build DeepSpeed's shared-memory collective (about 30 s), and return the variables with which ranks find it.

    DeepSpeed builds that operator in every rank when its communication starts, and no option prevents this: without a
    compiler ninja's error ends the rank. torch guards such a build with a plain file `lock`, on which ranks wait
    forever if its owner was killed. Here the build runs once, under the harness's own lock, and a stale `lock` is
    removed. It runs in a separate process, which holds the harness's lock itself, so that it may outlive the caller.

    Raise UserError without a compiler, and RuntimeError with the end of the build's output if it fails.
    """
    # ninja rebuilds when a command changes, so another environment's paths or compiler need a folder of their own.
    commands = f"{sys.prefix} {os.environ.get('CXX', '')}"
    folder = make_extension_folder(cache, "torch_extensions", commands, "torch", "deepspeed")
    environment = {
        "TORCH_EXTENSIONS_DIR": str(folder),
        "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))),  # has ninja
        "DS_ACCELERATOR": "cpu",
    }
    require_compiler()
    if not _is_complete(folder):
        root = str(Path(__file__).parents[3])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", __name__, str(folder)]
        variables = os.environ | environment | {"PYTHONPATH": paths}
        run_build(command, f"DeepSpeed's shared-memory collective {_DEEPSPEED_OP}", variables)
    _clear_stale_lock(folder / _DEEPSPEED_OP / "lock")
    return environment


def _is_complete(folder: Path) -> bool:
    """Return whether the library exists and has not changed since it was built."""
    try:
        return (folder / "complete").read_text() == file_digest(folder / _DEEPSPEED_OP / f"{_DEEPSPEED_OP}.so")
    except (OSError, ValueError):
        return False


def _build_deepspeed_comm_in_process(folder: Path) -> None:
    """Build the operator in this process. No rank starts before that, so the lock excludes every other builder."""
    with FileLock(folder / "build.lock"):
        if _is_complete(folder):
            return
        shutil.rmtree(folder / _DEEPSPEED_OP, ignore_errors=True)  # ninja would treat a damaged file as current
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
        (folder / "complete").write_text(file_digest(folder / _DEEPSPEED_OP / f"{_DEEPSPEED_OP}.so"))


def _clear_stale_lock(lock: Path) -> None:
    """Remove the lock that a killed rank left; wait while it may belong to a live rank of another run."""
    while True:
        try:
            age_seconds = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if not 0 <= age_seconds <= _LOCK_STALE_SECONDS:  # it is negative if the clock was set back
            lock.unlink(missing_ok=True)
            return
        time.sleep(0.2)


if __name__ == "__main__":
    _build_deepspeed_comm_in_process(Path(sys.argv[1]))
