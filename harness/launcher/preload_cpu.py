"""The further imports of the forkserver before it forks CPU ranks: DeepSpeed, and every engine.

On a GPU machine DeepSpeed may call the driver as it is imported, so that ranks there import it themselves.
"""

from harness import engines
from harness.launcher.forkserver import temporary_environment
from harness.launcher.preload import load, modules_of

load(("deepspeed",))

# DeepSpeed's stages import an optimizer that none of our runs uses. torch.compile compiles its functions as they are
# defined, for which torch imports its whole compiler: 0.7 s in every rank. The variable leaves them as they are.
with temporary_environment({"TORCHDYNAMO_DISABLE": "1"}):
    load(("deepspeed.runtime.zero.muon.muon_optimizer",))

load(modules_of(engines))
