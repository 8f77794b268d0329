"""The page's section on the literature: what papers say of a strategy, at this layout, beside what was measured."""

from collections.abc import Iterator, Sequence

import pandas as pd

from harness.config import RunConfig
from harness.layout import Layout
from harness.placement import stages_of_rank, whole
from harness.plan.flops import executed_flops
from harness.plan.parts import held_parameter_count
from harness.records import Record
from harness.report import comparison as c
from harness.report.grid import escape, grid
from harness.report.peers import DIVISION, EXACT, TIMED, Claim, Run, compared, ddp_of, ended_well, peer, ratio
from harness.sizes import parameter_count

_STATE = ("parameters", "gradients", "optimizer")
# Bytes a parameter of each, as the ZeRO paper counts them for mixed precision, and for fp32 throughout.
_ACCOUNTING = {"fp32": (4, 4, 8), "bf16_mixed": (2, 2, 12)}
_FIRST_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1}  # of ZeRO's, that divides it
_PAPER_LIMIT = {1: 4, 2: 8}  # times less, at 2 + 2 + 12 bytes


def claims(records: Sequence[Record]) -> list[Claim]:
    """Of every row that is ok, what applies to it and has its peer among the records."""
    runs = ended_well(records)
    kinds = (_state, _volume, _kept_activations, _recomputation, _tensor_parallel, _pipeline)
    return [claim for run in runs for kind in kinds for claim in kind(run, runs)]


def _only_data_parallel(run: Run) -> bool:
    parallel = run.degree("world_size") > 1 and run.degree("tp") == run.degree("pp") == 1
    return parallel and run.row.get("strategy") != "ddp"


def _state(run: Run, runs: Sequence[Run]) -> Iterator[Claim]:
    stage, shards, ddp = run.row.get("zero_stage"), run.degree("dp_shard"), ddp_of(run, runs)
    accounting = dict(zip(_STATE, _ACCOUNTING.get(str(run.row.get("precision")), ()), strict=False))
    if not stage or not shards or not accounting or ddp is None or not _only_data_parallel(run):
        return
    whole_bytes = sum(accounting.values())
    kept = sum(size for kind, size in accounting.items() if stage < _FIRST_STAGE[kind])
    limit = f"{whole_bytes / kept:.3g}× as N grows" if kept else f"N× = {shards}×"
    if kept and whole_bytes / kept != _PAPER_LIMIT[stage]:
        limit += f", {_PAPER_LIMIT[stage]}× at the paper's 2 + 2 + 12 bytes"
    measured, own = (_state_bytes(ddp), _state_bytes(run)), _widths(run, accounting, stage, shards)
    yield from compared(
        run,
        f"model state: DDP's over that of ZeRO stage {stage}",
        "ZeRO, arXiv 1910.02054, section 5",
        whole_bytes / (kept + (whole_bytes - kept) / shards),
        limit,
        measured[0] / measured[1] if measured[0] and measured[1] else None,
        "; ".join([*own, *(f"DDP's {text}" for text in _widths(ddp, accounting, 0, 1))]),
    )


def _state_bytes(run: Run) -> float | None:
    parts = [run.number(name) for name in c.MODEL_STATE]
    return None if None in parts else sum(part or 0 for part in parts)


def _widths(run: Run, accounting: dict[str, int], stage: int, shards: int) -> Iterator[str]:
    """What a run holds otherwise than the accounting has it, a phrase each with the cause where it is known."""
    fsdp, deepspeed = run.degrees.get("data_parallel") == "fsdp", run.row.get("engine") == "deepspeed"
    mixed = run.row.get("precision") != "fp32"
    for kind, column in zip(_STATE, c.MODEL_STATE, strict=True):
        held, parameters = run.number(column), run.number("parameters")
        parts = shards if stage >= _FIRST_STAGE[kind] else 1
        size = held * parts / parameters if held and parameters else accounting[kind]
        if abs(size - accounting[kind]) <= EXACT * accounting[kind]:
            continue
        causes = {
            "DeepSpeed clones an fp32 master of fp32 parameters": kind == "optimizer" and deepspeed and not mixed,
            "fully_shard's fp32 parameters are their own masters": kind != "gradients" and fsdp and mixed,
            "fully_shard divides them at rest in every mode": kind == "parameters" and fsdp and stage < 3,
            "they are summed in fp32": kind == "gradients" and mixed,
            "at the moment some are not reduced yet": kind == "gradients" and parts > 1 and size > 4,
        }
        cause = " and ".join(text for text, holds in causes.items() if holds)
        text = f"{kind} at {size:.3g} bytes a parameter, not {accounting[kind]}"
        yield f"{text} ({cause})" if cause else text


