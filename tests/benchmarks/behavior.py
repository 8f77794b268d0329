"""What a user sees of two checkouts: every difference between the code before a change and the code after it.

    python -m tests.benchmarks.behavior --before ../older-clone --out results/behavior.json --scratch /tmp/behavior

A refactoring leaves no line that its changelog does not explain. Compared are the reference pages (commands, options,
keys, presets, columns), the answers to every name of another program and to every slip of docs/reference/mistakes.md,
the run ids, refusals and predictions of every recorded random run, plans, thirty fresh runs of equal seeds, the reports
of those runs and of the published comparisons, and the names of the planted faults. Each checkout runs its own code, in
processes of its own. What was made in `--scratch` is used again.
"""

import ast
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from tests.support.campaigns import REQUIRED_PATH, parse_options, read_table

ROOT = Path(__file__).parents[2]

PAGES = ("configuration.md", "columns.md", "command-line.md", "strategies.md", "mistakes.md")

# Prints the answers of a checkout's command to mistakes, as JSON: those of its page, and every name of another program.
ANSWERS = """
import contextlib, io, json, pathlib, re, shlex, sys
from harness.cli.main import main
from harness.config import mistakes
aliases = getattr(mistakes, "aliases", mistakes)  # once a module of its own
page = pathlib.Path("docs/reference/mistakes.md").read_text()
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
from harness.runner.resolve import UserError  # wherever it is defined
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

SIDES = ("before", "after")  # the names of the checkouts and of what is made by each

Side = dict[str, Any]  # what a checkout shows, by where it stands: a text is the list of its lines
Roots = tuple[Path, Path]


def main() -> None:
    options = parse_options(
        __doc__,
        before=REQUIRED_PATH | {"help": "a checkout of the code before the change"},
        out=REQUIRED_PATH | {"help": "a JSON file for the differences"},
        scratch=REQUIRED_PATH | {"help": "a folder for what is made, to be used again"},
    )
    differences = {}
    for name, show in COMPARISONS.items():
        before, after = show((options.before.resolve(), ROOT), options.scratch)
        keys = dict.fromkeys((*before, *after))
        lines = [line for key in keys for line in changed(key, before.get(key, ""), after.get(key, ""))]
        compared = sum(len(value) if isinstance(value, list) else 1 for value in after.values())
        differences[name] = {"compared": compared, "differences": lines}
        print(f"{name}: {compared} compared, {len(lines)} differences", *lines[:20], sep="\n  ", flush=True)
    options.out.write_text(json.dumps(differences, indent=1, ensure_ascii=False) + "\n")


def changed(where: str, before: Any, after: Any) -> Iterator[str]:
    """Yield the lines that are gone and those that came, or the value that differs."""
    if isinstance(before, list) and isinstance(after, list):
        lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
        yield from (f"{where}: {line}"[:400] for line in lines if line[:1] in "+-")
    elif before != after:
        yield f"{where}: {before} -> {after}"


def run_code(root: Path, code: str, stdin: str = "") -> Any:
    """Return what Python code prints as JSON that imports a checkout's own packages."""
    return json.loads(run(root, "-W", "ignore", "-c", code, stdin=stdin))


