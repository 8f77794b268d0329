"""The derivations of a row's figures: what each of its columns was computed from, by counter or formula.

The formulas and sentences are in derivations.toml.
"""

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.config.schema import RunConfig
from harness.cost_model.communication import LAYOUT, padded_bytes, sent_elements
from harness.cost_model.flops import BACKWARD, executed_flops_parts, head_flops, layer_flops
from harness.cost_model.memory import estimate_memory
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_rank
from harness.layout.state_widths import StateKind, StateWidths
from harness.metrics.columns import world_peak_flops
from harness.metrics.memory import peak_rank
from harness.metrics.step_time import slowest_rank, step_seconds
from harness.metrics.traffic import rank_sending_most
from harness.records.columns import columns_aggregated_by
from harness.records.schema import Record
from harness.report.comparability import group_by
from harness.report.derivation import Derivation, Term, ranks_text
from harness.report.formulas import ENVIRONMENT, Quantities, most_parameters, quantities, text_of, value_of
from harness.report.labels import PEAK_TITLES
from harness.report.sentences import sentence
from harness.report.speeds import is_undisturbed, timed_runs
from harness.report.text import pluralize

DERIVATIONS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def derive_line(line: Record) -> dict[str, Derivation]:
    """Return the derivations of a row that repeated runs share, as harness.report.view merges them.

    A median lists the undisturbed runs and names the others. Any other figure is opened for the run that has it.
    """
    runs = [run for run in line.runs if run.status == line.status] or [line]
    by_run = [derive(run) for run in runs]
    if len(runs) == 1:
        return by_run[0]
    derived: dict[str, Derivation] = {}
    by_column = group_by((each for columns in by_run for each in columns.values()), attrgetter("column"))
    for column, known in by_column.items():
        value = line.row.get(column)
        if value is not None and column in columns_aggregated_by("median"):
            derived[column] = _median_of_runs(replace(known[0], value=value), runs)
        elif opened := next((derivation for derivation in known if derivation.value == value), None):
            text = sentence("one_of_repeats", is_most=column.endswith("_bytes"), number=len(runs), text=opened.sentence)
            derived[column] = replace(opened, sentence=text)
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
    known = quantities(record, {}) if record.status == "ok" and record.ranks else {}
    derived: dict[str, Derivation] = {}
    for entry in DERIVATIONS["derivations"]:
        column, unit, rule = entry["column"], entry.get("unit", ""), entry.get("rule", "arithmetic")
        if column in known and value_of(entry.get("if", "true"), known):
            text, terms = text_of(entry["sentence"], known).strip(), list(_terms(entry["formula"], known | entry))
            derivation = Derivation(column, known[column], unit, text, terms, rule)
            derived |= {column: derivation} if derivation.is_complete else {}
    return derived


def _terms(formula: str, known: Quantities) -> Iterator[Term]:
    """Yield the terms of a formula; those that are unknown are not a number, which makes no figure."""
    words = f"+ {formula}".split()
    for operator, name in zip(words[::2], words[1::2], strict=True):
        facts = DERIVATIONS["quantities"][name]
        for position, each in enumerate(value_of(facts.get("each", "[none]"), known) or ()):
            own = known | {"each": each, "position": position}
            value = value_of(facts.get("value", name), own)
            texts = {key: text_of(facts.get(key, ""), own) for key in ("name", "source", "unit", "detail")}
            yield Term(value=math.nan if value is None else value, operator=operator, **texts)


def peak_parts(record: Record) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Return what filled the fullest rank's peak: parts, their bytes, and their kinds of blocks, the largest first."""
    at_peak = peak_rank(record.ranks).profiled.at_peak
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for block in at_peak.parts if at_peak else ():
        kinds[block.role][block.what] += block.bytes
    sizes = {part: record.row.get(f"at_peak_{part}_bytes") for part in PEAK_TITLES}
    return [(part, size, kinds[part].most_common()) for part, size in sizes.items() if size]


def state_formula(config: RunConfig, layout: Layout, widths: StateWidths, kind: StateKind) -> str:
    """Return the formula of one kind of model state on the rank that has most of it; empty if it is not kept."""
    is_whole, width = kind == "optimizer" and layout.partitions_by_parameter, getattr(widths, kind)
    count, shards = most_parameters(config.model, layout, is_whole), 1 if is_whole else layout.shard_count(kind)
    values = {"count": count, "width": width, "shards": shards, "size": -(-width * count // shards)}
    return sentence("state_formula", **values, is_whole=is_whole) if width else ""


def bytes_formula(config: RunConfig, layout: Layout, widths: StateWidths, rank: int) -> str:
    """Return the formula's bytes by axis; empty where nothing is sent.

    Those along the data-parallel axes are written as a share of elements times their width.
    """
    moved = [sent_elements(config, layout, widths, stage, rank) for stage in stages_of_rank(config.model, layout, rank)]
    group, shards = layout.group_name(*layout.sharding_axes), layout.axes_size(layout.sharding_axes)
    ring, volumes = Fraction(shards - 1, shards), padded_bytes(config, layout, widths, rank)
    sent = {kind: size for kind, size in volumes.items() if size}
    factors = {
        f"{group} gather": (sum(each.gathered for each in moved), widths.gathered),
        f"{group} reduce": (sum(each.reduced for each in moved), config.precision.reduce_bytes),
    }
    products = {kind: float(ring) * width * elements for kind, (elements, width) in factors.items()}
    shares = {kind: factors[kind] for kind, size in sent.items() if round(products.get(kind, 0)) == round(size)}
    return sentence("bytes_formula", ring=ring, shares=shares, sent=sent)


ENVIRONMENT.globals |= {"BACKWARD": BACKWARD, "LAYOUT": LAYOUT, "fullest": peak_rank, "timed_steps": step_seconds}
ENVIRONMENT.globals |= {"peak_titles": PEAK_TITLES, "peak_sources": DERIVATIONS["peak_sources"]} | {
    function.__name__: function
    for function in (
        *(peak_parts, rank_sending_most, slowest_rank, ranks_text, estimate_memory, executed_flops_parts),
        *(bytes_formula, state_formula, head_flops, layer_flops, pluralize, sentence, world_peak_flops),
    )
}