def _volume(run: Run, runs: Sequence[Run]) -> Iterator[Claim]:
    stage, k = run.row.get("zero_stage"), run.number("grad_accumulation")
    hybrid = run.degree("dp_shard") > 1 and run.degree("dp_replicate") > 1
    if not _only_data_parallel(run) or hybrid or run.row.get("precision") != "fp32" or stage is None or not k:
        return
    paper = {0: (1.0, "1×"), 1: (1.0, "1×"), 2: ((k + 1) / 2, "(k + 1)/2×"), 3: (1.5 * k, "3k/2×")}.get(stage)
    strategy, tied = run.groups.get("strategy") or {}, (run.groups.get("model") or {}).get("tie_word_embeddings")
    deepspeed, full = run.row.get("engine") == "deepspeed", run.row.get("checkpointing") == "full"
    reasons = {
        "DeepSpeed's defaults are not the paper's method": deepspeed and strategy.get("literature") is False,
        "DeepSpeed gathers layers once more for a second forward": deepspeed and stage == 3 and full,
        "a tied embedding is gathered for each of its two uses": deepspeed and stage == 3 and tied is True,
    }
    if paper is not None:
        yield from compared(
            run,
            f"bytes sent a step over DDP's, k = {k} micro-batches",
            "ZeRO, arXiv 1910.02054, section 7",
            paper[0],
            paper[1],
            ratio(run, ddp_of(run, runs), "communication_bytes"),
            "; ".join(text for text, holds in reasons.items() if holds),
        )


def _kept_activations(run: Run, runs: Sequence[Run]) -> Iterator[Claim]:
    plain = _unchecked(run, runs)
    yield from compared(
        run,
        "activations: without checkpointing over with, each layer keeping its input alone",
        "Korthikanti et al., arXiv 2205.05198, section 5",
        ratio(plain, run, "predicted_activation_bytes"),
        "17× as layers multiply, for the paper's block (34sbh/2sbh)",
        ratio(plain, run, "activation_bytes"),
    )


def _unchecked(run: Run, runs: Sequence[Run]) -> Run | None:
    """For a run with full checkpointing the same without."""
    full = run.row.get("checkpointing") == "full"
    return peer(run, runs, (*DIVISION, "repeat"), checkpointing="none") if full else None


def _recomputation(run: Run, runs: Sequence[Run]) -> Iterator[Claim]:
    plain, layout, config = _unchecked(run, runs), run.layout(), run.config()
    before = plain.config() if plain else None
    if layout is None or config is None or before is None:
        return
    device = "cpu" if run.row.get("measured_on") == "cpu" else "cuda"
    remark = "4/3 leaves out that the head runs once and that torch stops before a layer's last projection"
    if layout.schedule == "zero_bubble" and layout.pp > 1:
        remark += "; a backward in halves has a second forward for each"
    if run.row.get("engine") == "deepspeed" and layout.zero_stage == 3:
        remark += "; DeepSpeed's own projection runs that too"
    yield from compared(
        run,
        "operations that ran: with checkpointing over without, one more forward",
        "Chen et al., arXiv 1604.06174, abstract",
        executed_flops(config, layout, device) / executed_flops(before, layout, device),
        "4/3× = 1.33×",
        ratio(run, plain, "hardware_flops"),
        remark=remark,
    )


def _tensor_parallel(run: Run, runs: Sequence[Run]) -> Iterator[Claim]:
    t, config = run.degree("tp"), run.config()
    if t < 2 or t != run.degree("world_size"):
        return
    if config is not None:
        yield from compared(
            run,
            "parameters: the whole model over a rank's part, norms not cut",
            "Megatron-LM, arXiv 1909.08053, section 3",
            parameter_count(config.model) / held_parameter_count(config.model, whole(config.model), t),
            f"t× = {t}×",
            ratio(_undivided(run, runs), run, "parameter_bytes"),
        )
    if run.row.get("sequence_parallel"):
        without = peer(run, runs, ("world_size", "tp", "checkpointing", "repeat"), sequence_parallel=False)
        yield from compared(
            run,
            "activations: tensor parallel alone over the same with sequence parallel",
            "Korthikanti et al., arXiv 2205.05198, section 4.2",
            ratio(without, run, "predicted_activation_bytes"),
            f"{(10 * t + 24) / 34:.3g}× for the paper's block ((10 + 24/t)sbh over 34sbh/t)",
            ratio(without, run, "activation_bytes"),
        )


