"""Claims of papers on tensor and pipeline parallelism at a run's layout, beside what was measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.config.schema import RunConfig
from harness.cost_model.stage_memory import local_parameter_count
from harness.layout.layout import Layout
from harness.layout.model_profile import parameter_count
from harness.layout.partition import stages_of_rank, whole_model
from harness.report.claim_peers import COUNTED, TIMED, Claim, ClaimRun, compare_claim, ddp_of, peer, ratio
from harness.report.speeds import is_undisturbed


def tensor_parallel(run: ClaimRun, runs: Sequence[ClaimRun]) -> Iterator[Claim]:
    """Yield the claims on parameters and activations of a run whose ranks are all tensor parallel."""
    t, config, layout = run.degree("tp"), run.config(), run.layout()
    if t < 2 or t != run.degree("world_size"):
        return
    if config is not None and layout is not None:
        count = local_parameter_count(config.model, whole_model(config.model), t, layout.vocabulary_tp)
        uncut = "norms" if layout.vocabulary_parallel else "norms and vocabulary"
        yield from compare_claim(
            run,
            f"parameters: the whole model over a rank's part, {uncut} not cut",
            "Megatron-LM, arXiv 1909.08053, section 3",
            parameter_count(config.model) / count,
            f"t× = {t}×",
            ratio(_undivided(run, runs), run, "parameter_bytes"),
            required=True,
        )
    undivided, shared = _undivided(run, runs), bool(run.row.get("sequence_parallel"))
    yield from compare_claim(
        run,
        f"activations: of the whole model over those of a rank{' with sequence parallel' * shared}",
        f"{COUNTED} Korthikanti et al., arXiv 2205.05198, sections 4.1 and 4.2",
        ratio(undivided, run, "predicted_activation_bytes"),
        paper_ratio(undivided, run),
        ratio(undivided, run, "activation_bytes"),
    )
    if run.row.get("sequence_parallel"):
        without = peer(run, runs, ("world_size", "tp", "checkpointing"), sequence_parallel=False)
        yield from compare_claim(
            run,
            "activations: tensor parallel alone over the same with sequence parallel",
            f"{COUNTED} Korthikanti et al., arXiv 2205.05198, section 4.2",
            ratio(without, run, "predicted_activation_bytes"),
            paper_ratio(without, run),
            ratio(without, run, "activation_bytes"),
        )


def _undivided(run: ClaimRun, runs: Sequence[ClaimRun]) -> ClaimRun | None:
    """Return a run whose every rank holds the whole model."""
    return ddp_of(run, runs) or peer(run, runs, ("checkpointing",), strategy="single")


def pipeline(run: ClaimRun, runs: Sequence[ClaimRun]) -> Iterator[Claim]:
    """Yield the claims on parameters, micro-batches in flight and the bubble of a run whose ranks are one pipeline."""
    p, config, layout = run.degree("pp"), run.config(), run.layout()
    reported = len(run.record.rank_entries)
    if p < 2 or p != run.degree("world_size") or 0 < reported < p:  # some stages were not simulated
        return
    if config is not None and layout is not None:
        yield from compare_claim(
            run,
            "parameters: the whole model over the fullest rank's stages",
            "GPipe, arXiv 1811.06965, section 2",
            parameter_count(config.model) / _largest_stages(config, layout),
            f"p× = {p}×",
            ratio(_undivided(run, runs), run, "parameter_bytes"),
            required=True,
        )
    yield from _in_flight(run)
    schedule = run.row.get("schedule")
    formulas = {"zero_bubble": "(p − 1)/(3vm)", "interleaved_1f1b": "(p − 1)/(vm)"}
    if not is_undisturbed(run.row):
        return
    formula, measured = run.number("pipeline_bubble_theory") or 0.0, run.number("pipeline_bubble") or 0.0
    cores, threads = (run.record.environment.get(key) or 0 for key in ("cores", "threads"))
    shared = run.row.get("measured_on") == "cpu" and cores < run.degree("world_size") * threads
    reasons = {
        "ranks share the processor's cores and wait for them too": shared,
        "sending takes time, and stages are not equal": True,
    }
    slower = next(text for text, holds in reasons.items() if holds)
    yield from compare_claim(
        run,
        "bubble: idle over working time",
        "arXiv 2401.10241, table 2" if schedule == "zero_bubble" else "arXiv 2104.04473, section 2.2",
        run.number("pipeline_bubble_theory"),
        formulas.get(str(schedule), "(p − 1)/m"),
        run.number("pipeline_bubble"),
        slower if measured > formula else "",
        within=TIMED,
    )


def _largest_stages(config: RunConfig, layout: Layout) -> int:
    """Return the number of parameters on the rank of a pipeline that holds most."""
    ranks = (stages_of_rank(config.model, layout, rank) for rank in range(layout.world_size))
    return max(sum(local_parameter_count(config.model, stage, 1) for stage in stages) for stages in ranks)


def _in_flight(run: ClaimRun) -> Iterator[Claim]:
    """Yield the claim on micro-batches in flight.

    Papers give it for GPipe, 1F1B and its interleaved form, and for zero bubble with one stage per rank.
    """
    p, v, m = run.degree("pp"), run.degree("virtual_stages"), run.degree("grad_accumulation")
    formulas = {
        "gpipe": (m, "m", "GPipe, arXiv 1811.06965, section 2"),
        "1f1b": (min(p, m), "min(p, m)", "arXiv 2104.04473, section 2.2"),
        "interleaved_1f1b": (min(v * p + p - 1, v * m), "vp + p − 1", "arXiv 2205.05198, section 4.2"),
    }
    if p and m % p:
        del formulas["interleaved_1f1b"]
    if v == 1:
        formulas["zero_bubble"] = (min(p, m), "min(p, m)", "arXiv 2401.10241, table 2")
    passes, formula, source = formulas.get(str(run.row.get("schedule")), (0, "", ""))
    yield from compare_claim(
        run,
        f"most passes in flight, m = {m}",
        source,
        passes or None,
        formula,
        run.number("max_in_flight_micro_batches"),
        within=0,
        required=True,
    )


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
