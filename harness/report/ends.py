"""The report's last sections: what failed and why, what was disturbed, what made the rows, what could not be read."""

from collections.abc import Mapping, Sequence

from harness.records import Record
from harness.report import comparison as c
from harness.report.document import Bullets, Grid, Prose, Section, section
from harness.report.overview import made_by_versions
from harness.report.view import View


def failures(view: View) -> list[Section]:
    columns = (c.values(view.table, name) for name in ("label", "status", "reason"))
    failed = [row for row in zip(*columns, strict=True) if row[1] != "ok"]
    told = [(label, f"{end}: {why or 'no reason recorded'}") for label, end, why in failed]
    return section("Failures", Bullets(told) if told else None)


def disturbed(view: View) -> list[Section]:
    return section("Disturbed runs", _by_cause(c.labels_by(view.table, "disturbed")))


def stale(view: View) -> list[Section]:
    found = _by_cause(c.stale_rows(view.table))
    words = "Made by other versions than are installed here; run them again before comparing."
    return section("Stale rows", Prose(words), found) if found else []


def _by_cause(found: Mapping[str, Sequence[str]]) -> Bullets | None:
    return Bullets([(", ".join(labels), what) for what, labels in found.items()]) if found else None


def versions(view: View) -> list[Section]:
    rows = [
        [key, ", ".join(found)] for key, found in (made_by_versions(view.records) | _environment(view.records)).items()
    ]
    return section("Versions and environment", Grid(["", "value"], rows, names=2)) if rows else []


def _environment(records: Sequence[Record]) -> dict[str, list[str]]:
    """Every value of each plain entry of the environments."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for key, value in (record.get("environment") or {}).items():
            if isinstance(value, (str, int, float)):
                found.setdefault(key, {})[str(value)] = None
    return {key: list(values) for key, values in found.items()}


def unreadable(view: View) -> list[Section]:
    return section(
        "Unreadable records", Bullets([("", problem) for problem in view.problems]) if view.problems else None
    )
