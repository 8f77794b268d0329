"""The derivations of a row's figures: what each of its columns was computed from, by counter or formula.

The formulas and sentences are in derivations.toml.
"""

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.cost_model.communication import LAYOUT, padded_bytes, sent_elements
from harness.cost_model.flops import BACKWARD, executed_flops_parts, head_flops, layer_flops
from harness.cost_model.memory import estimate_memory
from harness.cost_model.rank_memory import rank_stages
from harness.cost_model.sharding import optimizer_parameter_count
from harness.layout.partition import stages_of_rank
from harness.layout.state_widths import StateKind
from harness.metrics.columns import world_peak_flops
from harness.metrics.memory import peak_rank
from harness.metrics.step_time import slowest_rank, step_seconds
from harness.metrics.traffic import rank_sending_most
from harness.records.columns import columns_aggregated_by
from harness.records.rank_report import FUSED_KERNELS, RankReport
from harness.records.schema import Record
from harness.report.derivation import Derivation, Term, group_by_value
from harness.report.formulas import ENVIRONMENT, Quantities, text_of, value_of
from harness.report.labels import PEAK_TITLES
from harness.report.sentences import sentence
from harness.report.setting import Setting, most_parameters, read_setting
from harness.report.speeds import is_undisturbed, timed_runs
from harness.report.text import pluralize

_MOST_KINDS = 3  # of buffers that the text names for each part of a peak

# What the blocks of each part of a peak are; see harness.measure.memory_attribution.
_PEAK_SOURCES = {
    "parameter": "blocks of the engine's parameters",
    "optimizer": "blocks of the optimizer's state",
    "gradient": "blocks of the engine's gradients",
    "gathered": "blocks of parameters that were gathered or cast for computing",
    "activation": "blocks that operators saved for backward",
    "communication": "blocks of buckets and messages",
    "temporary": "all other blocks, by the operator that asked for them",
    "rounding": "what torch's allocator adds to the requests",
    "unmatched": "peak of the timed steps less that of the profiled one",
}

DERIVATIONS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def derive_line(line: Record) -> dict[str, Derivation]:
    """Return the derivations of a row that repeated runs share, as harness.report.view merges them.

    A median lists the undisturbed runs and names the others. Any other figure is opened for the run that has it.
    """
    runs = [run for run in line.runs if run.status == line.status] or [line]
    if line.status != "ok" or len(runs) == 1:
        return derive(runs[0])
    by_run = [derive(run) for run in runs]
    derived: dict[str, Derivation] = {}
    for column in dict.fromkeys(column for columns in by_run for column in columns):
        value, known = line.row.get(column), [columns[column] for columns in by_run if column in columns]
        if value is not None and column in columns_aggregated_by("median"):
            derived[column] = _median_of_runs(replace(known[0], value=value), runs)
        elif opened := next((derivation for derivation in known if derivation.value == value), None):
            lead = "The most" if column.endswith("_bytes") else "One"
            derived[column] = replace(opened, sentence=f"{lead} of {len(runs)} repeats. {opened.sentence}")
    return derived


def _median_of_runs(derivation: Derivation, runs: Sequence[Record]) -> Derivation:
    """Return the median over the runs that are timed, with the others in the sentence."""
    names = {run.run_id: f"repeat {run.row.get('repeat')}" for run in runs}
    timed = {run.run_id: run.row.get(derivation.column) for run in timed_runs(runs)}
    terms = [Term(names[name], value, name, derivation.unit) for name, value in timed.items() if value is not None]
    others = [text for name, text in names.items() if name not in timed]
    is_disturbed = not any(is_undisturbed(run.row) for run in runs)
    text = sentence("median_of_repeats", number=len(terms), others=others, is_disturbed=is_disturbed)
    return replace(derivation, sentence=text, terms=terms, rule="median")


def derive(record: Record) -> dict[str, Derivation]:
    """Return the derivations of a run's row by column; a figure whose terms are not all recorded has none."""
    if record.status != "ok" or not record.ranks:
        return {}
    known = _quantities(record)
    derived: dict[str, Derivation] = {}
    for entry in DERIVATIONS["derivations"]:
        column, value = entry["column"], record.row.get(entry["column"])
        if value is not None and value_of(entry.get("if", "true"), known):
            unit, rule = entry.get("unit", ""), entry.get("rule", "arithmetic")
            text = text_of(entry["sentence"], known).strip()
            terms = value_of(entry["terms"], known) if "terms" in entry else _formula_terms(entry["formula"], known)
            derivation = Derivation(column, value, unit, text, terms or (), rule)
            derived |= {column: derivation} if derivation.is_complete else {}
    return derived


def _quantities(record: Record) -> Quantities:
    """Return what formulas and sentences may name of a run, without what is unknown."""
    ranks, setting = record.ranks, read_setting(record)
    known = {"row": record.row, "record": record, "ranks": ranks, "steps": step_seconds(ranks)}
    known |= {"fullest": peak_rank(ranks), "sender": rank_sending_most(ranks)}
    known |= {"setting": setting, "config": setting and setting.config}
    return {name: value for name, value in known.items() if value is not None}


def _formula_terms(formula: str, known: Quantities) -> list[Term]:
    """Return the terms of a formula; what is unknown is not a number, which makes no figure."""
    names, terms = formula.split(), []
    for operator, name in zip(["+", *names[1::2]], names[::2], strict=True):
        facts = DERIVATIONS["quantities"][name]
        value = value_of(facts.get("value", f"row.{name}"), known)
        texts = {key: text_of(facts.get(key, ""), known) for key in ("name", "source", "unit", "detail")}
        terms.append(Term(value=math.nan if value is None else value, operator=operator, **texts))
    return terms


