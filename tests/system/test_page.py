"""The page report.html in a real browser: what it shows, what a reader can do with it, and that it fetches nothing."""

import importlib.resources
import json
import re
import shutil
import time
import xml.etree.ElementTree as ElementTree
from base64 import b64encode
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from harness.records.schema import Record
from harness.records.store import read_all
from harness.report import html
from harness.report.charts import style
from harness.report.document import Section, charts
from harness.report.files import FOLDER, FORMATS, export, write_files
from harness.report.overview import build_explorer
from harness.report.sections import sections
from harness.report.view import View, view_of
from tests.support import pages
from tests.support.pages import HOSTILE, NO_NUMBERS, NUMBERS

DRAWN = "[data-chart='{}'] svg"

POINTS = "[aria-roledescription='point']"

BARS = "[aria-roledescription='bar']"

DARK_TEXT = style.config(dark=True)["axis"]["labelColor"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with pages.browser() as started:
        yield started


SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="10"><rect width="20" height="10"/></svg>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the pages that tests open by the names of their files."""
    folder = tmp_path_factory.mktemp("pages")
    every = ("every kind", pages.every_kind(), pages.drawn(pages.measured()), pages.library())
    written = {
        "every": html.page(*every),
        "fallback": html.page(*every, svgs={"bars": SVG}),
        "hostile": html.page(HOSTILE[0], *pages.hostile(), pages.library()),
        "tables": html.page("tables", pages.every_kind(pictures=False), None, ""),
        "plain": html.page("plain", [Section("Only words", [])], None, pages.library()),
    }
    for name, text in written.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


Opened = Callable[..., Page]

POLICY = "addEventListener('securitypolicyviolation', (e) => console.error('policy', e.violatedDirective))"


@pytest.fixture
def opened(browser: Browser, folder: Path) -> Iterator[Opened]:
    """Return a function that opens pages of the folder; afterwards nothing was fetched and the console is empty."""
    requests: list[str] = []
    messages: list[str] = []

    def open_page(name: str, width: int = 1400, fragment: str = "", **context: Any) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, **context)
        page.set_default_timeout(20000)
        page.on("request", lambda request: requests.append(request.url.split("#")[0]))
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.add_init_script(POLICY)
        page.goto((folder / f"{name}.html").as_uri() + fragment)
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    files = {path.as_uri() for path in folder.iterdir()}
    assert {request for request in requests if not request.startswith("data:")} <= files and messages == []


def see(page: Page, *charts: str) -> Page:
    """Scroll to these charts, or to every one, and wait until they are drawn; return the page."""
    every = [str(box.get_attribute("data-chart")) for box in page.locator("[data-chart]").all()]
    for chart in charts or every:
        page.locator(f"[data-chart='{chart}']").scroll_into_view_if_needed()
        page.locator(DRAWN.format(chart)).wait_for()
    return page


def points_of(page: Page, chart: str = "0", mark: str = POINTS) -> Locator:
    """Return the marks of a chart."""
    return page.locator(f"{DRAWN.format(chart)} {mark}")


def column(page: Page, table: str, position: int) -> list[str]:
    """Return the cells of a column in the rows that are shown, from the top."""
    script = """([table, position]) => [...document.querySelectorAll(`${table} tbody tr:not([hidden])`)]
        .map((row) => row.cells[position].textContent.trim())"""
    cells: list[str] = page.evaluate(script, [table, position])
    return cells


EVERY_FORM = "#numbers table"


def test_sorting_orders_numbers_and_returns(opened: Opened) -> None:
    page = opened("tables")
    table, sorted_heads = page.locator(EVERY_FORM), page.locator(f"{EVERY_FORM} [aria-sort]")
    button = table.get_by_role("button", name="value")
    for key, is_descending, order in (("Enter", False, "ascending"), ("Space", True, "descending")):
        button.press(key)
        ordered = sorted(NUMBERS, key=NUMBERS.__getitem__, reverse=is_descending)  # equal ones keep the table's order
        assert column(page, EVERY_FORM, 1) == [*ordered, *reversed(NO_NUMBERS)]
        expect(table.locator("thead th").nth(1)).to_have_attribute("aria-sort", order)
    original = [f"row {i}" for i in range(len(NUMBERS) + len(NO_NUMBERS))]
    for clicked, count in (([button], 0), ([button, table.get_by_role("button", name="cell")], 1)):
        for head in clicked:
            head.click()
        assert column(page, EVERY_FORM, 0) == original, "row 10 comes after row 2"
        expect(sorted_heads).to_have_count(count)
    expect(page.locator("#failures thead button")).to_have_count(1)  # a column without a title has none
    page.locator("#comparison").get_by_role("button", name="tok/s").click()
    assert column(page, "#comparison table", 2)[-1] == "130◆ best", "the best sorts as its number"
    expect(page.locator("#comparison td").get_by_title("best")).to_be_visible()


def test_filter_counts_the_remaining_rows(opened: Opened) -> None:
    page = opened("tables")
    search, counted = page.get_by_label("Filter rows in Comparison"), page.locator("#comparison .count").first
    expect(page.get_by_role("searchbox")).to_have_count(2)  # a table of few rows has none
    search.fill("ZERO full")
    assert column(page, "#comparison table", 0) == ["zero1 full", "zero2 full", "zero3 full"]
    for count in (counted, page.get_by_role("status")):
        expect(count).to_have_text("3 of 14 rows")
    expect(page.get_by_role("status")).to_have_attribute("aria-live", "polite")
    page.get_by_label("zero2", exact=True).uncheck()
    assert column(page, "#comparison table", 0) == ["zero1 full", "zero3 full"]
    search.fill("")
    expect(counted).to_have_text("12 of 14 rows")


def test_strategies_hide_rows_and_marks(opened: Opened) -> None:
    page = see(opened("every"), "0")
    points = points_of(page)
    expect(points).to_have_count(14)
    page.get_by_role("group", name="Strategies").get_by_label("ddp").press("Space")
    expect(points).to_have_count(12)
    assert not [label for label in column(page, "#comparison table", 0) if label.startswith("ddp")]
    expect(page.get_by_role("status")).to_have_text("6 of 7 strategies shown")
    see(page, "1")  # drawn afterwards, it leaves the same out
    expect(points_of(page, "1", BARS)).to_have_count(12)
    again = see(reopened(opened, page), "0")
    expect(points_of(again)).to_have_count(12)
    expect(again.get_by_label("ddp", exact=True)).not_to_be_checked()
    for name, count in (("None", 0), ("All", 14)):
        page.get_by_role("button", name=name).click()
        expect(points).to_have_count(count)
        assert len(column(page, "#comparison table", 0)) == count
    assert "#" not in page.url


def reopened(opened: Opened, page: Page) -> Page:
    """Return the page that the address of a page leads to."""
    return opened("every", fragment="#" + page.url.split("#")[1])


def both(x: str, y: str, above: float = float("-inf")) -> int:
    """Return how many rows of the custom chart have both figures above a number."""
    figures = [[row[name] for name in (x, y)] for row in pages.drawn(pages.measured()).rows]
    return sum(all(figure is not None and figure > above for figure in pair) for pair in figures)


def test_the_axes_of_the_custom_chart_can_be_chosen(opened: Opened) -> None:
    page = see(opened("every"), "explorer")
    form, shown = page.get_by_role("form", name="Axes"), page.locator(DRAWN.format("explorer"))
    points = points_of(page, "explorer")
    expect(points).to_have_count(both("peak", "speed"))
    expect(page.locator("#axes-caption")).to_have_text("tokens a second by peak memory, MiB")
    form.get_by_role("combobox", name="x-axis").select_option("sent")
    for title, count in (("sent, KiB", 1), ("peak memory, MiB", 0)):
        expect(shown.get_by_text(title)).to_have_count(count)
    expect(points).to_have_count(both("sent", "speed"))
    form.get_by_label("logarithmic x-axis").check()
    expect(points).to_have_count(both("sent", "speed", 0))
    form.get_by_role("combobox", name="Color").select_option("checkpointing")
    expect(shown.get_by_text("checkpointing", exact=True)).to_have_count(1)
    again = see(reopened(opened, page), "explorer")
    expect(points_of(again, "explorer")).to_have_count(both("sent", "speed", 0))
    expect(again.locator("[name='color']")).to_have_value("checkpointing")


CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const [r, g, b] = color.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const back = at.matches('svg') ? at.style.backgroundColor || getComputedStyle(at).backgroundColor
        : getComputedStyle(at).backgroundColor;
      const color = rgba(back);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const low = {};
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest('.unseen, noscript, script, style, .skip') || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const [front, back] = [element.matches('svg *') ? style.fill : style.color, behind(element)];
    const [a, b] = [light(rgba(front)), light(back)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) low[`${element.tagName} ${element.textContent.slice(0, 30)} ${front} on ${back}`] = contrast;
  }
  return low;
}"""


@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
def test_themes_are_readable_and_charts_follow(opened: Opened, scheme: str, other: str) -> None:
    page = see(opened("every", color_scheme=scheme))
    label = page.locator(f"{DRAWN.format(0)} text").first
    ink, paper = label.get_attribute("fill"), page.evaluate(PAPER)
    assert page.evaluate(CONTRASTS) == {}
    page.get_by_role("radio", name=other).check()
    expect(label).not_to_have_attribute("fill", str(ink))
    expect(page.locator("[data-chart] svg")).to_have_count(3)
    assert page.evaluate(PAPER) != paper and page.evaluate(CONTRASTS) == {}
    page.get_by_role("radio", name="auto").press("Space")
    expect(label).to_have_attribute("fill", str(ink))


PAPER = "getComputedStyle(document.body).backgroundColor"

OPEN = "document.querySelectorAll('details').forEach((details) => { details.open = true; })"

WIDTH = "document.documentElement.scrollWidth"


@pytest.mark.parametrize("name", ["every", "hostile"])
def test_no_width_overflows(opened: Opened, name: str) -> None:
    page = opened(name)
    for width in (1400, 820, 360):
        page.set_viewport_size({"width": width, "height": 900})
        see(page, "0")
        page.evaluate(OPEN)
        assert page.evaluate(WIDTH) <= width
    box = page.locator(".scroll").first
    left = "(box) => box.querySelector('tbody th').getBoundingClientRect().left - box.getBoundingClientRect().left"
    box.evaluate("(box) => { box.scrollLeft = 300; }")
    assert abs(box.evaluate(left)) < 1, "the first column stays"
    assert name == "every" or box.get_attribute("tabindex") == "0"


def test_hostile_text_stays_text(opened: Opened, folder: Path) -> None:
    source = (folder / "hostile.html").read_text(encoding="utf-8")
    data = source.split('id="data">', 1)[1].split("</script>", 1)[0]
    assert "<" not in data and json.loads(data)["charts"], "data cannot end a script element"
    assert source.count("<script") == source.count("</script>") == 3
    page = see(opened("hostile"))
    shown = [re.sub(r"[\x00\x07\x1b\u202e]", "\ufffd", " ".join(text.split())) for text in HOSTILE]
    assert page.title() == HOSTILE[0] and page.locator("main h2").all_inner_texts() == [*shown, "Custom chart"]
    assert page.locator("main img, main a, main script, section section").count() == 0
    points_of(page).first.hover()
    expect(page.locator("#vg-tooltip-element")).to_be_visible()
    page.locator(".filter input[type='checkbox']").first.uncheck()
    expect(points_of(page)).to_have_count(2 * len(HOSTILE) - 2)
    assert page.evaluate("window.harmed") is None


def test_print_shows_charts_in_light_colors_but_no_controls(opened: Opened, tmp_path: Path) -> None:
    """The event beforeprint gives no time to wait, so that a chart that is not drawn at once is missing on paper."""
    page = opened("every", color_scheme="dark")
    page.wait_for_load_state()
    page.evaluate(
        "addEventListener('afterprint', () => { window.drawn = document.querySelectorAll('[data-chart] svg').length; })"
    )
    page.pdf(path=tmp_path / "page.pdf")
    assert page.evaluate("window.drawn") == 3, "before it was scrolled to"
    page.get_by_label("tp", exact=True).uncheck()
    page.emulate_media(media="print", color_scheme="dark")
    for chart in ("0", "1"):
        expect(page.locator(DRAWN.format(chart))).to_be_visible()
        expect(page.locator(f"{DRAWN.format(chart)} text").first).not_to_have_attribute("fill", DARK_TEXT)
    expect(page.locator(CONTROLS).filter(visible=True)).to_have_count(0)
    assert page.evaluate("getComputedStyle(document.querySelector('main th')).color") == "rgb(27, 31, 35)"
    expect(page.get_by_text("Hidden strategies: tp.")).to_be_visible()
    assert page.evaluate(CONTRASTS) == {}


CONTROLS = "input, select, form, main button:not(.head), .filter button, nav, #axes"


def test_the_page_is_readable_without_scripts(opened: Opened) -> None:
    page = opened("fallback", java_script_enabled=False)
    for part, count in (("#comparison tbody tr", 14), (".chart img", 1), (".chart .note", 1)):
        expect(page.locator(part)).to_have_count(count)
    expect(page.get_by_text("14 bars up to 90 MiB.")).to_be_visible()
    assert page.evaluate("document.querySelector('.chart img').naturalWidth") == 20
    expect(page.locator("input, select, button").filter(visible=True)).to_have_count(0)
    page.get_by_text("Exact values of Peak memory").click()
    expect(page.get_by_role("table", name="Exact values: Peak memory")).to_be_visible()


ROLES = "button|checkbox|radio|combobox|searchbox|link|img|table|figure|form"

STRUCTURE = """() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  return {
    levels: all('h1, h2, h3').map((h) => Number(h.tagName[1])),
    ids: all('[id]').map((element) => element.id),
    targets: all('a[href^="#"]').map((a) => a.hash.slice(1)),
    captions: all('main table').every((t) => t.caption.textContent.trim()),
    scopes: all('main th').every((th) => th.scope),
    language: document.documentElement.lang,
  };
}"""


def test_screen_readers_get_names_and_descriptions(opened: Opened) -> None:
    page = see(opened("every"))
    tree, found = page.locator("body").aria_snapshot(), page.evaluate(STRUCTURE)
    assert all(f"- {mark}" in tree for mark in ("banner", "navigation", "main", "contentinfo")), tree
    assert re.findall(rf"- (?:{ROLES})(?::|$| \[)", tree, re.MULTILINE) == [], "all have names"
    assert re.findall(r'- img "(.*?)"', tree)[:2] == ["Speed against memory", "Peak memory"]
    assert found["levels"][0] == 1 and all(after - before <= 1 for before, after in pairwise(found["levels"]))
    assert len(found["ids"]) == len(set(found["ids"]))
    assert {"comparison", "numbers", "numbers-2", "axes"} <= set(found["targets"]) <= set(found["ids"])
    assert found["captions"] and found["scopes"] and found["language"] == "en"
    for key, focused in (
        ("Tab", page.get_by_role("link", name="Skip to the report")),
        ("Enter", page.get_by_role("main")),
    ):
        page.keyboard.press(key)
        expect(focused).to_be_focused()


EMPTY = """() => [...document.querySelectorAll('h1, h2, h3, h4, th, a, summary, caption, figcaption, button, option')]
    .filter((element) => !element.textContent.trim() && !element.closest('[hidden]'))
    .map((element) => element.outerHTML)"""

BOTTOM = """() => {
  const parts = document.querySelectorAll('.first > p, .first > ul, .first > figure .chart');
  return Math.max(...[...parts].map((part) => part.getBoundingClientRect().bottom + scrollY));
}"""


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    """Return the folder of a report that the harness wrote, whose page is `report` among those of the tests."""
    target = folder.parent / "report"
    target.mkdir(exist_ok=True)
    compared = pages.compared()
    report = sections(compared)
    write_files(target, compared, report)
    export(target / FOLDER, compared, list(charts(report)), FORMATS, 84.0, "median")
    shutil.copy(target / "report.html", folder / "report.html")
    return target


def own_font() -> str:
    """Return a style that gives every text the font Lato of mkdocs, since those of machines differ in width."""
    file = importlib.resources.files("mkdocs") / "themes" / "readthedocs" / "css" / "fonts" / "lato-normal.woff2"
    source = f"url(data:font/woff2;base64,{b64encode(file.read_bytes()).decode()})"
    return f"@font-face {{ font-family: Lato; src: {source}; }} * {{ font-family: Lato !important; }}"


@pytest.mark.parametrize(("width", "height", "screens"), [(1400, 900, 1), (900, 1200, 1), (390, 844, 2)])
def test_the_first_screen_has_the_answers_and_the_picture(
    opened: Opened, written: Path, width: int, height: int, screens: int
) -> None:
    page = opened("report", width, bypass_csp=True)
    page.set_viewport_size({"width": width, "height": height})
    page.add_style_tag(content=own_font())
    assert page.evaluate("document.fonts.load('16px Lato').then((faces) => faces.length)") == 1
    see(page, "0")
    heading = page.get_by_role("heading", level=1).inner_text()
    assert heading == "Nine strategies for tiny (1.0 M parameters) on 1 and 2 CPU ranks, 2 January 2026"
    assert page.title() == f"{heading} · compared"
    assert (
        page.locator("main p:visible")
        .first.inner_text()
        .startswith("For tiny (1.0 M parameters) on 2 CPU ranks, take ddp")
    )
    expect(page.locator("#comparison thead").first.get_by_title("The bytes that one rank must send")).to_have_count(1)
    text = page.locator(".first").inner_text()
    assert all(lead in text for lead in ("Fastest", "Cost", "Why", "How sure")), text
    assert page.evaluate(BOTTOM) <= screens * height and page.evaluate(WIDTH) <= width
    assert page.evaluate(EMPTY) == []


OVERLAPS = """() => [...document.querySelectorAll("[data-chart] svg")].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll("[aria-roledescription='text mark']")]
    .filter((text) => text.textContent.trim()).map((text) => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([name, a], place) => boxes.slice(place + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1)
    .filter(([, b]) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)
    .map(([other]) => `${name} / ${other}`));
})"""


def test_labels_in_charts_do_not_overlap_and_axe_finds_nothing(opened: Opened, written: Path) -> None:
    """The browser runs axe-core outside the page's policy, which allows no scripts but the page's own."""
    axe = pytest.importorskip("axe_playwright_python", reason="install the extra dev for axe-core")
    page = see(opened("report"), "0")
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations.map((v) => [v.id, v.nodes.map((n) => n.html)])")
    assert found == []
    page.evaluate(OPEN)
    see(page)
    assert page.locator("[data-chart] svg [aria-roledescription='text mark']").count() > 20
    assert page.evaluate(OVERLAPS) == []


def test_static_charts_and_few_pages_without_scripts(opened: Opened, written: Path, tmp_path: Path) -> None:
    page = opened("report", java_script_enabled=False)
    charts = page.locator(".chart:not([data-chart=explorer])")
    assert charts.count() == page.locator(".chart img").count() >= 6
    assert page.evaluate("[...document.querySelectorAll('.chart img')].every((image) => image.naturalWidth > 300)")
    assert page.evaluate(EMPTY) == []
    page = opened("report")
    page.pdf(path=tmp_path / "page.pdf", prefer_css_page_size=True)
    assert 1 < len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes())) <= 6
    expect(page.locator("details.folded[open]")).to_have_count(0)


