"""The further imports of the forkserver before it forks CPU ranks: DeepSpeed, and every engine.

On a GPU machine DeepSpeed may call the driver as it is imported, so that ranks there import it themselves.
"""

from harness import engines
from harness.launcher.forkserver import temporary_environment
from harness.launcher.preload import load, modules_of

# DeepSpeed's stages import an optimizer that none of our runs uses. torch.compile compiles its functions as they are
# defined, for which torch imports its whole compiler: 0.7 s in every rank.
UNCOMPILED = "deepspeed.runtime.zero.muon.muon_optimizer"

COMPILER_SWITCH = "TORCHDYNAMO_DISABLE"  # torch's variable: with '1' it leaves functions as they are defined

load(("deepspeed",))

with temporary_environment({COMPILER_SWITCH: "1"}):
    load((UNCOMPILED,))

load(modules_of(engines))
