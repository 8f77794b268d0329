"""What a user sees of two checkouts: every difference between the code before a change and the code after it.

    python -m tests.benchmarks.behavior --before ../older-clone --out results/behavior.json --scratch /tmp/behavior

A refactoring leaves no line that its changelog does not explain. Compared are the reference pages (commands, options,
keys, presets, columns), the answers to every name of another program and to every slip of docs/reference/mistakes.md,
the run ids, refusals and predictions of every recorded random run, plans, thirty fresh runs of equal seeds, the reports
of those runs and of the published comparisons, and the names of the planted faults. Each checkout runs its own code, in
processes of its own. What was made in `--scratch` is used again.
"""

import argparse
import ast
import csv
import difflib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PAGES = ("configuration.md", "columns.md", "command-line.md", "strategies.md", "mistakes.md")

# Prints the answers of a checkout's command to mistakes, as JSON: those of its page, and every name of another program.
ANSWERS = """
import contextlib, io, json, pathlib, re, shlex, sys
from harness.cli.main import main
from harness.config import aliases
page = pathlib.Path(sys.argv[1]).read_text()
typed = re.findall(r"^[|] `(.+?)` [|] .+ [|]$", page, re.MULTILINE)
typed += [f"{name}=1" for name in (*aliases.KEYS, *aliases.NO_KEYS)]
typed += [f"{group}={name}" for group, names in aliases.VALUES.items() for name in names]
typed += [f"{key}={name}" for key, names in aliases.KEY_VALUES.items() for name in names]
answers = {}
for words in typed:
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(shlex.split(words))
    answers[words] = err.getvalue() if status else "no mistake"
print(json.dumps(answers))
"""

# Prints for each line of overrides the run's id, or why it is refused, and the columns that are known before it runs.
IDENTITIES = """
import json, sys
from harness.hardware.machine import Machine
from harness.runner.plan import make_plan
from harness.util.errors import UserError
from tests.support.commands import compose
machine = Machine("cpu", "cpu", 1, 2, 0, (2**34,), 2)
found = []
for line in json.load(sys.stdin):
    try:
        config, command = compose(*line.split(), "name=random")
        plan = make_plan(config, machine, command)
        found.append([plan.run_id, plan.layout.to_dict()])
    except UserError as error:
        found.append(["", str(error)])
print(json.dumps(found))
"""

VERSIONS = "import json; from harness.records.provenance import versions; print(json.dumps(versions()))"

PLANS = (
    "strategy=zero3 model=7b cluster=8xh100 --explain",
    "model=7b cluster=8xh100 train.seq_len=4096 train.global_batch=128",
    "model=70b cluster=8xh100 cluster.nodes=8 train.seq_len=8192 train.global_batch=512",
    "strategy=3d model=70b cluster=8xh100 cluster.nodes=8 train.global_batch=512 strategy.tp=8 strategy.pp=4 --explain",
    "strategy=zero_offload model=13b cluster=8xh100 --explain",
    "-m strategy=ddp,zero1,zero2,zero3,fsdp_full_shard,tp,pp_1f1b model=1b cluster=8xh100",
    "stack=nanotron strategy=3d model=7b cluster=8xh100 cluster.nodes=4 strategy.tp=8 strategy.pp=2 --explain",
    "strategy=fsdp_full_shard stack=llm_foundry model=7b cluster=8xa100_80 --explain",
    "strategy=zero3 model=7b cluster=8xh100 cluster.memory_budget=20GiB",
    "strategy=zero3 model=405b cluster=8xh100",
)

SEARCHES = (  # whose pages are compared
    "model=7b cluster=8xh100 train.seq_len=4096 train.global_batch=128",
    "model=70b cluster=8xh100 cluster.nodes=8 train.seq_len=8192 train.global_batch=512",
    "model=1b cluster=8xa100_40 precision=bf16_mixed",
)

