"""The report's section on the literature: the figures of papers at this layout, compared with the measurement."""

from collections.abc import Iterator, Sequence

from harness.config.checkpointing import RECOMPUTING_MODES
from harness.config.schema import Device
from harness.cost_model.flops import executed_flops_with, takes_fused_kernel
from harness.records.rank_report import FUSED_KERNELS
from harness.records.schema import Record
from harness.report.charts.literature import measured_against_papers
from harness.report.claim_peers import (
    COUNTED,
    EXACT,
    TIMED,
    Claim,
    ClaimRun,
    compare_claim,
    ddp_of,
    ok_runs,
    peer,
    ratio,
)
from harness.report.claims_model_parallel import paper_ratio, pipeline, tensor_parallel
from harness.report.comparability import PARTITION_COLUMNS, group_by
from harness.report.document import Paragraph, Section, Table, section
from harness.report.frame import STATE_COLUMNS, column_values
from harness.report.view import View

# The beginnings of the claims on model state and on bytes sent, each of which is about a figure of its own.
STATE_CLAIM, VOLUME_CLAIM = "model state: DDP's over", "bytes sent a step over DDP's"

_STATE = ("parameters", "gradients", "optimizer")

# Bytes per parameter of each kind of state: for mixed precision as the ZeRO paper counts them.
_ACCOUNTING = {"fp32": (4, 4, 8), "bf16_mixed": (2, 2, 12), "fp16_mixed": (2, 2, 12), "bf16": (2, 2, 4)}

_FIRST_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the ZeRO stage from which on it is divided

_PAPER_LIMIT = {1: 4, 2: 8}  # by ZeRO stage, the factor of saving at 2 + 2 + 12 bytes


def claims(records: Sequence[Record], labels: Sequence[str] | None = None) -> list[Claim]:
    """Return the claims on every record that is ok that apply to it and have a peer among the records."""
    kinds = (_state, _volume, _saved_activations, _recomputation, tensor_parallel, pipeline)
    runs = ok_runs(records, labels)
    by_setting = group_by(runs, lambda run: run.setting)
    return [claim for run in runs for kind in kinds for claim in kind(run, by_setting[run.setting])]


def _only_data_parallel(run: ClaimRun) -> bool:
    parallel = run.degree("world_size") > 1 and run.degree("tp") == run.degree("pp") == run.degree("cp") == 1
    return parallel and run.row.get("strategy") != "ddp"


def _state(run: ClaimRun, runs: Sequence[ClaimRun]) -> Iterator[Claim]:
    stage, shards, ddp = run.row.get("zero_stage"), run.degree("dp_shard"), ddp_of(run, runs)
    accounting = dict(zip(_STATE, _ACCOUNTING.get(str(run.row.get("precision")), ()), strict=False))
    if not stage or not shards or not accounting or ddp is None or not _only_data_parallel(run):
        return
    whole_bytes = sum(accounting.values())
    replicated = sum(size for kind, size in accounting.items() if stage < _FIRST_STAGE[kind])
    limit = f"{whole_bytes / replicated:.3g}× as N grows" if replicated else f"N× = {shards}×"
    if replicated and whole_bytes / replicated != _PAPER_LIMIT[stage]:
        limit += f", {_PAPER_LIMIT[stage]}× at the paper's 2 + 2 + 12 bytes"
    measured, own = (_state_bytes(ddp), _state_bytes(run)), _widths(run, accounting, stage, shards)
    yield from compare_claim(
        run,
        f"{STATE_CLAIM} that of ZeRO stage {stage}",
        "ZeRO, arXiv 1910.02054, section 5",
        whole_bytes / (replicated + (whole_bytes - replicated) / shards),
        limit,
        measured[0] / measured[1] if measured[0] and measured[1] else None,
        "; ".join([*own, *(f"DDP's {text}" for text in _widths(ddp, accounting, 0, 1))]),
    )


def _state_bytes(run: ClaimRun) -> float | None:
    parts = [run.number(name) for name in STATE_COLUMNS]
    return None if None in parts else sum(part or 0 for part in parts)


