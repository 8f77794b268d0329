"""Names that are markup, formulas, options, paths or too long: each is a run, a plan or a refusal with a row.

Whatever a name is, its run lies in its comparison's folder, nothing is written elsewhere, and reports show it as text.
"""

import csv
import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from harness.cli.main import main
from harness.config.fingerprint import readable_id
from harness.records.run_folder import ComparisonFolder, comparison_folder
from harness.records.store import read_all, write_record
from harness.report.charts import render
from harness.sweep.slurm.commands import SlurmResources, batch_script
from harness.util.text import UserError
from tests.support.commands import long, run_harness
from tests.support.example_records import records
from tests.support.processes import TINY

NAMES = {
    "HTML": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "formula": "=cmd|' /C calc'!A0",
    "Markdown": "**b** [l](http://x) `c` | d ![p](q)",
    "LaTeX": r"\input{/etc/passwd}$x$%&_#~^",
    "ANSI": "\x1b[31mred\x1b]0;title\x07",
    "NUL": "a\0b",
    "300 characters": "x" * 300,
    "300 letters of two bytes": "é" * 300,
    "parent": "..",
    "path upwards": "../../../escape",
    "absolute path": "/escape/absolute",
    "option": "-rf",
    "blanks": " a b ",
    "Slurm's pattern": "%j%A_%a",
    "lines": "a\n#SBATCH --uid=0\nb",
    "pattern": "*[a]?",
    "surrogate": "\udcff",
    "right to left": "\u202egnp.exe",
    "home": "~root",
    "empty": "",
}

REFUSED = ("train.global_batch=4", "train.micro_batch=3", "world_size=2", *TINY)

SLURM = ("hydra/launcher=slurm", "hydra.launcher.submit=false", "cluster.device=cpu")


def quoted(name: str) -> str:
    """Return a name as Hydra reads it on a command line."""
    return "'{}'".format(name.replace("'", "\\'"))


def setting(key: str, *names: str) -> str:
    return f"{key}={','.join(map(quoted, names))}"


def without_surrogates(names: Iterable[str]) -> set[str]:
    """Return names as a file has them."""
    return {name.encode(errors="replace").decode() for name in names}


def outside(folder: Path, comparison: Path) -> list[Path]:
    """Return the files in a folder that do not lie in this comparison."""
    return [path for path in folder.rglob("*") if path.is_file() and comparison not in path.parents]


def test_an_identifier_is_safe_short_and_unique() -> None:
    names = [*NAMES.values(), "tiny", "llama-3.1_8B+"]
    identifiers = [
        readable_id(*(*"ab"[:place], name, *"ab"[place:]), key="0" * 10) for place in range(3) for name in names
    ]
    assert all(re.fullmatch(r"[\w+][\w.+-]*-0{10}", text) and len(text.encode()) <= 171 for text in identifiers)
    assert readable_id("ddp", "none", "llama-3.1_8B+", "w2", key="0" * 10) == "ddp-none-llama-3.1_8B+-w2-0000000000"
    assert all(ComparisonFolder(Path("r")).run(text).path.parent == Path("r") for text in identifiers)
    for text in ("..", ".", "", "a/b", "/a", "a\0", "a\n", 5, None):
        with pytest.raises(UserError, match="cannot name the folder of a run"):
            ComparisonFolder(Path("r")).run(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("groups", "settings"),
    [
        long(("strategy", "checkpointing", "cluster"), ()),
        (("strategy", "cluster"), ()),
        (("strategy", "cluster"), SLURM),
    ],
    ids=["invalid", "refused", "Slurm"],
)
def test_every_name_has_a_row_or_a_job(tmp_path: Path, groups: Sequence[str], settings: Sequence[str]) -> None:
    """Models of these names, and the groups that are named as they: one row or one job for each."""
    results = tmp_path / "a" / "b" / "c" / "results"
    same = [f"{group}.name=${{model.name}}" for group in groups]
    done = run_harness(results, "-m", "name=s", *REFUSED, *settings, setting("model.name", *NAMES.values()), *same)
    assert done.returncode in (0, 1) and "\x1b" not in done.stdout + done.stderr
    comparison = results / "s"
    assert outside(tmp_path, comparison) == [] and not Path("/escape").exists()
    loaded, jobs = read_all(comparison), list((comparison / ".jobs").glob("*.json"))
    assert loaded.problems == [] and {record.status for record in loaded.records} <= {"refused"}
    assert {path.parent.parent for path in comparison.rglob("record.json")} <= {comparison}
    assert (len(loaded.records), len(jobs)) == ((0, len(NAMES)) if settings else (len(NAMES), 0))
    names = [record.row["model"] for record in loaded.records]
    names += [json.loads(path.read_text())["values"]["model"]["name"] for path in jobs]
    assert without_surrogates(names) | {"", "llama"} == without_surrogates(NAMES.values()) | {"llama"}


