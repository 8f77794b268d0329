"""The measured figures that predictions are compared with."""

from typing import Any

from harness.records.schema import Row


def comparable_peak(row: Row) -> Any:
    """Return the measured peak that a predicted one is compared with, None where there is none.

    On a CPU it is without the copies that gloo makes, whose number depends on timing; records of earlier versions have
    only the peak with them.
    """
    without_backend = row.get("peak_without_backend_bytes")
    return row.get("peak_allocated_bytes") if without_backend is None else without_backend


def peak_note(rows: list[Row]) -> str:
    """Return the sentence that says of which peaks the errors are, empty where they are simply the peaks."""
    if all(row.get("peak_without_backend_bytes") is None for row in rows):
        return ""
    return " Peaks on a CPU are those without the copies that gloo makes in collectives (peak_without_backend_bytes)."