def step_terms(record: Record) -> list[Term]:
    """Return the timed steps, each as long as on its slowest rank."""
    ranks, first = record.ranks, (record.config.get("train") or {}).get("warmup_steps", 0)
    return [
        Term(f"step {first + position}", seconds, f"rank {slowest_rank(ranks, position).rank}, the slowest", "s")
        for position, seconds in enumerate(step_seconds(ranks))
    ]


def flops_terms(ranks: Sequence[RankReport]) -> list[Term]:
    """Return the operations of all ranks, in groups that ran as many."""
    return [
        Term(f"{name}, {value:,} each" if count > 1 else name, value * count, "counted by operator", "FLOPs")
        for name, value, count in group_by_value({rank.rank: rank.profiled.flops for rank in ranks})
    ]


def rank_terms(ranks: Sequence[RankReport], field: str) -> list[Term]:
    """Return the bytes in a field of the ranks' reports, those of ranks that have as many together."""
    values = {rank.rank: attrgetter(field)(rank) for rank in ranks}
    return [Term(name, value, "counted", "B") for name, value, _ in group_by_value(values)]


def sent_terms(record: Record) -> list[Term]:
    """Return the bytes that the rank sends that sends most, by operation and axis."""
    return [
        Term(
            f"{entry['operation']} on {entry['axis']}",
            entry["bytes"],
            f"counted over {pluralize(entry['count'], 'call')}"
            f"{', no part of the formula' * (entry.get('purpose', LAYOUT) != LAYOUT)}",
            "B",
        )
        for entry in record.communication
    ]


def predicted_terms(setting: Setting) -> list[Term]:
    """Return the parts of the predicted peak."""
    estimate = estimate_memory(setting.config, setting.layout, setting.widths, setting.device)
    return [Term(name, size, "cost model", "B") for name, size in estimate.at_peak.items() if size]


def peak_terms(record: Record) -> list[Term]:
    """Return what filled the peak of the fullest rank, with the largest kinds of blocks of each part."""
    at_peak = peak_rank(record.ranks).profiled.at_peak
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for block in at_peak.parts if at_peak else ():
        kinds[block.role][block.what] += block.bytes
    terms = []
    for part, title in PEAK_TITLES.items():
        if size := record.row.get(f"at_peak_{part}_bytes"):
            largest = dict(kinds[part].most_common(_MOST_KINDS))
            rest = kinds[part].total() - sum(largest.values())
            texts = [f"{kind} {size:,} B" for kind, size in (largest | ({"others": rest} if rest else {})).items()]
            terms.append(Term(title, size, _PEAK_SOURCES[part], "B", detail=", ".join(texts)))
    return terms


def flops_formula(setting: Setting, kernel: str | None) -> str:
    """Return the formula of the operations that run in a step."""
    is_fused, last = kernel in FUSED_KERNELS, setting.widths.recomputes_last_projection
    parts = executed_flops_parts(setting.config, setting.layout, is_fused, last)
    return sentence("flops_formula", parts={name: count for name, count in parts.items() if count})


def state_formula(setting: Setting, kind: StateKind) -> str:
    """Return the formula of one kind of model state on the rank that has most of it; empty if it is not kept."""
    model, layout, width = setting.config.model, setting.layout, getattr(setting.widths, kind)
    count, shards = most_parameters(model, layout), layout.shard_count(kind)
    is_whole = kind == "optimizer" and layout.partitions_by_parameter
    if is_whole:
        stages = [rank_stages(model, layout, pp_rank) for pp_rank in range(layout.pp)]
        count, shards = max(optimizer_parameter_count(model, layout, own) for own in stages), 1
    values = {"count": count, "width": width, "shards": shards, "size": -(-width * count // shards)}
    return sentence("state_formula", **values, is_whole=is_whole) if width else ""


def bytes_formula(setting: Setting, rank: int) -> str:
    """Return the formula's bytes by axis; empty where nothing is sent.

    Those along the data-parallel axes are written as a share of elements times their width.
    """
    config, layout, widths = setting.config, setting.layout, setting.widths
    moved = [sent_elements(config, layout, widths, stage, rank) for stage in stages_of_rank(config.model, layout, rank)]
    group, shards = layout.group_name(*layout.sharding_axes), layout.axes_size(layout.sharding_axes)
    factors = {
        f"{group} gather": (sum(each.gathered for each in moved), widths.gathered),
        f"{group} reduce": (sum(each.reduced for each in moved), config.precision.reduce_bytes),
    }
    texts, ring = [], Fraction(shards - 1, shards)
    for kind, size in padded_bytes(config, layout, widths, rank).items():
        elements, width = factors.get(kind, (0, 0))
        is_share = elements and width and round(float(ring) * width * elements) == round(size)
        share = f"{ring} × {elements:,.0f} elements × {width} B = " if is_share else ""
        if size:
            texts.append(f"{kind} {share}{size:,.0f} B")
    return f"By formula {', '.join(texts)}." if texts else ""


ENVIRONMENT.globals |= {"BACKWARD": BACKWARD} | {
    function.__name__: function
    for function in (
        *(step_terms, flops_terms, rank_terms, sent_terms, predicted_terms, peak_terms),
        *(bytes_formula, flops_formula, state_formula, head_flops, layer_flops, pluralize, world_peak_flops),
    )
}
