"""The implementations that a run's ranks used."""

from collections.abc import Sequence

from harness.config.schema import RunConfig
from harness.records.rank_report import COMPOSED, RankReport
from harness.records.schema import Cells


def kernel_columns(config: RunConfig, ranks: Sequence[RankReport]) -> Cells:
    """Return the attention kernel that ran; several are joined by +, and no kernel is None."""
    return {"attention_kernel": "+".join(attention_kernels(config, ranks)) or None}


def attention_kernels(config: RunConfig, ranks: Sequence[RankReport]) -> list[str]:
    """Return the attention kernels that any of the ranks ran, sorted.

    Attention composed of plain operators is the model's own where model.attention=eager, else torch's math kernel.
    The compiler makes plain operators part of generated kernels, which cannot be observed. A fused kernel still can, so
    that attention without any was composed.
    """
    is_eager = config.model.attention == "eager"
    unobserved = (COMPOSED,) if config.train.compile else ()
    names = {name for rank in ranks for name in rank.profiled.attention_kernels or unobserved}
    return sorted(("eager" if is_eager else "math") if name == COMPOSED else name for name in names)
