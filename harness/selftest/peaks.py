"""Planned, simulated and measured peaks of a first hour, side by side: `python -m harness.selftest.peaks NAME`."""

import sys

from harness.records.run_folder import comparison_folder
from harness.records.schema import Row
from harness.records.store import readable_records
from harness.report.sources import configuration_key
from harness.selftest.first_hour import RESULTS, SIMULATED

FORM = "{:8}{:20}{:12}" + 6 * "{:>12}" + "  {}"


def main(name: str) -> None:
    """Print the table of a group's runs: sizes in MiB, the status of each, and its reason if it is not ok."""
    measured, simulated = (
        {configuration_key(record): record.row for record in readable_records(comparison_folder(name, str(path)), "*")}
        for path in (RESULTS, SIMULATED)
    )
    print(FORM.format("", "", "", "planned", "simulated", "measured", "reserved", "planned", "simulated", ""))
    print(FORM.format("model", "strategy", "status", *4 * ("MiB",), *2 * ("/ measured",), "").rstrip())
    for key in simulated | measured:
        print(line(measured.get(key, {}), simulated.get(key, {})))


def line(row: Row, other: Row) -> str:
    """Return the line of a measurement and of its simulation, of which one is empty where it was not run.

    A GPU's measured peak is what tensors requested, which is what is planned and simulated.
    """
    known = row or other
    measured, simulated = (
        peak.get("peak_requested_bytes") or peak.get("peak_allocated_bytes") for peak in (row, other)
    )
    sources = known.get("predicted_peak_bytes"), simulated
    sizes = [f"{size / 2**20:,.1f}" if size else "-" for size in (*sources, measured, row.get("peak_reserved_bytes"))]
    ratios = [f"{size / measured:.4f}" if size and measured else "-" for size in sources]
    text = known.get("reason") or ""
    return FORM.format(known["model"], known["strategy"], row.get("status", "not run"), *sizes, *ratios, text).rstrip()


if __name__ == "__main__":
    main(*sys.argv[1:])