RUNS = (  # thirty of two steps each; the last ones fail or are simulated
    *("strategy=single world_size=1", "strategy=ddp", "strategy=ddp precision=bf16_mixed", "strategy=ddp world_size=4"),
    *("strategy=zero1", "strategy=zero2", "strategy=zero3", "strategy=zero3 precision=bf16_mixed checkpointing=full"),
    *("strategy=zero1_torch", "strategy=zero2_defaults", "strategy=zero3_tuned", "strategy=zero1_tp world_size=4"),
    *("strategy=fsdp_full_shard", "strategy=fsdp_full_shard precision=bf16_mixed checkpointing=selective"),
    *("strategy=fsdp_shard_grad_op", "strategy=fsdp_no_shard", "strategy=fsdp_hybrid_shard world_size=4"),
    *("strategy=tp", "strategy=tp_sp", "strategy=fsdp_tp world_size=4", "strategy=cp", "strategy=pp_gpipe"),
    *("strategy=pp_1f1b model=gpt_tiny", "strategy=pp_interleaved", "strategy=pp_zero_bubble", "strategy=ddp_pp"),
    *("strategy=ddp strategy.engine=accelerate", "strategy=zero3 strategy.engine=accelerate"),
    "strategy=ddp cluster.memory_budget=4MiB preflight=false",
    "strategy=fsdp_full_shard launch=simulated cluster=8xh100 model=125m world_size=8 train.global_batch=8",
)

# Columns that two runs of the same code may differ in: times, what follows from them, and what threads decide.
TIMED = re.compile(
    r"second|tokens_per|mfu|hfu|flops_per|joules|noise|started_at|bubble$|rss|available|peak|fragment|non_torch|"
    r"expected_overlap|idle|overlapped|reason|energy|power|versions"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What a user sees of two checkouts.")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the code before the change")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for the differences")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder for what is made, to be used again")
    options = parser.parse_args(arguments)
    roots = (options.before.resolve(), ROOT)
    differences = {}
    for name, compare in COMPARISONS.items():
        compared, lines = compare(roots, options.scratch)
        differences[name] = {"compared": compared, "differences": lines}
        print(f"{name}: {compared} compared, {len(lines)} differences", *lines[:20], sep="\n  ", flush=True)
    options.out.write_text(json.dumps(differences, indent=1, ensure_ascii=False) + "\n")
    return 0


Compared = tuple[int, list[str]]  # how much was compared, and a line for each difference
Roots = tuple[Path, Path]


def run_code(root: Path, code: str, *arguments: str, stdin: str = "") -> str:
    """Return what Python code prints that imports a checkout's own packages."""
    return run(root, sys.executable, "-W", "ignore", "-c", code, *arguments, stdin=stdin)


def run(root: Path, *command: str, stdin: str = "") -> str:
    """Return what a command prints in a checkout, whatever its exit status."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, input=stdin, capture_output=True, text=True, check=False)
    return done.stdout + (done.stderr if done.returncode else "")


def changed(where: str, before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the lines that are gone and those that came."""
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    return [f"{where}: {line}"[:400] for line in lines if line[:1] in "+-"]


