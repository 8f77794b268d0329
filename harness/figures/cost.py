"""What the timed steps cost beside device time: processor seconds, host memory, energy."""

from collections.abc import Sequence

from harness.config import RunConfig
from harness.figures import Row
from harness.figures.memory import most
from harness.proof import Rank


def cost(config: RunConfig, ranks: Sequence[Rank]) -> Row:
    """Over all ranks: processor seconds a step, joules a token; of the largest process the resident bytes."""
    used = [rank["used"] for rank in ranks]
    energies = [each["energy_joules"] for each in used]
    tokens = config.train.steps * config.train.global_batch * config.train.seq_len
    return {
        "cpu_seconds": sum(each["cpu_seconds"] for each in used) / config.train.steps,
        "peak_host_bytes": most(each["peak_host_bytes"] for each in used),
        "joules_per_token": None if None in energies else sum(energies) / tokens,
    }
