"""README and documentation: links resolve, named files exist, generated pages are current, and MkDocs builds them."""

import csv
import re
import subprocess
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from harness import __version__
from harness.cli.main import main
from harness.config.hydra import compose_values
from harness.sweep.queued_run import parse_stop_after
from tests.support import reference_pages
from tests.support.processes import ROOT, run_python

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])

HOOKS = ROOT / "docs" / "mkdocs_hooks.py"

PRIVATE_WORDS = 12  # at most: everything else is said in the field's terms


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {slugify(re.sub(r"\]\([^)]*\)", "", heading), "-") for heading in headings}


def dead_targets(page: Path) -> list[str]:
    """Return the links and images of a page that have no file or heading, or the form of no address."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        is_address = re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/\S*)?", link)
        if not is_address and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert dead_targets(page) == []


@pytest.mark.parametrize("target", ["missing.md", "page.md#missing", "#missing", "http://a.org/b", "https://host"])
def test_a_dead_link_is_reported(tmp_path: Path, target: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title 1\n\n[a](#title-1) [b](page.md) [c](https://a.org/b#c) [d]({target})\n")
    assert dead_targets(page) == [target]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """Code in a page that begins with a folder of the repository is a path, or a pattern of paths."""
    if page.name == "extending.md":  # its files are those to be added
        return
    names = re.findall(r"`((?:harness|conf|sweeps|tests|docs)/[\w./*-]+)`", page.read_text())
    written = {"conf/strategy/NAME.yaml", "sweeps/NAME.yaml"}
    assert [name for name in names if name not in written and not list(ROOT.glob(name.rstrip("/")))] == []


@pytest.mark.parametrize("page", reference_pages.pages().items(), ids=lambda item: item[0].name)
def test_generated_pages_are_current(page: tuple[Path, str]) -> None:
    path, text = page
    assert path.read_text() == text, "run python -m tests.support.reference_pages"


def test_every_key_and_column_has_a_meaning_in_a_sentence() -> None:
    """A meaning is a sentence or a noun phrase: it begins with a capital letter and ends with a period."""
    meanings = []
    for path, text in reference_pages.pages().items():
        if path.parent.name != "reference":
            continue
        for row in re.findall(r"^\| `\w[\w.]*` \| (.+) \|$", text, re.MULTILINE):
            cells = row.split(" | ")
            meanings.append(cells[0] if path.name == "strategies.md" else cells[-1])
    assert len(meanings) > 200
    assert [meaning for meaning in meanings if not re.fullmatch(r"[A-Z0-9].*\.", meaning)] == []


def test_the_readme_is_short_and_has_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    install = "python3 -m venv .venv && DS_ACCELERATOR=cpu .venv/bin/pip install -q -e"
    assert re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL) == [
        f"{install} '.[deepspeed]' && .venv/bin/python -m harness sweeps=quickstart",
        f"{install} '.[dev]' && .venv/bin/python -m pytest",
    ]


def test_the_readme_shows_figures_of_the_published_report() -> None:
    """Every row of its table is a row of the committed report."""
    report = (ROOT / "results" / "published" / "quickstart" / "report.md").read_text()
    rows = re.findall(r"^\| \w+ \| \d \| .+ \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 9
    assert [row for row in rows if row not in report.splitlines()] == []


def test_the_readme_shows_the_answer_of_a_published_plan() -> None:
    """Its first block of text has the first sentences of the committed search that its command repeats."""
    readme = (ROOT / "README.md").read_text()
    (answer,) = re.findall(r"```text\n(.*?)\n```", readme, re.DOTALL)
    report = (ROOT / "results" / "published" / "plans" / "7b_on_8_h100" / "report.md").read_text()
    assert answer.replace("\n", "\n\n") in report
    (command,) = re.findall(r"`harness plan (model=7b .*?)`", readme)
    assert set(command.split()) < set(re.findall(r"Measure it: harness (.*)", report)[0].split())


def test_the_sweep_file_of_the_guide_is_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner reads the file as a run would, with the guide's number of combinations, and its time is a limit."""
    guide = (ROOT / "docs" / "guides" / "sweeps.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "my_layouts.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert parse_stop_after(compose_values("sweeps=my_layouts")["stop_after"]).limits == {"s": 8 * 3600}
    assert main(["plan", "format=csv", "sweeps=my_layouts", "cluster=8xh100", "world_size=8"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert f"here {len(rows)} configurations" in guide
    assert {(row["model"], row["micro_batch"], row["global_batch"], row["seq_len"]) for row in rows} == {
        ("1b", "2", "64", "2048")
    }


def test_every_message_of_the_troubleshooting_is_printed() -> None:
    """The parts of a message between its values stand in the harness's sources."""
    sources = "\n".join(
        path.read_text() for path in (ROOT / "harness").rglob("*") if path.suffix in (".py", ".toml", ".j2")
    )
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    messages = [
        span for cell in re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE) for span in re.findall(r"`([^`]+)`", cell)
    ]
    parts = {part.strip() for message in messages for part in message.split("…") if len(part.strip()) > 4}
    assert len(parts) > 30
    assert sorted(part for part in parts if part not in sources) == []


def test_the_newest_release_is_the_version() -> None:
    releases = re.findall(r"^## (\d\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert releases[0] == cited == __version__


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))


def test_private_words_are_few() -> None:
    text = (ROOT / "docs" / "development" / "glossary.md").read_text()
    assert 0 < len(re.findall(r"^\| (?!word|---)", text, re.MULTILINE)) <= PRIVATE_WORDS


def build_site(settings: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build a site strictly: a warning fails, which it does not with --quiet, since MkDocs then counts none."""
    options = ("--strict", "--config-file", str(settings), "--site-dir", str(site))
    return run_python(ROOT, "-m", "mkdocs", "build", *options)


def dead_links(site: Path) -> list[str]:
    """Return the links and images of a built site's pages that lead to no file of it."""
    dead = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links begin at the site's address
            continue
        for target in re.findall(r'(?:href|src)="([^"#?]+)[^"]*"', page.read_text()):
            path = page.parent / target
            if not re.match(r"[a-z]+:", target) and not (path / "index.html" if path.is_dir() else path).exists():
                dead.append(f"{page.relative_to(site)}: {target}")
    return dead


def test_mkdocs_builds_without_a_warning(tmp_path: Path) -> None:
    """Files of the repository that pages link to are in the site, and so is what these link to."""
    done = build_site(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert dead_links(tmp_path) == []
    linked = tmp_path / "repository" / "results" / "published" / "plans" / "7b_on_8_h100"
    assert {"report", "figures"} <= {path.name for path in linked.iterdir()}
    page = (tmp_path / "which-layout" / "index.html").read_text()
    assert 'href="../repository/results/published/plans/7b_on_8_h100/report/"' in page


@pytest.mark.parametrize("target", ["missing.md", "../results/missing.csv", "index.md#missing"])
def test_a_dead_link_fails_the_build(tmp_path: Path, target: str) -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    settings = re.sub(r"^nav:\n(?: .*\n)+", "", settings, flags=re.MULTILINE)
    settings = settings.replace("- docs/mkdocs_hooks.py", f"- {HOOKS}")
    (tmp_path / "mkdocs.yml").write_text(settings)
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "there.csv").write_text("a,b\n")
    page, living = tmp_path / "docs" / "index.md", "# Title\n\n[here](#title) and [there](../results/there.csv)\n"
    page.write_text(living)
    done = build_site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0 and (tmp_path / "site" / "repository" / "results" / "there.csv").exists(), done.stderr
    page.write_text(f"{living}\n[nowhere]({target})\n")
    done = build_site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1 and f"link '{target}'" in done.stderr, done.stderr