def _widths(run: ClaimRun, accounting: dict[str, int], stage: int, shards: int) -> Iterator[str]:
    """Yield a phrase for each kind of state whose bytes differ from the accounting, with the cause if it is known."""
    fsdp, deepspeed = (run.record.layout or {}).get("data_parallel") == "fsdp", run.zero_by_deepspeed
    mixed, offloaded = run.row.get("precision") != "fp32", run.row.get("offload") not in (None, "none")
    for kind, column in zip(_STATE, STATE_COLUMNS, strict=True):
        measured, parameters = run.number(column), run.number("parameters")
        parts = shards if stage >= _FIRST_STAGE[kind] else 1
        size = measured * parts / parameters if measured and parameters else accounting[kind]
        if abs(size - accounting[kind]) <= EXACT * accounting[kind]:
            continue
        # For each kind of state, and whether its condition is true, the causes by the bytes per parameter they lead to.
        causes: dict[tuple[str, bool], dict[float, str]] = {
            ("optimizer", deepspeed and not mixed): {12: "DeepSpeed clones an fp32 master of fp32 parameters"},
            ("optimizer", fsdp and mixed): {8: "fully_shard's fp32 parameters are their own masters"},
            ("parameters", fsdp and mixed and stage == 3): {4: "fully_shard's are fp32, their own masters"},
            ("parameters", fsdp and stage < 3): {4 / shards: "fully_shard divides them at rest in every mode"},
            ("gradients", mixed): {4: "they are summed in fp32", 6: "the sum is fp32, beside 16-bit ones of one pass"},
            ("gradients", deepspeed and not mixed): {8: "the sum so far, and what the next micro-batch adds to it"},
            ("gradients", offloaded): {8: "offloaded, what micro-batches sum up in lies beside what AdamW reads"},
        }
        possible = [sizes for (state, holds), sizes in causes.items() if state == kind and holds]
        matching = (
            text for sizes in possible for expected, text in sizes.items() if abs(size - expected) <= EXACT * expected
        )
        cause = (
            "whole parameters are dealt out"
            if kind == "optimizer" and partitions_by_parameter(run)
            else next(matching, "")
        )
        text = f"{kind} at {size:.3g} bytes a parameter, not {accounting[kind]}"
        yield f"{text} ({cause})" if cause else text


def partitions_by_parameter(run: ClaimRun) -> bool:
    """Return whether the optimizer divides its state by whole parameters, as ZeroRedundancyOptimizer does."""
    return (run.record.layout or {}).get("data_parallel") == "ddp" and run.row.get("zero_stage") == 1


def _volume(run: ClaimRun, runs: Sequence[ClaimRun]) -> Iterator[Claim]:
    stage, k = run.row.get("zero_stage"), run.number("grad_accumulation")
    hybrid = run.degree("dp_shard") > 1 and run.degree("dp_replicate") > 1
    config = run.config()
    if not _only_data_parallel(run) or hybrid or stage is None or not k or config is None:
        return
    # Parameters are gathered in the compute dtype, gradients are reduced in their own; an all-reduce is a gather and a
    # reduce-scatter in the latter.
    g = config.precision.compute_bytes / config.precision.reduce_bytes
    papers = {
        0: (1.0, "1×"),
        1: ((1 + g) / 2, "1×"),
        2: ((k + g) / 2, "1× at k = 1, (k + 1)/2×"),
        3: (k * (1 + 2 * g) / 2, "1.5× at k = 1, 3k/2×"),
    }
    paper = papers.get(stage)
    config_groups = run.record.config
    strategy, tied = config_groups.get("strategy") or {}, (config_groups.get("model") or {}).get("tie_word_embeddings")
    deepspeed, recomputes = run.zero_by_deepspeed, config.checkpointing.name in RECOMPUTING_MODES
    reasons = {
        "DeepSpeed's defaults are not the paper's method": deepspeed and strategy.get("literature") is False,
        "ZeroRedundancyOptimizer all-reduces gradients, then broadcasts parameters": partitions_by_parameter(run),
        "DeepSpeed gathers layers once more for a second forward": deepspeed and stage == 3 and recomputes,
        "a tied embedding is gathered for each of its two uses": deepspeed and stage == 3 and tied is True,
    }
    if paper is not None:
        yield from compare_claim(
            run,
            f"{VOLUME_CLAIM}, k = {k} micro-batches",
            "ZeRO, arXiv 1910.02054, section 7, and its reductions in every micro-batch",
            paper[0],
            paper[1],
            ratio(run, ddp_of(run, runs), "communication_bytes"),
            "; ".join(text for text, holds in reasons.items() if holds),
            required=strategy.get("literature") is not False,
        )


