from harness.api import Layout as Layout
from harness.api import MemoryEstimate as MemoryEstimate
from harness.api import RunConfig as RunConfig
from harness.api import UserError as UserError
from harness.api import estimate_memory as estimate_memory
from harness.api import load as load

__version__: str