def test_front_and_captions_follow_what_is_visible(opened: Opened, written: Path) -> None:
    """The faults were a front over the drawn rows only, and captions that named what is hidden."""
    page = opened("report")
    figure = page.locator("figure", has=page.locator("figcaption", has_text=re.compile("^Peak memory and speed$")))
    figure.scroll_into_view_if_needed()
    caption, line = figure.locator(".description"), figure.locator("[aria-roledescription='line mark']")
    four = re.compile("^([ML][^ML]+){4}$")  # corners
    expect(line).to_have_attribute("d", four)  # tp, pp_1f1b, zero1 and ddp
    expect(caption).to_contain_text("ddp")
    for strategy in ("zero1", "pp_1f1b"):
        page.get_by_label(strategy, exact=True).uncheck()
    expect(caption).to_contain_text("The line joins tp, fsdp_full_shard, fsdp_shard_grad_op, ddp.")
    expect(caption).not_to_contain_text("pp_1f1b")
    expect(line).to_have_attribute("d", four)
    assert "zero2" not in page.locator("#comparison td:has(.mark)").all_inner_texts()
    expect(page.locator("#comparison tr[data-strategy=zero2] s").first).to_have_text(re.compile("^90,000"))


COLORS = """async (content) => {
  const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
  context.drawImage(image, 0, 0);
  return new Set(new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer)).size;
}"""


