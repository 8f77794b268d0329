"""The imports of the forkserver before it forks CPU ranks that train adapters: peft, and what it may load."""

from harness.launcher.preload import load_library

load_library(("peft", "bitsandbytes"))
