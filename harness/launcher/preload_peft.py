"""The imports of the forkserver before it forks CPU ranks that train adapters, which peft makes."""

from harness.launcher.preload import load_library

load_library(("peft",))