def run(root: Path, *arguments: str, stdin: str = "") -> str:
    """Return what Python prints in a checkout, whatever its exit status."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=root, env=environment, input=stdin, capture_output=True, text=True, check=False)
    return done.stdout + (done.stderr if done.returncode else "")


def reference_pages(roots: Roots, scratch: Path) -> list[Side]:
    """Return the generated pages, which tests hold to the code: every command, option, key, preset and column."""
    return [{page: (root / "docs" / "reference" / page).read_text().splitlines() for page in PAGES} for root in roots]


def answers(roots: Roots, scratch: Path) -> list[Side]:
    """Return the answers to slips and to the names of other programs."""
    return [run_code(root, ANSWERS) for root in roots]


def planted_faults(roots: Roots, scratch: Path) -> list[Side]:
    """Return the names of the planted faults and of the tests that see them."""
    return [dict.fromkeys(fault_names(root), "there") for root in roots]


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


def identities(roots: Roots, scratch: Path) -> list[Side]:
    """Return ids and refusals of the recorded random runs, and the ids that are recorded otherwise."""
    rows = read_table(ROOT / "results" / "random_runs.csv")
    asked = json.dumps([row["overrides"] for row in rows])
    draws = [row["draw"] for row in rows]
    before, after = (dict(zip(draws, map(tuple, run_code(root, IDENTITIES, asked)), strict=True)) for root in roots)
    recorded = {row["draw"]: row["run_id"] for row in rows if row["run_id"] and after[row["draw"]][0]}
    before |= {f"{draw} as recorded": run_id for draw, run_id in recorded.items()}
    after |= {f"{draw} as recorded": after[draw][0] for draw in recorded}
    return [before, after]


def plans(roots: Roots, scratch: Path) -> list[Side]:
    """Return what plans print."""
    return [{line: run(root, "-m", "harness", "plan", *line.split()) for line in PLANS} for root in roots]


def fresh_runs(roots: Roots, scratch: Path) -> list[Side]:
    """Return the deterministic columns of runs of equal seeds, each made by the code of one checkout."""
    for root, side in zip(roots, SIDES, strict=True):
        for number in range(len(RUNS)):
            make_run(root, scratch / side, number)
    tables = [{path.parent.name: read_table(path)[0] for path in runs_csv(scratch / side)} for side in SIDES]
    return [
        {
            f"{name} {column}": value
            for name, row in table.items()
            for column, value in row.items()
            if value and not TIMED.search(column)
        }
        for table in tables
    ]


def make_run(root: Path, folder: Path, number: int, *further: str) -> None:
    """Make one of RUNS by the code of a checkout, unless the folder has it."""
    name = f"run_{number:02}"
    if not (folder / name / "runs.csv").exists():
        settings = [f"name={name}", f"results_dir={folder}", "tracking=none", "train.steps=2", "train.warmup_steps=1"]
        run(root, "-m", "harness", *RUNS[number].split(), *settings, *further)


def runs_csv(folder: Path) -> list[Path]:
    """Return the tables of the comparisons in a folder."""
    return sorted(folder.glob("run_*/runs.csv"))


def peaks(roots: Roots, scratch: Path) -> list[Side]:
    """Return the peaks of the fresh runs; where one differs, the least of five runs by each checkout.

    On a CPU a peak has the buffers of gloo's threads, as many as exist at once.
    """
    sides = [peak_rows(scratch / side) for side in SIDES]
    differing = dict.fromkeys(key.split()[0] for key in sides[0] if sides[0][key] != sides[1].get(key))
    for root, side in zip(roots, SIDES, strict=True):
        for name in differing:
            make_run(root, scratch / "peaks" / side, int(name[-2:]), "repeats=5")
    return [own | peak_rows(scratch / "peaks" / side) for own, side in zip(sides, SIDES, strict=True)]


def peak_rows(folder: Path) -> Side:
    """Return the least value of every column of peaks, of each comparison in a folder."""
    tables = {path.parent.name: pd.read_csv(path) for path in runs_csv(folder)}
    least = {name: table.filter(regex="^(?!.*rss).*peak.*_bytes$").min().dropna() for name, table in tables.items()}
    return {f"{name} {column}": value for name, figures in least.items() for column, value in figures.items()}


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


def exports(roots: Roots, scratch: Path) -> list[Side]:
    """Return what both checkouts export of the older code's fresh runs."""
    folders = json.dumps([str(path.parent) for path in sorted((scratch / "before").glob("run_*/*/record.json"))])
    sides = [run_code(root, EXPORTS, folders) for root in roots]
    return [{name: text.splitlines() for name, text in side.items()} for side in sides]


def reports(roots: Roots, scratch: Path) -> list[Side]:
    """Return the files of the reports that both checkouts write of the same records, by comparison and name.

    These are the older code's fresh runs, the records of schema 1, and every folder of records in `records` of the
    scratch folder, such as the published comparisons. The pages of three searches are beside them. Each checkout is
    told that its own code made the records, as a report says of records that other code made.
    """
    sources = {"fresh runs": sorted((scratch / "before").glob("run_*"))}
    sources["schema 1"] = [ROOT / "tests" / "data" / "schema_1" / "all"]
    sources |= {path.name: [path] for path in sorted((scratch / "records").glob("*"))}
    both: list[Side] = []
    for side, root in zip(("reported_before", "reported_after"), roots, strict=True):
        versions = run_code(root, VERSIONS)
        shutil.rmtree(scratch / side, ignore_errors=True)
        files: dict[str, str] = {}
        for name, folders in sources.items():
            folder = scratch / side / name.replace(" ", "_")
            for path in (path for source in folders for path in source.glob("*/record.json")):
                shutil.copytree(path.parent, folder / path.parent.name)
                record = json.loads(path.read_text()) | {"versions": versions}
                (folder / path.parent.name / path.name).write_text(json.dumps(record))
            files[f"{name} terminal"] = run(root, "-m", "harness", "report", str(folder), "--export", "csv,latex")
            written = sorted([*folder.glob("*.*"), *folder.glob("export/*.*")])
            files |= {f"{name} {path.name}": path.read_text() for path in written if path.suffix != ".parquet"}
        for number, line in enumerate(SEARCHES):
            page = scratch / side / f"search_{number}" / "page"
            for suffix in (".md", ".html"):
                arguments = (*line.split(), "--report", str(page.with_suffix(suffix)))
                files[f"{page.parent.name} terminal"] = run(root, "-m", "harness", "plan", *arguments)
            files |= {f"{page.parent.name} {path.name}": path.read_text() for path in sorted(page.parent.glob("*.*"))}
        texts = {key: text.replace(versions["code"], "CODE").replace(side, "") for key, text in files.items()}
        both.append({key: text.splitlines() for key, text in texts.items()})
    return both


COMPARISONS = {
    "reference pages": reference_pages,
    "answers to mistakes": answers,
    "planted faults": planted_faults,
    "run ids and refusals": identities,
    "plans": plans,
    "fresh runs": fresh_runs,
    "peaks": peaks,
    "exports": exports,
    "reports": reports,
}

if __name__ == "__main__":
    main()
