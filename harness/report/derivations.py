"""The arithmetic behind a row's figures: terms that a reader can put together without the code, as text and as JSON.

The formulas and sentences, by counter or formula of each column, are in derivations.toml.
"""

import math
import operator
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import count, groupby
from pathlib import Path
from typing import Any, Literal

from harness.config.schema import RunConfig
from harness.cost_model.communication import padded_bytes, sent_elements
from harness.layout.layout import Layout
from harness.layout.partition import stages_of_rank
from harness.layout.state_widths import StateKind, StateWidths
from harness.metrics.memory import peak_rank
from harness.records.columns import columns_aggregated_by
from harness.records.rank_report import RankReport
from harness.records.schema import Record
from harness.report.comparability import group_by
from harness.report.formulas import ENVIRONMENT, Quantities, most_parameters, quantities, text_of, value_of
from harness.report.labels import PEAK_TITLES
from harness.report.sentences import sentence
from harness.report.speeds import is_undisturbed, timed_runs
from harness.report.text import bytes_text, join_words

DERIVATIONS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

_OPERATIONS = {"+": operator.add, "×": operator.mul, "÷": operator.truediv}


@dataclass(frozen=True)
class Term:
    """One number of a derivation; the operator of the first is not used, and neither are those of a list."""

    name: str
    value: float
    source: str  # the counter or the formula that it comes from
    unit: str = ""
    operator: str = "+"  # or × or ÷
    detail: str = ""  # what only the text says, such as the kinds of buffers


@dataclass(frozen=True)
class Derivation:
    """The arithmetic behind one column of a row."""

    column: str
    value: float
    unit: str
    sentence: str
    terms: Sequence[Term]
    # How the terms make the value: from left to right by their operators, or as the median or the largest of a list.
    rule: Literal["arithmetic", "median", "maximum"] = "arithmetic"

    @property
    def is_complete(self) -> bool:
        """Whether the terms make the value: some records lack a part of them."""
        if not self.terms or any(term.operator == "÷" and not term.value for term in self.terms):
            return False
        values = [term.value for term in self.terms]
        total = reduce(lambda total, term: _OPERATIONS[term.operator](total, term.value), self.terms, 0.0)
        results = {"arithmetic": total, "median": statistics.median(values), "maximum": max(values)}
        return math.isclose(results[self.rule], self.value, rel_tol=1e-9, abs_tol=0.5 if self.unit == "B" else 0.0)


def derive_line(line: Record) -> dict[str, Derivation]:
    """Return the derivations of a row that repeated runs share, as harness.report.view merges them.

    A median lists the undisturbed runs and names the others. Any other figure is opened for the run that has it.
    """
    runs = [run for run in line.runs if run.status == line.status] or [line]
    by_run = [derive(run) for run in runs]
    if len(runs) == 1:
        return by_run[0]
    derived: dict[str, Derivation] = {}
    by_column = group_by((each for columns in by_run for each in columns.values()), operator.attrgetter("column"))
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
    column, disturbed = derivation.column, [run for run in runs if not is_undisturbed(run.row)]
    terms = list(_terms("repeats", {"runs": timed_runs(runs), "column": column, "unit": derivation.unit}))
    is_disturbed, others = len(disturbed) == len(runs), [run.row.get("repeat") for run in disturbed]
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
    for sign, name in zip(words[::2], words[1::2], strict=True):
        facts = DERIVATIONS["quantities"][name]
        for position, each in enumerate(value_of(facts.get("each", "[none]"), known) or ()):
            own = known | {"each": each, "position": position}
            value = value_of(facts.get("value", name), own)
            texts = {key: text_of(facts.get(key, ""), own) for key in ("name", "source", "unit", "detail")}
            yield Term(value=math.nan if value is None else value, operator=sign, **texts)


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
    ring, sent = Fraction(shards - 1, shards), padded_bytes(config, layout, widths, rank)
    factors = {
        f"{group} gather": (sum(each.gathered for each in moved), widths.gathered),
        f"{group} reduce": (sum(each.reduced for each in moved), config.precision.reduce_bytes),
    }
    shares = {
        kind: (elements, width)
        for kind, (elements, width) in factors.items()
        if round(float(ring) * width * elements) == round(sent.get(kind, 0))
    }
    return sentence("bytes_formula", ring=ring, shares=shares, sent=sent)


def ranks_text(ranks: Sequence[RankReport]) -> str:
    """Return the numbers of ranks as text, with ranges: rank 0, ranks 0-3 and 5."""
    numbers = enumerate(sorted(rank.rank for rank in ranks))
    ranges = [[rank for _, rank in run] for _, run in groupby(numbers, lambda pair: pair[1] - pair[0])]
    ends = ["-".join(dict.fromkeys((str(run[0]), str(run[-1])))) for run in ranges]
    return f"rank{'s' if len(ranks) > 1 else ''} {join_words(ends)}"


ENVIRONMENT.globals |= {"peak_titles": PEAK_TITLES, "peak_sources": DERIVATIONS["peak_sources"]} | {
    function.__name__: function for function in (peak_parts, ranks_text, state_formula, bytes_formula)
}


def derivation_lines(derivation: Derivation) -> Iterator[str]:
    """Yield the lines that show a derivation: the figure, a sentence, and one line for each term."""
    unit = f" {derivation.unit}" if derivation.unit else ""
    rounded = f" ({bytes_text(derivation.value)})" if derivation.unit == "B" and derivation.value >= 1024 else ""
    yield f"{derivation.column} = {number_text(derivation.value)}{unit}{rounded}"
    yield f"  {derivation.sentence}"
    numbers = [f"{number_text(term.value)} {term.unit}".rstrip() for term in derivation.terms]
    width, name_width = max(map(len, numbers)), max(len(term.name) for term in derivation.terms)
    for position, (term, number) in enumerate(zip(derivation.terms, numbers, strict=True)):
        sign = " " if position == 0 or derivation.rule != "arithmetic" else term.operator
        source = f"{term.source}: {term.detail}" if term.detail else term.source
        yield f"  {sign} {number:>{width}}  {term.name:<{name_width}}  {source}".rstrip()


def number_text(value: float) -> str:
    """Return a number exactly if it is whole, and with ten significant figures otherwise."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.10g}"


def pack(rows: Sequence[Mapping[str, Derivation]]) -> dict[str, Any]:
    """Return the derivations of several rows as JSON in which every text occurs once.

    `texts` has the texts, and `rows` for each row the derivations by column as [rule, value, unit, sentence, terms],
    where a term is [operator, value, unit, name, source]; all of these but values are positions in `texts`.
    """
    positions: defaultdict[str, int] = defaultdict(count().__next__)

    def packed(derivation: Derivation) -> list[Any]:
        terms = [
            [positions[term.operator], term.value, positions[term.unit], positions[term.name], positions[term.source]]
            for term in derivation.terms
        ]
        rule, unit = positions[derivation.rule], positions[derivation.unit]
        return [rule, derivation.value, unit, positions[derivation.sentence], terms]

    columns = [{column: packed(derivation) for column, derivation in row.items()} for row in rows]
    return {"texts": list(positions), "rows": columns}
