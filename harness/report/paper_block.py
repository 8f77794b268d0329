"""The activations of one layer in Korthikanti et al., arXiv 2205.05198, sections 4 and 5: the paper's own formulas.

They are of its block in 16 bit, in units of s b h: tokens, micro-batch and width. Attention that is not fused also
keeps its scores, 5as/h of a heads.
"""

from dataclasses import dataclass

from harness.report.claim_peers import ClaimRun


@dataclass(frozen=True)
class PaperBlock:
    """What a rank keeps of a layer."""

    degree: int  # t, of tensor parallelism
    sequence_parallel: bool
    full_checkpointing: bool  # keeps the layer's input alone
    scores: float  # 5as/h; 0 for a fused kernel

    @property
    def size(self) -> float:
        """The activations of a layer on a rank in units of s b h."""
        divided = self.degree if self.sequence_parallel else 1
        if self.full_checkpointing:
            return 2 / divided
        return (10 / divided) + (24 + self.scores) / self.degree

    @property
    def formula(self) -> str:
        """The paper's formula of this size."""
        by_degree = "/t" if self.degree > 1 else ""
        if self.full_checkpointing:
            return f"2sbh{by_degree if self.sequence_parallel else ''}"
        if self.degree > 1 and not self.sequence_parallel:
            return f"(10 + 24/t{' + 5as/(ht)' if self.scores else ''})sbh"
        return f"{'(34 + 5as/h)sbh' if self.scores else '34sbh'}{by_degree}"


def paper_block(run: ClaimRun | None) -> PaperBlock | None:
    """Return what the paper says that a rank of this run keeps of a layer; None where the paper does not say it."""
    config = run.config() if run else None
    if run is None or config is None or run.row.get("checkpointing") not in ("none", "full"):
        return None
    model = config.model
    scores = 5 * model.num_attention_heads * config.train.seq_len / model.hidden_size
    return PaperBlock(
        run.degree("tp") or 1,
        bool(run.row.get("sequence_parallel")),
        run.row["checkpointing"] == "full",
        scores if run.row.get("attention") == "eager" else 0.0,
    )


def paper_ratio(larger: ClaimRun | None, smaller: ClaimRun | None) -> str:
    """Return how often larger the activations of one run's layer are than another's by the paper's formulas."""
    above, below = paper_block(larger), paper_block(smaller)
    if above is None or below is None:
        return "not given for these runs"
    return f"{above.size / below.size:.3g}× for the paper's block ({above.formula} over {below.formula})"