def _undivided(run: Run, runs: Sequence[Run]) -> Run | None:
    """A run whose every rank holds the whole model."""
    return ddp_of(run, runs) or peer(run, runs, ("checkpointing", "repeat"), strategy="single")


def _pipeline(run: Run, runs: Sequence[Run]) -> Iterator[Claim]:
    p, config, layout = run.degree("pp"), run.config(), run.layout()
    if p < 2 or p != run.degree("world_size"):
        return
    if config is not None and layout is not None:
        yield from compared(
            run,
            "parameters: the whole model over the fullest rank's stages",
            "GPipe, arXiv 1811.06965, section 2",
            parameter_count(config.model) / _fullest(config, layout),
            f"p× = {p}×",
            ratio(_undivided(run, runs), run, "parameter_bytes"),
        )
    yield from _in_flight(run)
    schedule = run.row.get("schedule")
    formulas = {"zero_bubble": "(p − 1)/(3vm)", "interleaved_1f1b": "(p − 1)/(vm)"}
    shared = run.row.get("measured_on") == "cpu"
    yield from compared(
        run,
        "bubble: idle over working time",
        "arXiv 2401.10241, table 2" if schedule == "zero_bubble" else "arXiv 2104.04473, section 2.2",
        run.number("bubble_formula"),
        formulas.get(str(schedule), "(p − 1)/m"),
        run.number("bubble"),
        "ranks share the processor and wait for its cores too"
        if shared
        else "stages are not equal and sending takes time",
        within=TIMED,
    )


def _fullest(config: RunConfig, layout: Layout) -> int:
    """Parameters of the rank of a pipeline that holds most."""
    ranks = (stages_of_rank(config.model, layout, rank) for rank in range(layout.world_size))
    return max(sum(held_parameter_count(config.model, stage, 1) for stage in held) for held in ranks)


def _in_flight(run: Run) -> Iterator[Claim]:
    """The papers give it for GPipe, 1F1B and its interleaved form, and for zero bubble with a stage a rank."""
    p, v, m = run.degree("pp"), run.degree("virtual_stages"), run.degree("grad_accumulation")
    found = {
        "gpipe": (m, "m", "GPipe, arXiv 1811.06965, section 2"),
        "1f1b": (min(p, m), "min(p, m)", "arXiv 2104.04473, section 2.2"),
        "interleaved_1f1b": (min(v * p + p - 1, v * m), "vp + p − 1", "arXiv 2205.05198, section 4.2"),
    }
    if v == 1:
        found["zero_bubble"] = (min(p, m), "min(p, m)", "arXiv 2401.10241, table 2")
    passes, formula, source = found.get(str(run.row.get("schedule")), (0, "", ""))
    yield from compared(
        run, f"most passes in flight, m = {m}", source, passes or None, formula, run.number("in_flight")
    )


def section(table: pd.DataFrame, records: Sequence[Record]) -> Iterator[str]:
    """A row a claim."""
    found = claims(records)
    if not found:
        return
    header = ["run", "claim", "source", "limit", "verdict", "expected", "measured"]
    rows = [
        [
            *map(escape, (claim.label, claim.claim, claim.source, claim.limit)),
            ("agrees" if claim.agrees else "**differs**") + (f": {escape(claim.reason)}" if claim.reason else ""),
            *(f"{figure:.3g}" for figure in (claim.expected, claim.measured)),
        ]
        for claim in found
    ]
    yield "## The literature beside the measurement"
    yield grid(header, rows, names=5)
    yield (
        f"{sum(claim.agrees for claim in found)} of {len(found)} agree: within {EXACT:.0%} where theory is exact, in"
        f" bytes, counts and operations, and within {TIMED:.0%} in time. Expected is what the paper's formula gives at"
        " this layout and model, the limit where it leads. Each run is held against its peer of the same model,"
        " precision, batch and checkpointing."
    )