def _saved_activations(run: ClaimRun, runs: Sequence[ClaimRun]) -> Iterator[Claim]:
    plain = _unchecked(run, runs)
    yield from compare_claim(
        run,
        "activations: without checkpointing over with, each layer keeping its input alone",
        f"{COUNTED} Korthikanti et al., arXiv 2205.05198, section 5",
        ratio(plain, run, "predicted_activation_bytes"),
        f"{paper_ratio(plain, run)}, as layers multiply",
        ratio(plain, run, "activation_bytes"),
    )


def _unchecked(run: ClaimRun, runs: Sequence[ClaimRun]) -> ClaimRun | None:
    """Return the same run without checkpointing for one with full checkpointing."""
    full = run.row.get("checkpointing") == "full"
    return peer(run, runs, PARTITION_COLUMNS, checkpointing="none") if full else None


def _recomputation(run: ClaimRun, runs: Sequence[ClaimRun]) -> Iterator[Claim]:
    plain, layout, config = _unchecked(run, runs), run.layout(), run.config()
    before = plain.config() if plain else None
    if layout is None or config is None or before is None:
        return
    device: Device = "cpu" if run.row.get("measured_on") == "cpu" else "cuda"
    kernel = run.row.get("attention_kernel")
    fused = kernel in FUSED_KERNELS if kernel else takes_fused_kernel(config, device)
    deepspeed = layout.uses_deepspeed_zero and layout.zero_stage == 3
    projection = deepspeed and run.options().get("memory_efficient_linear") is not False
    remark = "4/3 leaves out that the head runs once and that torch stops before a layer's last projection"
    if layout.splits_backward:
        remark += "; a backward in halves has a second forward for each"
    if projection:
        remark += "; DeepSpeed's own projection runs that too"
    yield from compare_claim(
        run,
        "operations that ran: with checkpointing over without, one more forward",
        f"{COUNTED} Chen et al., arXiv 1604.06174, abstract",
        executed_flops_with(config, layout, fused, projection) / executed_flops_with(before, layout, fused),
        "4/3× = 1.33×",
        ratio(run, plain, "executed_flops"),
        remark=remark,
        required=device == "cpu",
    )


def literature(view: View) -> list[Section]:
    """Return the section with a table of one row per claim."""
    view_claims = claims(view.lines, column_values(view.line_medians, "label"))
    if not view_claims:
        return []
    header = ["run", "claim", "source", "paper's figure", "verdict", "expected at this layout", "measured"]
    rows = [
        [
            *(claim.label, claim.claim, claim.source, claim.limit, _verdict(claim)),
            *(f"{figure:.3g}" for figure in (claim.expected, claim.measured)),
        ]
        for claim in view_claims
    ]
    free = [claim for claim in view_claims if not (claim.required and claim.agrees)]
    return section(
        "Comparison with the literature",
        measured_against_papers(view, view_claims),
        Table(header, rows, label_columns=5),
        Paragraph(
            f"{sum(claim.agrees for claim in free)} of the {len(free)} claims that are not marked as proven agree:"
            f" within {EXACT:.0%} for bytes and operations and {TIMED:.0%} for times. What is marked as proven is part"
            " of the proof that its row has passed. Times are compared where nothing disturbed them. Bytes sent are"
            " counted under ring algorithms on both sides. The paper's figure is for its own model or in its limit; the"
            " figure expected at this layout is for this model and these dtypes. For activations and operations it is"
            " the cost model's count by the paper's method. Each run is compared with a run of the same model,"
            " training, precision, batch, checkpointing and versions."
        ),
    )


def _verdict(claim: Claim) -> str:
    word = ("proven" if claim.required else "agrees") if claim.agrees else "DIFFERS"
    return word + (f": {claim.reason}" if claim.reason else "")