def test_a_figure_opens_its_arithmetic(opened: Opened, folder: Path, tmp_path: Path) -> None:
    """The fault was that columns without a derivation were not counted, so that figures opened those of others."""
    recorded = Path(__file__).parents[1] / "data" / "schema_1" / "all"
    read = view_of((recorded, read_all(recorded)))
    write_files(tmp_path, read, sections(read))
    shutil.copy(tmp_path / "report.html", folder / "derived.html")
    page = opened("derived")
    script = "document.querySelector('#comparison table').dataset.keys.split(',').indexOf('peak_allocated_bytes')"
    cell = page.locator("#comparison tr[data-strategy=pp_1f1b]").locator("th, td").nth(page.evaluate(script))
    cell.get_by_role("button").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading")).to_contain_text("peak")
    terms = [float(text.replace(",", "")) for text in dialog.locator("td.number").all_inner_texts()]
    assert len(terms) > 3
    assert sum(terms) / 2**20 == pytest.approx(float(re.findall(r"[\d.]+", cell.inner_text())[0]), abs=0.01)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_what_is_saved_opens(opened: Opened, written: Path, tmp_path: Path) -> None:
    page = see(opened("report"), "0")
    saved = {}
    for name, within in {"CSV": "#comparison", "LaTeX": "#comparison", "SVG": ".first", "PNG": ".first"}.items():
        with page.expect_download() as download:
            page.locator(within).get_by_role("button", name=re.compile(f"^{name} of ")).first.click()
        download.value.save_as(tmp_path / name)
        saved[name] = (tmp_path / name).read_bytes()
    table, heads = pd.read_csv(tmp_path / "CSV"), page.locator("#comparison thead").first.locator("th:visible")
    assert len(table) == 9 and table.columns[0] == "strategy"
    shown, button = (
        heads.count(),
        page.locator("#comparison").get_by_role("button", name=re.compile("[0-9]+ more columns")),
    )
    assert len(table.columns) == shown + int(button.inner_text().split()[0]) > shown, "all columns are saved"
    for name, count in ((re.compile("more columns"), len(table.columns)), ("Fewer columns", shown)):
        page.locator("#comparison").get_by_role("button", name=name).click()
        expect(heads).to_have_count(count)
    assert b"\\toprule" in saved["LaTeX"] and b"fsdp\\_full\\_shard" in saved["LaTeX"]
    assert ElementTree.fromstring(saved["SVG"]).tag.endswith("svg") and saved["PNG"][:4] == b"\x89PNG"
    assert page.evaluate(COLORS, b64encode(saved["PNG"]).decode()) > 10, "the picture is not empty"


