"""Formulas and texts of tables, such as derivations.toml and the report's claims.toml, over quantities of a run.

The derivations are the arithmetic behind a row's figures: terms that a reader can put together without the code. A
record has those of its figures by the code that computed them.
"""

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from harness.config.command import read_run_config
from harness.config.from_dict import from_dict
from harness.config.model import ModelConfig
from harness.config.schema import RECOMPUTING_MODES, RunConfig
from harness.cost_model import communication, dp_communication, flops
from harness.cost_model.memory import estimate_memory
from harness.cost_model.optimizer_state import optimizer_parameter_count, state_width
from harness.cost_model.parts import PEAK_TITLES
from harness.cost_model.shard_groups import local_parameter_count
from harness.engines.base import load_engine
from harness.layout import model_profile
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_pp_rank, stages_of_rank
from harness.layout.state_widths import StateKind, StateWidths
from harness.metrics import columns, memory, step_time
from harness.records import rank_report
from harness.records.derivation import Derivation, Term
from harness.records.rank_report import RankReport
from harness.records.schema import Record
from harness.util.files import JsonObject
from harness.util.sentences import Sentences
from harness.util.text import UserError, count_text, join_words

EXACT = 0.05  # the relative tolerance of bytes, counts and operations

Quantities = dict[str, Any]  # those of a run that are known, by their names


def quantities(record: Record, formulas: Mapping[str, str]) -> Quantities:
    """Return what formulas may name of a run, without what is unknown: the columns of its row, and the following.

    They are the record, `config`, `layout`, `widths` and `device`, which the cost model needs, as far as this version
    of the harness can read them, and the given formulas by their names, each of which may name those before it.
    """
    known = record.row | {"record": record, "device": "cpu" if record.row.get("measured_on") == "cpu" else "cuda"}
    with suppress(UserError):  # no figure depends on the training text
        known["config"] = read_run_config(record.config | {"data": {"name": "any", "kind": "synthetic"}})
    with suppress(UserError):
        known["layout"] = from_dict(Layout, record.layout or {})
    with suppress(UserError, KeyError):
        config, layout = known["config"], known["layout"]
        layout.grad_accumulation_steps(config.train)  # raises UserError for a batch that leaves a remainder
        known["widths"] = load_engine(layout.engine).state_widths(config, layout)
    known = {name: value for name, value in known.items() if value is not None}
    for name, formula in formulas.items():
        value = value_of(formula, known)
        known |= {} if value is None else {name: value}
    return known


def most_parameters(model: ModelConfig, layout: Layout, kind: StateKind = "parameters") -> int:
    """Return the number of parameters whose state of a kind the rank has that has most of it, before it is sharded."""
    stages = [stages_of_pp_rank(model, layout, pp_rank) for pp_rank in range(layout.pp)]
    if kind == "optimizer" and layout.partitions_by_parameter:
        return max(optimizer_parameter_count(model, layout, own) for own in stages)
    tp, vocabulary_tp = layout.tp, layout.vocabulary_tp
    cut = tp, vocabulary_tp, layout.undivided_ep(kind)
    return max(sum(local_parameter_count(model, stage, *cut, kind != "parameters") for stage in own) for own in stages)


def value_of(formula: str, known: Mapping[str, Any]) -> Any:
    """Return what a formula gives; None where it names something unknown, or divides by zero."""
    try:
        return _compiled(formula)(known)
    except (jinja2.UndefinedError, ZeroDivisionError):
        return None


def text_of(template: str, known: Mapping[str, Any]) -> str:
    """Return the text of a template."""
    return _template(template).render(known) if "{" in template else template


DERIVATIONS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("derivations.toml").read_text("utf-8"))

_say = Sentences(Path(__file__).with_name("sentences.j2"), {"grouped": "{:,.0f}".format})


def derivation_entries(record: Record) -> JsonObject:
    """Return the derivations of a record as its file has them, without empty texts."""

    def known(items: Iterable[tuple[str, Any]]) -> JsonObject:
        return {key: value for key, value in items if value != ""}

    return {column: asdict(derivation, dict_factory=known) for column, derivation in derive(record).items()}


def derivations_of(record: Record) -> dict[str, Derivation]:
    """Return the derivations that a record has, or for an older one those that this code makes of it."""
    if not record.derivations:
        return derive(record)
    recorded = {column: Derivation.from_json(entry) for column, entry in record.derivations.items()}
    return {column: derivation for column, derivation in recorded.items() if derivation.terms}


