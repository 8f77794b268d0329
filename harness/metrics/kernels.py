"""Which implementations a run's ranks used, as they heard them."""

from collections.abc import Sequence

from harness.config.schema import RunConfig
from harness.records.schema import Rank, Row

COMPOSED = "composed"


def kernel_columns(config: RunConfig, ranks: Sequence[Rank]) -> Row:
    found = attention_kernels(config, ranks)
    return {"attention_kernel": "+".join(found) or None}


def attention_kernels(config: RunConfig, ranks: Sequence[Rank]) -> list[str]:
    """Of all ranks; what is composed of plain operators is the model's own where it says eager, else torch's math.

    Compiled, the model's own is inside generated kernels, and no operator of attention is heard; a fused one still is.
    """
    is_eager = config.model.attention == "eager"
    unheard = (COMPOSED,) if is_eager and config.train.compile else ()
    heard = {name for rank in ranks for name in rank["profiled"].get("attention_kernels", ()) or unheard}
    return sorted(("eager" if is_eager else "math") if name == COMPOSED else name for name in heard)
