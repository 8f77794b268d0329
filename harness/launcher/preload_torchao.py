"""The imports of the forkserver before it forks CPU ranks that use torchao: its float8, and its optimizers."""

from harness.launcher.preload import RARE, load_library

load_library((RARE, "torchao.float8", "torch._inductor.codegen.triton"))