def derive(record: Record) -> dict[str, Derivation]:
    """Return the derivations of a run's row by column; a figure whose terms are not all recorded has none."""
    known = quantities(record, {}) if record.status == "ok" and record.ranks else {}
    derived: dict[str, Derivation] = {}
    for entry in DERIVATIONS["derivations"]:
        column, unit, rule = entry["column"], entry.get("unit", ""), entry.get("rule", "arithmetic")
        if column in known and value_of(entry.get("if", "true"), known):
            text, terms = text_of(entry["sentence"], known).strip(), list(terms_of(entry["formula"], known | entry))
            derivation = Derivation(column, known[column], unit, text, terms, rule)
            derived |= {column: derivation} if derivation.is_complete else {}
    return derived


def terms_of(formula: str, known: Quantities) -> Iterator[Term]:
    """Yield the terms of a formula; those that are unknown are not a number, which makes no figure."""
    words = f"+ {formula}".split()
    for sign, name in zip(words[::2], words[1::2], strict=True):
        facts = DERIVATIONS["quantities"][name]
        for position, each in enumerate(value_of(facts.get("each", "[none]"), known) or ()):
            own = known | {"each": each, "position": position}
            value = value_of(facts.get("value", name), own)
            texts = {key: text_of(facts.get(key, ""), own) for key in ("name", "source", "unit", "detail")}
            yield Term(value=math.nan if value is None else value, operator=sign, **texts)


def peak_parts(record: Record) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Return what filled the fullest rank's peak: parts, their bytes, and their kinds of blocks, the largest first."""
    at_peak = memory.peak_rank(record.ranks).profiled.at_peak
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for block in at_peak.parts if at_peak else ():
        kinds[block.role][block.what] += block.bytes
    sizes = {part: record.row.get(f"at_peak_{part}_bytes") for part in PEAK_TITLES}
    return [(part, size, kinds[part].most_common()) for part, size in sizes.items() if size]


def state_formula(config: RunConfig, layout: Layout, widths: StateWidths, kind: StateKind) -> str:
    """Return the formula of one kind of model state on the rank that has most of it; empty if it is not kept."""
    is_whole, width = kind == "optimizer" and layout.partitions_by_parameter, state_width(config, widths, kind)
    count, shards = most_parameters(config.model, layout, kind), 1 if is_whole else layout.shard_count(kind)
    values = {"count": count, "width": width, "shards": shards, "size": -(-width * count // shards)}
    return _say("state_formula", **values, is_whole=is_whole) if width else ""


def bytes_formula(config: RunConfig, layout: Layout, widths: StateWidths, rank: int) -> str:
    """Return the formula's bytes by axis; empty where nothing is sent.

    Those along the data-parallel axes are written as a share of elements times their width.
    """
    moved = [
        dp_communication.sent_elements(config, layout, widths, stage, rank)
        for stage in stages_of_rank(config.model, layout, rank)
    ]
    group, shards = layout.group_name(*layout.sharding_axes), layout.axes_size(layout.sharding_axes)
    ring, sent = (
        Fraction(shards - 1, shards),
        communication.expected_bytes(config, layout, widths, rank, is_padded=True),
    )
    factors = {
        f"{group} gather": (sum(gathered for gathered, _ in moved), widths.gathered),
        f"{group} reduce": (sum(reduced for _, reduced in moved), config.precision.reduce_bytes),
    }
    shares = {
        kind: (elements, width)
        for kind, (elements, width) in factors.items()
        if round(float(ring) * width * elements) == round(sent.get(kind, 0))
    }
    return _say("bytes_formula", ring=ring, shares=shares, sent=sent)


def ranks_text(ranks: Sequence[RankReport]) -> str:
    """Return the numbers of ranks as text, with ranges: rank 0, ranks 0-3 and 5."""
    numbers = enumerate(sorted(rank.rank for rank in ranks))
    ranges = [[rank for _, rank in run] for _, run in groupby(numbers, lambda pair: pair[1] - pair[0])]
    ends = ["-".join(dict.fromkeys((str(run[0]), str(run[-1])))) for run in ranges]
    return f"rank{'s' if len(ranks) > 1 else ''} {join_words(ends)}"


ENVIRONMENT = jinja2.Environment(undefined=jinja2.ChainableUndefined)  # what is unknown has unknown attributes
ENVIRONMENT.globals |= {
    "recomputing_modes": RECOMPUTING_MODES,
    "say": _say,
    "peak_titles": PEAK_TITLES,
    "peak_sources": DERIVATIONS["peak_sources"],
} | {
    named.__name__.rpartition(".")[2]: named
    for named in (
        *(columns, communication, flops, memory, model_profile, rank_report, step_time),
        *(estimate_memory, most_parameters, count_text, peak_parts, ranks_text, state_formula, bytes_formula),
    )
}
ENVIRONMENT.tests["near"] = lambda value, expected: abs(value - expected) <= EXACT * expected

_compiled, _template = cache(ENVIRONMENT.compile_expression), cache(ENVIRONMENT.from_string)
