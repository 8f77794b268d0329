"""The arithmetic that a derivation shows, done again from its printed terms alone."""

import re
import statistics
from collections.abc import Sequence

import pytest

from harness.metrics.formulas import derive
from harness.records.derivation import Derivation
from harness.records.schema import Record
from harness.report.derivations import derivation_lines

ALWAYS = (
    *("step_seconds", "tokens_per_second", "tokens_per_second_per_device", "model_flops", "executed_flops"),
    *("peak_allocated_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"),
)

_TERM = re.compile(r"  ([ +×÷]) +([\d,.e+-]+) ")


def recomputed(lines: Sequence[str], rule: str) -> float:
    """Return what the printed terms of a derivation make."""
    terms = [(match[1], float(match[2].replace(",", ""))) for line in lines[2:] if (match := _TERM.match(line))]
    assert len(terms) == len(lines) - 2, lines
    values = [value for _, value in terms]
    if rule in ("median", "maximum"):
        return statistics.median(values) if rule == "median" else max(values)
    result = values[0]
    for operator, value in terms[1:]:
        result = result + value if operator == "+" else result * value if operator == "×" else result / value
    return result


def check_derivation(derivation: Derivation, value: float) -> None:
    """Check that the printed terms make the value of the row, bytes and operations exactly."""
    again = recomputed(list(derivation_lines(derivation)), derivation.rule)
    is_exact = derivation.unit in ("B", "FLOPs")
    expected = pytest.approx(value, abs=0.5) if is_exact else pytest.approx(value, rel=1e-8)
    assert again == expected, (derivation.column, again, value)  # a mean share of a ring can be a fraction of a byte
    assert derivation.value == value


def check_derivations(record: Record) -> None:
    """Check every derivation of a run's row, and that none is missing whose terms every run records."""
    derivations = derive(record)
    row = record.row
    expected = {column for column in ALWAYS if row.get(column) is not None}
    expected |= {"communication_bytes"} if row["communication_bytes"] else set()
    expected |= {"pipeline_bubble"} if row.get("pipeline_bubble") is not None else set()
    assert expected <= derivations.keys(), (record.run_id, expected - derivations.keys())
    for column, derivation in derivations.items():
        check_derivation(derivation, row[column])
