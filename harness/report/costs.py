"""The report's section on what a run costs beside its steps."""

from harness.records.schema import COLUMNS
from harness.report.columns import from_lines, line_table
from harness.report.document import Paragraph, Section, section
from harness.report.lines import column_values
from harness.report.text import sentence
from harness.report.view import View

# The columns in seconds: those of a run's start, in their order, and those of its checkpoint.
_SECONDS = (
    *("start_up_import_seconds", "start_up_join_seconds", "start_up_build_seconds"),
    *("first_step_seconds", "compile_seconds", "save_seconds", "save_total_seconds", "load_seconds"),
)


def costs(view: View) -> list[Section]:
    """Return the section with a row per run: its start, its checkpoint and its price; none for old rows."""
    lines = view.median_runs
    columns = [from_lines(lines, name, f"{COLUMNS[name].title} s", "number") for name in _SECONDS]
    columns += [
        from_lines(lines, "checkpoint_rank_bytes", f"{COLUMNS['checkpoint_rank_bytes'].title} {{unit}}"),
        from_lines(lines, "checkpoint_bytes", f"{COLUMNS['checkpoint_bytes'].title} {{unit}}"),
        from_lines(lines, "save_file_system", kind="text"),
        from_lines(lines, "cost_per_billion_tokens", kind="number", is_timed=True),
    ]
    names = (*_SECONDS, "cost_per_billion_tokens", "save", "joules_per_token")
    known = {name for name in names if any(column_values(lines, name))}
    table = line_table(lines, columns)
    note = Paragraph(sentence("costs_note", known=known))
    return section("What a run costs beside its steps", table, note) if table else []
