"""The page of a plan in a real browser: every figure follows from the rows that it carries."""

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from harness.cli.main import main
from tests.support import pages
from tests.support.plan_sentences import GIB, Row, columns_of_step, label, size_text

SETTINGS = "plan.simulate=false model=7b cluster=8xh100 train.micro_batch=2"

FULL = "model=70b cluster=8xrtx4090 checkpointing=none train.global_batch=8 train.micro_batch=1"


Plan = tuple[Page, list[str]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with pages.browser() as started:
        yield started


@pytest.fixture(scope="module", params=(SETTINGS, FULL), ids=("fits", "nothing fits"))
def plan(request: pytest.FixtureRequest, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """Return the page of a search, opened, and its text; what the page fetches or complains of fails the test."""
    path, printed = tmp_path_factory.mktemp("plan") / "plan.html", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["plan", "--explain", "--report", str(path), *request.param.split()]) == 0
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "request", lambda sent: problems.append(sent.url) if not sent.url.startswith(("file:", "data:")) else None
    )
    opened.goto(path.as_uri())
    yield opened, [f"The command of this plan: harness plan {request.param}", *printed.getvalue().splitlines()]
    assert problems == []
    opened.close()


@pytest.fixture
def page(plan: Plan) -> Page:
    return plan[0]


def data_of(page: Page) -> dict[str, Any]:
    """Return the rows that the page carries."""
    data: dict[str, Any] = json.loads(page.locator("#data").text_content() or "")
    return data


def rate(row: Row) -> str:
    """Return the tokens per second of a row, worked out from its batch and its step."""
    return f"{row['global_batch'] * row['seq_len'] / row['predicted_step_seconds']:,.0f}"


def gib(row: Row) -> str:
    """Return the memory that a device must have."""
    return f"{row['device_bytes'] / GIB:.1f}"


def test_sentences_are_those_of_the_terminal_or_have_the_figures_of_the_rows(plan: Plan) -> None:
    """tests/system/test_plan_sentences.py works out those of the terminal."""
    page, printed = plan
    data = data_of(page)["rows"]
    best, (first, *_, last) = data["choices"], data["front"]
    row = (best or [first])[0]
    sequences, length = row["global_batch"], row["seq_len"]
    figures = [
        f"{row['model']}, with {row['parameters']:,} parameters, on {row['world_size']:,} devices (NVIDIA ",
        f"{sequences:,} sequences of {length:,} tokens, {sequences * length:,} in all",
        f"{len(data['front'])} layouts are each faster than all that need less memory",
        f"from {rate(last)} tokens/s in {gib(last)} GiB to {rate(first)} tokens/s in {gib(first)} GiB of a device.",
        f"cannot give back, and {size_text(row['process_bytes'])} outside",
        "This project's engines have run on one H100 and one H200, never on several GPUs at once",
    ]
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    texts = page.locator("main section > p, main section > ul > li, main details > ul > li").all_inner_texts()
    own = [text for text in texts if not {text, f"1: {text}"} & {*printed}]
    assert [figure for figure in figures if not any(figure in text for text in own)] == []
    assert [text for text in own if not any(figure in text for figure in figures)] == []


def test_the_slider_says_what_fits(page: Page) -> None:
    data = data_of(page)
    front = data["rows"]["front"]
    limit = front[0]["memory_limit_bytes"] / GIB
    slider, output = page.locator("form.memory input"), page.locator("form.memory output")
    rows = page.locator("form.memory + .table tbody tr")
    assert rows.count() == len(front)
    start, least, most = (float(slider.get_attribute(name) or 0) for name in ("value", "min", "max"))
    assert least == 1 and abs(start - limit) <= 0.5 and most * GIB >= max(row["device_bytes"] for row in front)
    for value in [start, *range(1, int(most) + 1, max(1, int(most) // 25)), start]:
        slider.evaluate("(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }", value)
        memory = limit if value == start else value
        fitting = [row for row in front if row["device_bytes"] / GIB <= memory]
        fastest = max(fitting, key=lambda row: row["tokens_per_second"], default=None)
        text = f"nothing fits; the smallest layout needs {min(row['device_bytes'] for row in front) / GIB:.1f} GiB."
        if fastest is not None:
            text = f"{len(fitting)} of {len(front)} layouts fit; the fastest of them is {label(fastest)}, with"
            text += f" {rate(fastest)} tokens/s in {gib(fastest)} GiB."
        assert output.inner_text() == f"{memory:.1f} GiB a device: {text}"
        dimmed = rows.evaluate_all("all => all.map(row => row.classList.contains('away'))")
        assert dimmed == [row["device_bytes"] / GIB > memory for row in front]


def test_the_fastest_have_the_figures_of_their_rows(page: Page) -> None:
    """tests/unit/test_plan_report.py has the front's table and chart."""
    best = data_of(page)["rows"]["choices"]
    read = "all => all.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    heads = [head.replace("\n", " ") for head in page.locator("#choices thead th").all_inner_texts()]
    cells = page.locator("#choices tbody tr").evaluate_all(read)
    for line, row in zip(cells, best, strict=True):
        parts = {f"{head} s": f"{part:.4g}" for head, part in columns_of_step(row).items()}
        expected = {
            "layout": label(row),
            "step s": f"{row['predicted_step_seconds']:.4g}",
            "tokens/s": rate(row),
            "allocated GiB": f"{row['predicted_peak_bytes'] / GIB:.1f}",
            "reserved GiB": f"{row['peak_reserved_bytes'] / GIB:.1f}",
            "fullest rank": str(row["peak_rank"]),
            "phase of its peak": row["peak_phase"],
        }
        table = dict.fromkeys(parts, "0") | dict(zip(heads, line, strict=True))
        assert table.items() >= (expected | parts).items()


def test_the_chart_has_axes_with_ticks_and_units(page: Page) -> None:
    page.wait_for_selector("[data-chart='0'] svg")
    labels = page.locator("[data-chart='0'] svg").first.text_content() or ""
    assert "memory that a device must have (GiB)" in labels and "tokens per second" in labels
    assert page.locator("[data-chart='0'] .role-axis-label text").count() >= 8
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 900})
        # A table too wide for the page gets a box of its own, by an observer that runs a little later.
        page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width, timeout=5000)
    page.set_viewport_size({"width": 1280, "height": 900})
