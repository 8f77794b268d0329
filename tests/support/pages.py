"""Pages for tests, with every kind of part, hostile strings or many rows, and a browser to open them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import pytest
import vl_convert
from playwright.sync_api import Browser, sync_playwright

from harness.report.document import Best, BulletList, Chart, Paragraph, Section, Table
from harness.report.overview import ExplorerData
from harness.report.view import View
from tests.support import packages
from tests.support.example_records import record, thrice

# Chromium's own network requests are switched off, so that every request that a test sees is the page's.
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp_full_shard", "tp")

LONG = "x" * 5000

HOSTILE = (
    "</script><script>window.harmed = 1</script>",
    "<img src=x onerror='window.harmed = 1'>",
    "{{ 7 * 7 }}{% raw %}",
    "\"quotes\" 'and' `ticks` & &amp; \\",
    "<!--<script>",
    "\u202egnorw si siht \u05e9\u05dc\u05d5\u05dd",
    "bell \x07 null \x00 line\nbreak \x1b[31m",
    "https://example.org/ @mention",
    LONG,
)

# Cells as the report writes them, with the numbers by which they are in order.
NUMBERS = {
    "1,234.5": 1234.5,
    "<0.01": 0.0099,
    "0.83~": 0.83,
    "12 (3)": 12.0,
    "1.2e-7": 1.2e-7,
    "12 %": 12.0,
    "0": 0.0,
    "-3": -3.0,
    "0.01": 0.01,
    "0.83": 0.83,
    "99": 99.0,
    "100": 100.0,
}

NO_NUMBERS = ("", "n/a")


@cache
def library() -> str:
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def chart(rows: Sequence[dict[str, Any]], mark: str = "point") -> dict[str, Any]:
    """Return a chart like those of the report, with the parameter `hidden` by which the page hides strategies."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "usermeta": {"fluid": True},
        "height": 220,
        "data": {"values": list(rows)},
        "params": [{"name": "hidden", "value": []}],
        "transform": [{"filter": "indexof(hidden, datum.strategy) < 0"}],
        "mark": {"type": mark, "tooltip": True},
        "encoding": {
            "x": {"field": "peak", "type": "quantitative", "title": "peak memory, MiB"},
            "y": {"field": "speed" if mark == "point" else "strategy", "title": "tokens a second"},
            "color": {"field": "strategy", "type": "nominal", "title": "strategy"},
        },
    }


def measured(strategies: Sequence[str] = STRATEGIES) -> list[dict[str, Any]]:
    return [
        {"label": f"{name} {kind}", "strategy": name, "checkpointing": kind, "peak": 90.0 - i, "speed": 10.0 * i}
        for i, (name, kind) in enumerate(product(strategies, ("none", "full")))
    ]


def values(rows: Sequence[dict[str, Any]]) -> Table:
    cells = [[row["label"], f"{row['peak']:.1f}", f"{row['speed']:.0f}"] for row in rows]
    best = max(range(len(rows)), key=lambda i: rows[i]["speed"])
    cells[best][2] = Best(cells[best][2])
    return Table(["run", "peak MiB", "tok/s"], cells, strategies=[row["strategy"] for row in rows])


def drawn(rows: Sequence[dict[str, Any]]) -> ExplorerData:
    """Return rows for the explorer, of which some lack a value and one is zero, which no logarithmic axis shows."""
    known = [row | {"sent": None if i % 3 == 0 else float(i - 1), "status": "ok"} for i, row in enumerate(rows)]
    numbers = {"speed": "tokens a second", "peak": "peak memory, MiB", "sent": "sent, KiB"}
    return ExplorerData(known, {"strategy": "strategy", "checkpointing": "checkpointing"}, numbers, values(rows))


def every_kind(pictures: bool = True) -> list[Section]:
    rows = measured()
    points = Chart("frontier", "Speed against memory", "14 runs between 77 and 90 MiB.", chart(rows), values(rows))
    bars = Chart("bars", "Peak memory", "14 bars up to 90 MiB.", chart(rows, "bar"), values(rows))
    cells = [[f"row {i}", text] for i, text in enumerate((*NO_NUMBERS, *NUMBERS))]
    return [
        Section("Comparison", [values(rows), Paragraph("× is the value over that of ddp.")]),
        Section(
            "Charts",
            [points, bars] if pictures else [],
            [
                Section("Numbers", [Table(["cell", "value"], cells, caption="Every form")]),
                Section("Numbers", [Paragraph("Twice one title.")]),
            ],
        ),
        Section(
            "Failures",
            [
                BulletList([("zero3 full", "out of memory"), ("", "no name")]),
                Table(["", "value"], [["torch", "2.11"], ["numpy", "2.3"]], 2),
            ],
        ),
    ]


def hostile() -> tuple[list[Section], ExplorerData]:
    rows = [row | {"label": text} for row, text in zip(measured(HOSTILE), HOSTILE * 2, strict=True)]
    table = Table(["run", LONG, *HOSTILE], [[text, text, *HOSTILE] for text in HOSTILE], 2, LONG, HOSTILE)
    sections = [
        Section(
            text,
            [Paragraph(text), BulletList([(text, text)]), table, Chart("chart", text, text, chart(rows), values(rows))],
        )
        for text in HOSTILE
    ]
    words = {"strategy": HOSTILE[0], "label": HOSTILE[1]}
    return sections, ExplorerData(rows, words, {"speed": HOSTILE[0], "peak": HOSTILE[2]}, values(rows))


def large() -> tuple[list[Section], ExplorerData]:
    """Return a page of 200 rows with 25 columns, and 10 charts of these rows."""
    rows = measured([f"strategy{i}" for i in range(100)])
    header = ["run", "strategy", *(f"column {i}" for i in range(23))]
    cells = [[row["label"], row["strategy"], *(f"{i * j % 997:,.1f}" for j in range(23))] for i, row in enumerate(rows)]
    table = Table(header, cells, 2, strategies=[row["strategy"] for row in rows])
    some = rows[:40]
    pictures = [Chart(f"chart{i}", f"Chart {i}", "Forty points.", chart(some), values(some)) for i in range(10)]
    return [Section("Comparison", [table]), Section("Charts", pictures)], drawn(rows)


def compared() -> View:
    """Return nine configurations of three repeats each, as a CPU records them; those of one were disturbed."""
    runs = [
        record(
            *(number, strategy, mebibytes / 1024, speed),
            world_size=ranks,
            measured_on="cpu",
            communication_bytes=number * 2**20,
            noise_warning="busy" if strategy == "zero2" else None,
        )
        for number, (strategy, ranks, mebibytes, speed) in enumerate(COMPARED)
    ]
    return View("compared", thrice(runs, 0.02))


# Strategy, ranks, peak in MiB and tokens per second: ddp leads, zero3 is on no front, and zero2 is disturbed.
COMPARED = (
    ("single", 1, 23.8, 9700.0),
    ("ddp", 2, 23.7, 26000.0),
    ("zero1", 2, 22.5, 18300.0),
    ("zero2", 2, 22.3, 90000.0),
    ("zero3", 2, 23.2, 4900.0),
    ("fsdp_full_shard", 2, 19.6, 8200.0),
    ("fsdp_shard_grad_op", 2, 21.2, 10700.0),
    ("tp", 2, 14.8, 5500.0),
    ("pp_1f1b", 2, 19.3, 12800.0),
)


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield Debian's Chromium, or skip the test with the reason why it is missing."""
    if why := packages.install("Chromium", ["chromium"], ["chromium"]):
        pytest.skip(why)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=packages.find_program("chromium"), args=list(ARGUMENTS))
        try:
            yield started
        finally:
            started.close()
