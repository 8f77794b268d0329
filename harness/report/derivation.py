"""The arithmetic behind a figure: terms that a reader can put together without the code, as text and as JSON."""

import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count, groupby
from typing import Any, Literal

from harness.records.rank_report import RankReport
from harness.report.text import bytes_text, join_words

# How the terms make the figure: from left to right by their operators, or as the median or the largest of a list.
Rule = Literal["arithmetic", "median", "maximum"]

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
    rule: Rule = "arithmetic"

    @property
    def is_complete(self) -> bool:
        """Whether the terms make the value: some records lack a part of them."""
        if not self.terms or any(term.operator == "÷" and not term.value for term in self.terms):
            return False
        values = [term.value for term in self.terms]
        total = reduce(lambda total, term: _OPERATIONS[term.operator](total, term.value), self.terms, 0.0)
        made = {"arithmetic": total, "median": statistics.median(values), "maximum": max(values)}[self.rule]
        return math.isclose(made, self.value, rel_tol=1e-9, abs_tol=0.5 if self.unit == "B" else 0.0)


def number_text(value: float) -> str:
    """Return a number exactly if it is whole, and with ten significant figures otherwise."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.10g}"


def ranks_text(ranks: Sequence[RankReport]) -> str:
    """Return the numbers of ranks as text, with ranges: rank 0, ranks 0-3 and 5."""
    numbers = enumerate(sorted(rank.rank for rank in ranks))
    ranges = [[rank for _, rank in run] for _, run in groupby(numbers, lambda pair: pair[1] - pair[0])]
    ends = ["-".join(dict.fromkeys((str(run[0]), str(run[-1])))) for run in ranges]
    return f"rank{'s' if len(ranks) > 1 else ''} {join_words(ends)}"


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
