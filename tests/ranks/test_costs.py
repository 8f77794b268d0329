"""What a run costs beside its steps, of real ranks: the parts of its start."""

from pathlib import Path

from tests.support import faults
from tests.support.commands import assert_ok, run_with
from tests.support.faults.endings import BUILD_SECONDS, FINGERPRINT_SECONDS, FIRST_STEP_SECONDS

PARTS = ("start_up_import_seconds", "start_up_join_seconds", "start_up_build_seconds", "first_step_seconds")

OFTEN = ("strategy=ddp", "train.warmup_steps=1", "proof.reference=false")


def test_each_part_of_a_start_is_measured_by_itself(results: Path) -> None:
    """Fingerprints that the harness takes in the first step are no part of it."""
    plain, slow = run_with(results, *OFTEN).row, run_with(results, *OFTEN, entry=faults.slow_start).row
    for row in (plain, slow):
        assert_ok(row)
        assert all(row[name] > 0 for name in PARTS) and row["compile_seconds"] is None
        assert sum(row[name] for name in PARTS) < row["duration_seconds"]
    assert slow["start_up_build_seconds"] > BUILD_SECONDS
    assert FIRST_STEP_SECONDS < slow["first_step_seconds"] < FINGERPRINT_SECONDS
