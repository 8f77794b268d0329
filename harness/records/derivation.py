"""The arithmetic behind a figure of a row: terms that a reader can put together without the code."""

import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

from harness.records.rank_report import FromJson

_OPERATIONS = {"+": operator.add, "×": operator.mul, "÷": operator.truediv}


@dataclass(frozen=True)
class Term(FromJson):
    """One number of a derivation; the operator of the first is not used, and neither are those of a list."""

    name: str
    value: float
    source: str  # the counter or the formula that it comes from
    unit: str = ""
    operator: str = "+"  # or × or ÷
    detail: str = ""  # what only the text says, such as the kinds of buffers


@dataclass(frozen=True)
class Derivation(FromJson):
    """The arithmetic behind one column of a row."""

    column: str
    value: float
    unit: str = ""
    sentence: str = ""
    terms: Sequence[Term] = field(default=(), metadata={"read": lambda terms: [Term.from_json(term) for term in terms]})
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