def test_exported_figures_have_the_width_of_a_column(written: Path) -> None:
    exported = written / "export"
    for path in exported.glob("*.pdf"):
        (width,) = re.findall(rb"/MediaBox \[0 0 ([\d.]+)", path.read_bytes())[:1]
        assert abs(float(width) - 84 / 25.4 * 72) < 10, path
    assert {path.suffix for path in exported.iterdir()} == {".csv", ".tex", ".svg", ".png", ".pdf"}
    assert "90,000" not in (exported / "table.tex").read_text(), "a disturbed speed"


def test_a_large_report_is_quick(opened: Opened, folder: Path) -> None:
    """The limits are of processor time, of this process and of the page's main thread, as machines may be busy."""
    sections, explored = pages.large()
    library = pages.library()
    start = time.process_time()
    text = html.page("large", sections, explored, library)
    assert time.process_time() - start < 1
    (folder / "large.html").write_text(text, encoding="utf-8")
    page = opened("plain")
    assert page.locator("script").count() == 2, "no library where nothing is drawn"
    assert page.title() == "plain" and page.locator("#filter").count() == 0
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_seconds() -> float:
        metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"])

    page.goto((folder / "large.html").as_uri(), wait_until="domcontentloaded")
    assert 0 < busy_seconds() < 1
    before = busy_seconds()
    page.get_by_role("button", name="column 7").first.click()
    expect(page.locator("#comparison th[aria-sort]")).to_have_count(1)
    assert busy_seconds() - before < 1.5
    expect(page.locator("#comparison tbody tr")).to_have_count(200)