def test_a_comparison_has_a_plain_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in {*NAMES.values()}:
        assert main([setting("name", name), f"results_dir={tmp_path / 'results'}"]) == 2
        error = capsys.readouterr().err
        assert "cannot name a folder of results" in error and error.count("\n") == 1 and "\x1b" not in error
    assert list(tmp_path.iterdir()) == []


def directive_words(script: str) -> Iterator[str]:
    """Yield the options of a batch script as sbatch reads them."""
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            yield from shlex.split(line.removeprefix("#SBATCH "))


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_results_lie_in_any_folder_whose_name_is_printable(tmp_path: Path, name: str) -> None:
    results = f"{tmp_path}/inside/{name.strip('/.')}"
    if not name.isprintable():
        with pytest.raises(UserError, match=r"(?s)results_dir=.*has a character that cannot be printed"):
            comparison_folder("s", results)
        return
    folder = comparison_folder("s", results)
    assert str(folder.path) == str(Path(results) / "s")
    if "\\" in results:
        with pytest.raises(UserError, match="choose a folder without a backslash in its path"):
            batch_script("#SBATCH --nodes=1", SlurmResources(), [], folder.jobs)
        return
    script = batch_script("#SBATCH --nodes=1", SlurmResources(), [folder.path / "a b.json"], folder.jobs)
    words = list(directive_words(script))
    assert f"--output={str(folder.jobs).replace('%', '%%')}/%A_%a.log" in words and f"--chdir={Path.cwd()}" in words
    assert shlex.quote(str(folder.path / "a b.json")) in script and len(words) == 4


def test_runs_under_hostile_names_are_recorded(tmp_path: Path) -> None:
    """The names of a real run's folder, its lock, its reference and its report."""
    results = tmp_path / "a b%j"
    names = {"path upwards", "300 characters", "NUL"}
    sweep = ("-m", "name=s", "world_size=1", "strategy=single", "model.num_hidden_layers=1", *TINY)
    hostile = (setting("model.name", *(NAMES[name] for name in sorted(names))), setting("strategy.name", NAMES["HTML"]))
    done = run_harness(results, *sweep, *hostile)
    assert done.returncode == 0, done.stderr
    rows = [record.row for record in read_all(results / "s").records]
    assert [row["status"] for row in rows] == ["ok"] * 3 and {row["model"] for row in rows} == {
        NAMES[name] for name in names
    }
    assert outside(tmp_path, results / "s") == []
    again = run_harness(results, *sweep, *hostile)
    assert again.returncode == 0 and again.stderr.count("is recorded") == 3


def test_reports_show_names_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "svgs", lambda specs: {})
    folder = tmp_path / "demo"
    for (kind, name), record in zip(NAMES.items(), [*records()[:6]] * 4, strict=False):
        changed = record.with_row(
            run_id=readable_id(name, key=str(len(kind))), strategy=name or "-", model="m", checkpointing=name or "-"
        )
        write_record(folder / changed.run_id, changed)
    assert len(read_all(folder).records) == len(NAMES)
    assert main(["report", str(folder), "--export=csv,latex"]) == 0
    page = (folder / "report.html").read_text()
    assert "<script>alert" not in page and "<img src=x" not in page and "alert(1)" in page
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse((folder / "report.md").read_text())
    inline = {child.type for token in tokens for child in token.children or []}
    assert inline <= {
        "text",
        "text_special",
        "strong_open",
        "strong_close",
        "softbreak",
        "image",
        "link_open",
        "link_close",
    }
    assert not any(token.type.startswith("html") for token in tokens)
    for table in (folder / "runs.csv", *folder.rglob("table.csv")):
        cells = [cell for row in csv.reader(io.StringIO(table.read_text())) for cell in row]
        assert not [cell for cell in cells if cell.startswith(("=", "@", "+")) or re.match(r"-\D", cell)], table
    (latex,) = (path.read_text().replace("\\allowbreak{}", "") for path in folder.rglob("table.tex"))
    assert "textbackslash{}input\\{" in latex and "\\input{" not in latex and "\\$x\\$\\%\\&\\_\\#" in latex
    for path in folder.rglob("*"):
        if path.suffix in (".html", ".md", ".csv", ".tex"):
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", path.read_text()), path