def changed_entries(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Compared:
    """Return the entries that differ."""
    keys = dict.fromkeys((*before, *after))
    lines = [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys if before.get(key) != after.get(key)]
    return len(keys), lines


def reference_pages(roots: Roots, scratch: Path) -> Compared:
    """Compare the generated pages, which tests hold to the code: every command, option, key, preset and column."""
    texts = [[(root / "docs" / "reference" / page).read_text() for page in PAGES] for root in roots]
    lines = [
        line for page, *sides in zip(PAGES, *texts, strict=True) for line in changed(page, *map(str.splitlines, sides))
    ]
    return sum(text.count("\n") for text in texts[1]), lines


def answers(roots: Roots, scratch: Path) -> Compared:
    """Compare the answers to slips and to the names of other programs, those that the older code lists."""
    before, after = (json.loads(run_code(root, ANSWERS, "docs/reference/mistakes.md")) for root in roots)
    return changed_entries(before, after)


def identities(roots: Roots, scratch: Path) -> Compared:
    """Compare ids and refusals of the recorded random runs, and the ids with those that are recorded."""
    with (ROOT / "results" / "random_runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    asked = json.dumps([row["overrides"] for row in rows])
    before, after = (json.loads(run_code(root, IDENTITIES, stdin=asked)) for root in roots)
    draws = [row["draw"] for row in rows]
    compared, lines = changed_entries(*(dict(zip(draws, side, strict=True)) for side in (before, after)))
    for row, (run_id, _) in zip(rows, after, strict=True):
        if run_id and row["run_id"] not in ("", run_id):
            lines.append(f"draw {row['draw']} is recorded as {row['run_id']}, not {run_id}")
    return compared, lines


def plans(roots: Roots, scratch: Path) -> Compared:
    """Compare what plans print."""
    command = (sys.executable, "-m", "harness", "plan")
    sides = [{line: run(root, *command, *line.split()) for line in PLANS} for root in roots]
    return changed_entries(*sides)


def fresh_runs(roots: Roots, scratch: Path) -> Compared:
    """Compare the deterministic columns of runs of equal seeds, each made by the code of one checkout."""
    tables = []
    for name, root in zip(("before", "after"), roots, strict=True):
        folder = scratch / name
        for number, overrides in enumerate(RUNS):
            settings = [f"name=run_{number:02}", f"results_dir={folder}", "tracking=none", "train.steps=2"]
            if not (folder / f"run_{number:02}" / "runs.csv").exists():
                command = ["harness", "train.warmup_steps=1", *overrides.split(), *settings]
                run(root, sys.executable, "-m", *command)
        tables.append({path.parent.name: read_row(path) for path in sorted(folder.glob("run_*/runs.csv"))})
    pairs = {f"{name} {column}": value for name, row in tables[0].items() for column, value in row.items()}
    return changed_entries(pairs, {f"{n} {column}": v for n, row in tables[1].items() for column, v in row.items()})


def read_row(path: Path) -> dict[str, str]:
    """Return the deterministic columns of the only row of a table that have a value."""
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    return {name: value for name, value in row.items() if value and not TIMED.search(name)}


def peaks(roots: Roots, scratch: Path) -> Compared:
    """Compare the peaks of the fresh runs; where one differs, the least of five runs by each checkout.

    On a CPU a peak has the buffers of gloo's threads, as many as exist at once.
    """
    sides = [dict(peak_rows(scratch / name)) for name in ("before", "after")]
    differing = dict.fromkeys(key[0] for key in sides[0] if sides[0][key] != sides[1].get(key))
    for name, root, side in zip(("before", "after"), roots, sides, strict=True):
        for run_name in differing:
            folder = scratch / "peaks" / name
            if not (folder / run_name / "runs.csv").exists():
                command = ["harness", "train.warmup_steps=1", *RUNS[int(run_name[-2:])].split(), f"name={run_name}"]
                settings = [f"results_dir={folder}", "tracking=none", "train.steps=2", "repeats=5"]
                run(root, sys.executable, "-m", *command, *settings)
        side |= dict(peak_rows(scratch / "peaks" / name))
    return changed_entries(*sides)


def peak_rows(folder: Path) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the least value of every column of peaks, of each comparison in a folder."""
    for path in sorted(folder.glob("run_*/runs.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        for name in (name for name in rows[0] if "peak" in name and name.endswith("_bytes") and "rss" not in name):
            if values := [float(row[name]) for row in rows if row[name]]:
                yield (path.parent.name, name), min(values)


# Exports every run of the folders, and prints the files that this writes, or why it is refused.
EXPORTS = """
import contextlib, io, json, pathlib, sys, tempfile
from harness.cli.main import main
written = {}
for folder in json.load(sys.stdin):
    with tempfile.TemporaryDirectory() as target, contextlib.redirect_stderr(io.StringIO()) as err:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main(["export", folder, "--to", target + "/to"])
        name = pathlib.Path(folder).name
        written[f"{name} printed"] = (out.getvalue() + err.getvalue()).replace(target, "TARGET")
        for path in sorted(pathlib.Path(target).rglob("*.*")):
            written[f"{name} {path.name}"] = path.read_text().replace(target, "TARGET")
print(json.dumps(written))
"""


def exports(roots: Roots, scratch: Path) -> Compared:
    """Compare what both checkouts export of the older code's fresh runs."""
    folders = json.dumps([str(path.parent) for path in sorted((scratch / "before").glob("run_*/*/record.json"))])
    before, after = (json.loads(run_code(root, EXPORTS, stdin=folders)) for root in roots)
    names = dict.fromkeys((*before, *after))
    texts = [[side.get(name, "not written").splitlines() for side in (before, after)] for name in names]
    return len(names), [line for name, sides in zip(names, texts, strict=True) for line in changed(name, *sides)]


def figures(roots: Roots, scratch: Path) -> Compared:
    """Compare every figure of the reports: the rows of all tables, and of the tables behind the charts."""
    before, after = (figures_of(files) for files in written_reports(roots, scratch))
    return sum(map(len, after.values())), [line for key in before for line in changed(key, before[key], after[key])]


def sentences(roots: Roots, scratch: Path) -> Compared:
    """Compare everything else that the reports say, on their Markdown pages and on the terminal."""
    before, after = (sentences_of(files) for files in written_reports(roots, scratch))
    return sum(map(len, after.values())), [line for key in before for line in changed(key, before[key], after[key])]


Files = dict[tuple[str, str], str]  # the text of each file of a report, by the comparison and the file's name


def figures_of(files: Files) -> dict[str, list[str]]:
    """Return the rows of all tables of figures by where they stand."""
    found = {}
    for (comparison, name), text in files.items():
        if name.endswith(".html"):
            rows = re.findall(r"<tr.*?</tr>", text, re.DOTALL)
            found[f"{comparison} {name}"] = [" | ".join(cells(row)) for row in rows]
        elif name.endswith((".csv", ".tex")):
            found[f"{comparison} {name}"] = text.splitlines()
        elif name.endswith(".md"):
            found[f"{comparison} {name}"] = [line for line in text.splitlines() if line.startswith("|")]
    return found


def cells(row: str) -> list[str]:
    """Return the texts of the cells of a row of HTML."""
    texts = re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row, re.DOTALL)
    return [" ".join(re.sub(r"<.*?>", "", text).split()) for text in texts]


def sentences_of(files: Files) -> dict[str, list[str]]:
    """Return the lines of pages and terminals that are not of a table on the page."""
    texts = {" ".join(key): text.splitlines() for key, text in files.items() if key[1].endswith((".md", "terminal"))}
    return {key: [line for line in lines if not line.startswith("|")] for key, lines in texts.items()}


@functools.cache
def written_reports(roots: Roots, scratch: Path) -> list[Files]:
    """Return the files of the reports that both checkouts write of the same records.

    These are the older code's fresh runs, the records of schema 1, and every folder of records in `records` of the
    scratch folder, such as the published comparisons. The pages of three searches are beside them. Each checkout is
    told that its own code made the records, as a report says of records that other code made.
    """
    sources = {"fresh runs": sorted((scratch / "before").glob("run_*"))}
    sources["schema 1"] = [ROOT / "tests" / "data" / "schema_1" / "all"]
    sources |= {path.name: [path] for path in sorted((scratch / "records").glob("*"))}
    both = []
    for side, root in zip(("reported_before", "reported_after"), roots, strict=True):
        versions = json.loads(run_code(root, VERSIONS))
        shutil.rmtree(scratch / side, ignore_errors=True)
        files: Files = {}
        for name, folders in sources.items():
            folder = scratch / side / name.replace(" ", "_")
            for path in (path for source in folders for path in source.glob("*/record.json")):
                shutil.copytree(path.parent, folder / path.parent.name)
                record = json.loads(path.read_text()) | {"versions": versions}
                (folder / path.parent.name / path.name).write_text(json.dumps(record))
            command = ("harness", "report", str(folder), "--export", "csv,latex")
            files[name, "terminal"] = run(root, sys.executable, "-m", *command)
            for path in sorted([*folder.glob("*.*"), *folder.glob("export/*.*")]):
                if path.suffix != ".parquet":
                    files[name, path.name] = path.read_text()
        for number, line in enumerate(SEARCHES):
            page = scratch / side / f"search_{number}" / "page"
            for suffix in (".md", ".html"):
                arguments = (*line.split(), "--report", str(page.with_suffix(suffix)))
                files[page.parent.name, "terminal"] = run(root, sys.executable, "-m", "harness", "plan", *arguments)
            files |= {(page.parent.name, path.name): path.read_text() for path in sorted(page.parent.glob("*.*"))}
        both.append({key: text.replace(versions["code"], "CODE").replace(side, "") for key, text in files.items()})
    return both


def planted_faults(roots: Roots, scratch: Path) -> Compared:
    """Compare the names of the planted faults and of the tests that see them."""
    sides = [dict.fromkeys(fault_names(root), "there") for root in roots]
    return changed_entries(*sides)


def fault_names(root: Path) -> Iterator[str]:
    """Yield the functions that plant a fault, and the tests whose names say that a fault is seen."""
    support = root / "tests" / "support"
    for path in (*sorted((support / "faults").glob("*.py")), *sorted(support.glob("*faults.py"))):
        yield from (f"fault {name}" for name in function_names(path) if not name.startswith("_"))
    for path in sorted((root / "tests").glob("*/test_*.py")):
        words = ("fault", "caught", "is_an_error", "is_named", "noticed")
        yield from (f"test {name}" for name in function_names(path) if any(word in name for word in words))


def function_names(path: Path) -> list[str]:
    """Return the names of the functions at the top of a module."""
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]


COMPARISONS = {
    "reference pages": reference_pages,
    "answers to mistakes": answers,
    "planted faults": planted_faults,
    "run ids and refusals": identities,
    "plans": plans,
    "fresh runs": fresh_runs,
    "peaks": peaks,
    "exports": exports,
    "figures of reports": figures,
    "sentences of reports": sentences,
}

if __name__ == "__main__":
    sys.exit(main())
