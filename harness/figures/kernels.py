"""Which implementations a run's ranks used, as they heard them."""

from collections.abc import Sequence

from harness.config import RunConfig
from harness.figures import Row
from harness.proof import Rank

FUSED = ("flash", "cudnn", "efficient")  # attention kernels that keep no scores
COMPOSED = "composed"


def kernels(config: RunConfig, ranks: Sequence[Rank]) -> Row:
    found = attention_kernels(config, ranks)
    return {"attention_kernel": "+".join(found) or None}


def attention_kernels(config: RunConfig, ranks: Sequence[Rank]) -> list[str]:
    """Of all ranks; what is composed of plain operators is the model's own where it says eager, else torch's math."""
    composed = "eager" if config.model.attention == "eager" else "math"
    heard = {name for rank in ranks for name in rank["profiled"].get("attention_kernels", ())}
    return sorted(composed if name == COMPOSED else name for name in heard)
