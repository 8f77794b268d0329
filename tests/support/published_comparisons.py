"""The comparisons in results/published: run their sweeps, and keep of each what a reader needs.

`python -m tests.support.published_comparisons [NAME …]` runs the sweeps, all of them by default, and publishes them.
`--from FOLDER NAME` publishes the finished sweep in FOLDER instead. Of each sweep, report.md, its figures and runs.csv
are kept in results/published/NAME, and report.html as NAME.html in pages.zip. results/published/README.md is written
again from the tables of all of them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.records.schema import Record, Row
from harness.records.store import read_runs_csv
from harness.report.speeds import MINIMUM_RUNS
from harness.report.view import View
from tests.support.page_templates import render_page

ROOT = Path(__file__).resolve().parents[2]

PUBLISHED = ROOT / "results" / "published"

PAGES = "pages.zip"

_FIRST_DATE = (1980, 1, 1, 0, 0, 0)  # of every entry of the archive, so that equal pages are equal archives


@dataclass(frozen=True)
class Comparison:
    """A published comparison: a sweep, the settings that it has beside its file, and what it shows."""

    name: str
    question: str
    settings: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that makes the comparison."""
        return " ".join(("harness", f"sweeps={self.name}", *self.settings))


COMPARISONS = (
    Comparison("quickstart", "nine strategies on two ranks", ("repeats=6",)),
    Comparison("checkpointing", "what each kind of activation checkpointing keeps and recomputes", ("repeats=6",)),
    Comparison(
        "fsdp_modes",
        "the modes of FSDP2 beside DDP, with and without checkpointing; on two ranks the hybrid mode is refused",
        ("world_size=2", "repeats=6"),
    ),
    Comparison("zero_ladder", "the stages of ZeRO over one to eight ranks"),
    Comparison("three_parallelisms", "data, tensor and pipeline parallelism over two and four ranks"),
    Comparison("scaling", "the same batch over one, two and four ranks"),
    Comparison("products", "products of two and three parallelisms over eight ranks"),
    Comparison("activation_memory", "activations against the micro-batch, with and without checkpointing"),
    Comparison("memory_wall", "the largest model that each strategy trains in 118 MiB per rank"),
    Comparison("experts", "a mixture of experts over four ranks, its experts copied, sharded, cut or divided"),
    Comparison("adapters", "full training beside LoRA on two ranks"),
    Comparison("optimizers", "five optimizers, copied and sharded, on two ranks"),
    Comparison("sequences", "ways to divide sequences of 128 to 1,024 tokens over four ranks"),
)

# Their runs have no devices: one rank of each layout runs on simulated ones.
SIMULATIONS = (
    Comparison("simulated_7b", "layouts of 7b on 8 × H100, with selective checkpointing"),
    Comparison("simulated_70b", "layouts of 70b on 64 × H100, with full checkpointing"),
    Comparison(
        "simulated_405b",
        "405b on 16,384 × H100 by tensor, pipeline and data parallelism, with three kinds of checkpointing",
    ),
)


def publish(comparison: Comparison, folder: Path, published: Path = PUBLISHED) -> None:
    """Replace what is published of a comparison by the report in this folder."""
    target = published / comparison.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / "figures", target / "figures")
    for name in ("report.md", "runs.csv"):
        shutil.copy(folder / name, target / name)
    pages = read_pages(published) | {f"{comparison.name}.html": (folder / "report.html").read_bytes()}
    write_pages(published, pages)


