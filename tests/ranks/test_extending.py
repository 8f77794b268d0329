"""Every block that docs/development/extending.md shows is enough: once in place, what it adds is run and proven."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, read_rows

PAGE = (ROOT / "docs" / "development" / "extending.md").read_text()

SMALL = ("train.global_batch=8", "train.micro_batch=1", "train.seq_len=32", "train.steps=1", "train.warmup_steps=2")


BLOCKS = re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project with every block of the page in place."""
    root = tmp_path_factory.mktemp("extended")
    for folder in ("harness", "conf", "sweeps"):
        shutil.copytree(ROOT / folder, root / folder)  # with compiled modules, which save seconds
    strategy, model, engine, column, value, chart, sentence, imported, placed, tracker, settings = BLOCKS
    files = {
        "conf/strategy/wide_pipeline.yaml": strategy,
        "conf/model/mini.yaml": model,
        "conf/tracking/lines.yaml": settings,
        "harness/report/charts/per_token.py": chart,
        "harness/engines/by_hand.py": engine,
        "harness/tracking/trackers/lines.py": tracker,
        "harness/records/columns.toml": (root / "harness" / "records" / "columns.toml").read_text() + column,
        "harness/report/sentences.j2": (root / "harness" / "report" / "sentences.j2").read_text() + sentence,
    }
    for name, text in files.items():
        (root / name).write_text(text)
    insert(root / "harness" / "metrics" / "columns.py", '        "tokens_per_second": tokens / step_seconds,\n', value)
    insert(root / "harness" / "report" / "sections.py", "        *batches(part),\n", placed)
    insert(
        root / "harness" / "report" / "sections.py", "from harness.report.charts import speed, tradeoffs\n", imported
    )
    return root


def insert(path: Path, before: str, text: str) -> None:
    """Insert text into a file behind the only line of this kind."""
    assert path.read_text().count(before) == 1
    path.write_text(path.read_text().replace(before, before + text))


def statuses(clone: Path, name: str, *overrides: str, tracking: str = "none") -> list[tuple[str, str]]:
    command = [sys.executable, "-m", "harness", "-m", f"name={name}", *overrides, *SMALL, f"tracking={tracking}"]
    subprocess.run(command, cwd=clone, check=False, timeout=600, capture_output=True)
    rows = read_rows(clone / "results", name)
    return list(zip(rows.status, rows.reason.astype(object).fillna(""), strict=True))


def test_all_but_an_engine_are_added_by_their_blocks(clone: Path) -> None:
    run = ("strategy=wide_pipeline", "model=mini", "world_size=4", "tracking.options.file=own.jsonl")
    assert statuses(clone, "blocks", *run, tracking="lines") == [("ok", "")]
    (row,) = read_rows(clone / "results", "blocks").to_dict("records")
    assert row["sequences_per_second"] * 32 == pytest.approx(row["tokens_per_second"])
    assert row["parameters"] == 180800
    tracked = clone / "results" / "blocks" / "own.jsonl"
    line = tracked.read_text()
    assert json.loads(line)["sequences_per_second"] == row["sequences_per_second"]
    steps = [
        json.loads(step) for step in (clone / f"results/blocks/{row['run_id']}/steps.jsonl").read_text().splitlines()
    ]
    assert set(steps[0]) == {"step", "phase", "loss", "grad_norm", "seconds"}
    assert json.loads(line)["losses"] == {str(step["step"]): step["loss"] for step in steps[::2]}
    report = (clone / "results" / "blocks" / "report.md").read_text()
    assert (
        "## Bytes sent per token" in report and "![Bytes that a rank of 1 configuration sends for each token" in report
    )
    assert (clone / "results" / "blocks" / "figures" / "per_token.svg").exists()
    tracked.unlink()
    command = [sys.executable, "-m", "harness", "sync", "results/blocks", "--tracker", "lines", "--again"]
    subprocess.run(command, cwd=clone, check=True, timeout=300, capture_output=True)
    assert json.loads(tracked.read_text()) == json.loads(line)


def test_what_the_blocks_import_exists() -> None:
    """The fault was an engine that imported a function by its former name, which the long tests alone showed."""
    blocks = [ast.parse(block) for block in BLOCKS if block.startswith('"""')]
    imports = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    names = [(node.module or "", alias.name) for node in imports for alias in node.names]
    assert len(names) > 10
    assert [entry for entry in names if not hasattr(importlib.import_module(entry[0]), entry[1])] == []


@pytest.mark.long
def test_an_engine_is_added_by_one_file(clone: Path) -> None:
    by_hand = ("strategy=ddp", "strategy.engine=by_hand", "strategy.data_parallel=none", "world_size=2")
    assert statuses(clone, "engine", *by_hand, "precision=fp32,bf16_mixed") == [("ok", "")] * 2
    ((status, reason),) = statuses(clone, "refused", *by_hand, "strategy.tp=2", "world_size=4")
    assert status == "refused" and reason.startswith("strategy.engine=by_hand replicates")


@pytest.mark.long
def test_an_engine_that_leaves_something_out_is_an_error(clone: Path) -> None:
    engine = clone / "harness" / "engines" / "by_hand.py"
    whole = engine.read_text()
    engine.write_text(whole.replace("dist.all_reduce(parameter.grad)", "pass"))
    by_hand = ("strategy=ddp", "strategy.engine=by_hand", "strategy.data_parallel=none", "world_size=2")
    ((status, reason),) = statuses(clone, "spoiled", *by_hand)
    engine.write_text(whole)
    assert status == "error" and "sent 0 bytes a step along dp_replicate" in reason
