"""The reference page of all columns, generated from the registry."""

from harness.records.columns import COLUMNS, Group

GROUP_TITLES: dict[Group, str] = {
    "run": "Run",
    "model": "Model",
    "layout": "Strategy and layout",
    "batch": "Batch",
    "options": "Options",
    "outcome": "Outcome of runs that did not end ok",
    "training": "Training",
    "time": "Time",
    "throughput": "Throughput",
    "memory": "Memory",
    "bytes": "Communication",
}

_AT_PEAK = """
`at_peak_*_bytes` and `peak_phase` name what filled the memory of the fullest rank at its peak, and in which phase; the
parts add up to `peak_allocated_bytes`. `parameter`, `gradient` and `optimizer` are the model's state; `gathered` are
parameters put together or cast for computing; `activation` is saved for backward; `communication` are buckets and
messages; `temporary` is the rest. On a GPU `rounding` is what the allocator adds to requests, and `unmatched` the
difference between the peaks of the timed and the profiled steps. The columns are empty where the log is incomplete.
Memory is counted in three widths: `peak_requested_bytes` is what tensors request and what a plan predicts,
`peak_allocated_bytes` adds the allocator's rounding, and `peak_active_bytes` the blocks that wait for another stream
before they can be used anew (DeepSpeed, DDP and pipelines leave some). With `backend:cudaMallocAsync` torch keeps no
history of its memory, and the columns of the peak's parts are empty.
`fragmentation_bytes` is what torch's allocator reserved beyond the peak, `non_torch_bytes` what the device uses beyond
that, and `peak_rss_bytes` the resident memory of the largest process.
"""


def columns_page() -> str:
    """Return the reference page of all columns as Markdown, docs/reference/columns.md."""
    lines = [
        "# Columns",
        "",
        "Every run is a row of `runs.csv`, whatever its end. An unknown value is empty, never zero. Memory columns",
        "are the maximum over ranks; a step takes as long as its slowest rank. `runs.parquet` has the same rows.",
        "",
        "Generated from `harness/records/columns.toml`.",
    ]
    for group, title in GROUP_TITLES.items():
        lines += ["", f"## {title}", "", "| Column | Type | Unit | Meaning |", "|---|---|---|---|"]
        lines += [f"| `{c.name}` | {c.type.__name__} | {c.unit} | {c.help} |" for c in COLUMNS if c.group == group]
    lines += ["", "## What fills the peak", "", *_AT_PEAK.strip().splitlines(), ""]
    return "\n".join(lines)