def read_pages(published: Path = PUBLISHED) -> dict[str, bytes]:
    """Return the published pages by their names."""
    path = published / PAGES
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_pages(published: Path, pages: dict[str, bytes]) -> None:
    """Write the archive of pages: equal pages make equal bytes."""
    with zipfile.ZipFile(published / PAGES, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in sorted(pages.items()):
            entry = zipfile.ZipInfo(name, _FIRST_DATE)
            entry.compress_type, entry.create_system, entry.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(entry, text)


def readme(published: Path = PUBLISHED) -> str:
    """Return the text of README.md, whose figures are those of every runs.csv."""
    views = {comparison: _view(published, comparison) for comparison in COMPARISONS}
    rows = [run for view in views.values() for run in view.records]
    steps = json.loads((published / "selftest" / "selftest.json").read_text(encoding="utf-8"))["steps"]
    return render_page(
        "published_readme",
        machines=sorted({str(run.row["machine"]) for run in rows}),
        versions=sorted({_versions(run) for run in rows}),
        days=sorted({str(run.row["started_at"])[:10] for run in rows}),
        ranked=[f"`{comparison.name}`" for comparison, view in views.items() if _ranked(view)],
        measured=[_row(comparison, view) for comparison, view in views.items()],
        simulated=[_simulated_row(comparison, _view(published, comparison)) for comparison in SIMULATIONS],
        selftest=_counts(step["outcome"] for step in steps.values()),
        pages=PAGES,
        minimum_runs=MINIMUM_RUNS,
    )


def _versions(run: Record) -> str:
    """Return the versions that a reader needs to record a row again."""
    known = dict(entry.split(" ", 1) for entry in str(run.row["versions"]).split(", "))
    return ", ".join(f"{name} {known[name]}" for name in ("harness", "python", "torch", "deepspeed"))


def _view(published: Path, comparison: Comparison) -> View:
    return View(comparison.name, read_runs_csv(published / comparison.name / "runs.csv"))


def _row(comparison: Comparison, view: View) -> str:
    ranked = f"{_ranked(view)} of {sum(line.status == 'ok' for line in view.lines)}" if _ranked(view) else "none"
    return _table_row(comparison, view, f"{len(view.records):,}", ranked)


def _simulated_row(comparison: Comparison, view: View) -> str:
    ok = [line.row for line in view.lines if line.status == "ok"]
    step = _difference(ok, "step_seconds", "predicted_step_seconds")
    return _table_row(comparison, view, step, _difference(ok, "peak_allocated_bytes", "predicted_peak_bytes"))


def _table_row(comparison: Comparison, view: View, *figures: str) -> str:
    counts = _counts(line.status for line in view.lines)
    link, command = f"[{comparison.name}]({comparison.name}/report.md)", f"`{comparison.command}`"
    return f"| {' | '.join((link, comparison.question, command, counts, *figures))} |"


def _difference(rows: Sequence[Row], simulated: str, formula: str) -> str:
    """Return the range of what is simulated against the formula's: `−2.0 to +3.1 %`, or the one difference."""
    changes = sorted(100 * (float(row[simulated]) / float(row[formula]) - 1) for row in rows)  # type: ignore[arg-type]
    ends = dict.fromkeys(f"{change:+.1f}" for change in (changes[0], changes[-1]))
    return f"{' to '.join(ends)} %".replace("-", "−")


def _counts(outcomes: Iterable[str]) -> str:
    """Return how many ended how: `15 passed, 13 skipped`."""
    return ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes).most_common())


def _ranked(view: View) -> int:
    """Return how many configurations have a speed that is ranked."""
    return sum(line.speed.is_ranked for line in view.lines)


def main() -> None:
    """Run and publish the named comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the comparisons; all by default")
    parser.add_argument("--from", dest="folder", type=Path, metavar="FOLDER", help="a sweep that has been run already")
    parser.add_argument("--into", type=Path, default=ROOT / "results" / "published_runs", help="where sweeps are run")
    arguments = parser.parse_args()
    by_name = {comparison.name: comparison for comparison in (*COMPARISONS, *SIMULATIONS)}
    if unknown := set(arguments.names) - set(by_name):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(by_name)}")
    if arguments.folder and len(arguments.names) != 1:
        parser.error("--from publishes one comparison: name it")
    for comparison in [by_name[name] for name in arguments.names or by_name]:
        folder = arguments.folder or arguments.into / comparison.name
        if not arguments.folder:
            settings = [f"sweeps={comparison.name}", *comparison.settings, f"results_dir={arguments.into}"]
            subprocess.run([sys.executable, "-m", "harness", *settings, "tracking=none"], cwd=ROOT, check=True)
        subprocess.run([sys.executable, "-m", "harness", "report", str(folder)], cwd=ROOT, check=True)
        publish(comparison, folder)
        print(f"published {comparison.name}")
    (PUBLISHED / "README.md").write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
