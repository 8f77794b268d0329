"""The further imports of the forkserver before it forks CPU ranks: DeepSpeed, and every engine.

On a GPU machine DeepSpeed may call the driver as it is imported, so that ranks there import it themselves.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from harness import engines
from harness.launcher.forkserver import temporary_environment
from harness.launcher.preload import load, modules_of

# DeepSpeed's autotuner and Accelerate's trackers import mlflow wherever it is installed, which starts a thread of
# pyarrow's allocator; a fork would lose it. No rank uses either, so that an empty module stands for it meanwhile.
MLFLOW = "mlflow"
stand_in = ModuleType(MLFLOW)
stand_in.__spec__ = ModuleSpec(MLFLOW, None)
sys.modules.setdefault(MLFLOW, stand_in)

load(("deepspeed",))

# DeepSpeed's stages import an optimizer that none of our runs uses. torch.compile compiles its functions as they are
# defined, for which torch imports its whole compiler: 0.7 s in every rank. The variable leaves them as they are.
with temporary_environment({"TORCHDYNAMO_DISABLE": "1"}):
    load(("deepspeed.runtime.zero.muon.muon_optimizer",))

load(modules_of(engines))

if sys.modules[MLFLOW] is stand_in:
    del sys.modules[MLFLOW]