def record(strategy: str, **row: Any) -> Record:
    return Record({"run_id": strategy, "strategy": strategy, "status": "ok", "model": "tiny"} | row)


def test_numbers_of_two_rows_or_more_can_be_drawn() -> None:
    """Numbers have the unit that is shown, unknown ones are None, and a number that only one row has is no axis."""
    slow = record("ddp", tokens_per_second=100.0, peak_allocated_bytes=3 * 2**20, mfu=0.5)
    fast = record("zero1", tokens_per_second=200.0, peak_allocated_bytes=2**20, step_seconds_iqr_ratio=0.1)
    failed = record("tp", status="oom")
    undrawn = ([slow, fast, failed], [slow], [])  # speeds of one run are not drawn
    assert [build_explorer(View("undrawn", records)) for records in undrawn] == [None] * 3
    calm = {"step_seconds_iqr_ratio": 0.1}
    repeats = [
        Record(one.row | calm | {"run_id": f"{one.row['strategy']}{n}", "repeat": n}, config={"repeat": n})
        for one in (slow, fast)
        for n in range(3)
    ]
    explorer = build_explorer(View("some", [*repeats, failed]))
    assert explorer.numbers == {"tokens_per_second": "tokens per second", "peak_allocated_bytes": "peak memory, MiB"}
    assert explorer.texts == {"strategy": "strategy", "status": "status"}
    assert [row["peak_allocated_bytes"] for row in explorer.rows] == [3, 1, None]
    assert explorer.table.header == ["run", "status", "tokens per second", "peak memory, MiB"]
    assert list(explorer.table.rows[2]) == ["tp", "oom", "", ""] and explorer.table.strategies == ["ddp", "zero1", "tp"]
