"""How derivations are shown: those of repeated runs together, as text and as JSON."""

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from harness.metrics.formulas import derivations_of, terms_of
from harness.records.derivation import Derivation
from harness.records.schema import Record, columns_aggregated_by
from harness.report.comparability import group_by
from harness.report.speeds import is_undisturbed, timed_runs
from harness.report.text import bytes_text, sentence


def derive_line(line: Record) -> dict[str, Derivation]:
    """Return the derivations of a row that repeated runs share, as harness.report.view merges them.

    A median lists the undisturbed runs and names the others. Any other figure is opened for the run that has it.
    """
    runs = [run for run in line.runs if run.status == line.status] or [line]
    by_run = [derivations_of(run) for run in runs]
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
    terms = list(terms_of("repeats", {"runs": timed_runs(runs), "column": column, "unit": derivation.unit}))
    is_disturbed, others = len(disturbed) == len(runs), [run.row.get("repeat") for run in disturbed]
    text = sentence("median_of_repeats", number=len(terms), others=others, is_disturbed=is_disturbed)
    return replace(derivation, sentence=text, terms=terms, rule="median")


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
