"""Every combination of the table is a proven row, and every invariant of a row holds for it."""

from pathlib import Path

import pytest

from tests.support import row_invariants
from tests.support.combinations import COMBINATIONS, LONG, Combination
from tests.support.commands import run_folder
from tests.support.derived import check_derivations

LONG_CASES = [pytest.param(combination, marks=pytest.mark.long) for combination in LONG]


@pytest.mark.parametrize("combination", [*COMBINATIONS, *LONG_CASES], ids=str)
def test_every_combination_is_a_proven_row(results: Path, combination: Combination) -> None:
    record = combination.record(results)
    row = record.row
    assert (row["status"], row["reason"], record.proof["layout"]) == ("ok", "", "proven")
    assert record.proof["reference"].startswith("compared with single")
    if row["precision"] == "fp32":
        assert 0 <= row["loss_deviation"] < 1e-4 and row["grad_deviation"] < 1e-4
    if row["precision"] == "fp32" and row["world_size"] > 1 and row["pp"] == 1:
        assert row["grad_deviation"] > 0  # another order of sums: it was compared with the reference, not copied
    ranks = run_folder(results, record).read_rank_reports(row["world_size"])
    row_invariants.check_memory(row, ranks)
    row_invariants.check_bytes(record)
    row_invariants.check_time(row)
    row_invariants.check_steps(run_folder(results, record), record)
    check_derivations(record)
