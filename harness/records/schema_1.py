"""Rows of schema version 1, whose columns have other names."""

from harness.records.schema import Row

# The present names of its columns, by their names in that version.
RENAMED_COLUMNS: dict[str, str] = {
    "in_flight": "max_in_flight_micro_batches",
    "bubble": "pipeline_bubble",
    "bubble_formula": "pipeline_bubble_theory",
    "disturbed": "noise_warning",
    "stale": "stale_reason",
    "outside_bytes": "non_torch_bytes",
    "allocation_retries": "num_alloc_retries",
    "out_of_memory_errors": "num_ooms",
    "last_allocated_bytes": "last_seen_allocated_bytes",
    "last_host_bytes": "last_seen_rss_bytes",
    "peak_host_bytes": "peak_rss_bytes",
    "phase": "failed_in_phase",
    "hardware_flops": "executed_flops",
    "seconds": "duration_seconds",
    "step_seconds_spread": "step_seconds_iqr_ratio",
}


def with_current_names(row: Row) -> Row:
    """Return a row of schema version 1 with the columns' current names."""
    return {RENAMED_COLUMNS.get(name, name): value for name, value in row.items()}
