"""The name of this machine's processor, read without torch."""

import functools
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def processor_name() -> str | None:
    """Return the processor model's name, None if it is unknown. On some architectures /proc/cpuinfo has none."""
    if platform.system() == "Darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.check_output(command, text=True, timeout=5).strip() or None
        return None
    if CPUINFO.exists():
        with CPUINFO.open(errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or None
