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
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def changed_lines(before: str, after: str, where: str) -> list[str]:
    """Return the lines that are gone and those that came."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [f"{where}: {line}" for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def changed_entries(before: dict[str, object], after: dict[str, object]) -> Compared:
    """Return the entries that differ."""
    keys = dict.fromkeys((*before, *after))
    lines = [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys if before.get(key) != after.get(key)]
    return len(keys), lines


def reference_pages(roots: Roots, scratch: Path) -> Compared:
    """Compare the generated pages, which tests hold to the code: every command, option, key, preset and column."""
    texts = [[(root / "docs" / "reference" / page).read_text() for page in PAGES] for root in roots]
    lines = [line for page, *sides in zip(PAGES, *texts, strict=True) for line in changed_lines(*sides, where=page)]
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
    return changed_entries(*sides)  # type: ignore[arg-type]


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


def reports(roots: Roots, scratch: Path) -> Compared:
    """Compare the reports that both checkouts write of the same records: those of the older code's fresh runs.

    Each checkout is told that its own code made them, as a report says of records that other code made.
    """
    texts = []
    for name, root in zip(("reported_before", "reported_after"), roots, strict=True):
        folder = scratch / name / "runs"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        versions = json.loads(run_code(root, VERSIONS))
        for path in (scratch / "before").glob("run_*/*/record.json"):
            shutil.copytree(path.parent, folder / path.parent.name)
            record = json.loads(path.read_text()) | {"versions": versions}
            (folder / path.parent.name / path.name).write_text(json.dumps(record))
        run(root, sys.executable, "-m", "harness", "report", str(folder))
        names = ("report.md", "runs.csv", "report.html")
        sides = {part: (folder / part).read_text().replace(versions["code"], "CODE") for part in names}
        texts.append(sides | {"report.html": sides["report.html"].replace("><", ">\n<")})
    lines = [line for part in texts[0] for line in changed_lines(texts[0][part], texts[1][part], part)]
    return sum(text.count("\n") for text in texts[1].values()), [line[:300] for line in lines]


def planted_faults(roots: Roots, scratch: Path) -> Compared:
    """Compare the names of the planted faults and of the tests that see them."""
    sides = [dict.fromkeys(fault_names(root), "there") for root in roots]
    return changed_entries(*sides)  # type: ignore[arg-type]


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
    "reports": reports,
}

if __name__ == "__main__":
    sys.exit(main())
