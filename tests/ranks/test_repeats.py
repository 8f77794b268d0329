"""Repeated runs: each is made, they are one line of a comparison, and their ranges decide which differences count."""

import json
import re
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.config.fingerprint import result_affecting_keys
from harness.config.hydra import expand_repeats
from harness.records.schema import Record
from harness.report.columns import comparison_columns
from harness.report.lines import column_values, labels_by, lines_of
from harness.report.view import merge_repeats
from tests.support.commands import Harness, read_rows
from tests.support.example_records import FAILED, MIB, record_of, row
from tests.support.tables import printed, terminal_cells

SMALL = ("strategy=ddp", "train.seq_len=32", "train.steps=3", "train.warmup_steps=1")


def runs(strategy: str, first: int, speeds: list[float | None], **changes: Any) -> list[Record]:
    """Return a run for each speed, as repeats 0, 1, ... of one configuration; None makes a run that failed."""
    engine, stage = ("deepspeed", int(strategy[4])) if strategy.startswith("zero") else ("torch", 0)
    records = []
    for repeat, speed in enumerate(speeds):
        figures = FAILED | {"status": "error", "reason": "RuntimeError: shards differ"}
        if speed is not None:
            figures = {"tokens_per_second": speed, "tokens_per_second_per_device": speed / 2}
            figures |= {"step_seconds": 1024 / speed, "peak_allocated_bytes": (20 + repeat) * MIB}
        records.append(record_of(row(first + repeat, strategy, engine, stage, repeat=repeat, **(changes | figures))))
    return records


def repeated() -> list[Record]:
    """Return four lines that end ok, one of them except for a run, and one that fails as a whole."""
    entries = [
        *runs("ddp", 1, [16000.0, 15000.0, 20000.0], mfu=0.413),
        *runs("zero1", 11, [15500.0, None, 15600.0], mfu=0.4),
        *runs("zero3", 21, [9000.0, 9100.0, 9050.0], mfu=0.25),
        *runs("zero2", 31, [17000.0], step_seconds_iqr_ratio=0.01),
        *runs("single", 41, [None, None], world_size=1),
    ]
    entries[7].row["noise_warning"] = "other processes used 0.8 of 2 cores"
    entries[8].row["noise_warning"] = ""
    return entries


GOLDEN = """\
tiny (1,048,576 parameters); fp32; checkpointing none; 8 × 128 = 1,024 tokens per step; micro-batch 4; on cpu; ranks
launched as processes; × is the ratio to ddp
                                             ×   peak     ×  comm.
strategy  ranks                   tok/s  tok/s    MiB  peak    MiB  status
ddp       2      16,000 [15,000–20,000]   1.00  22.00  1.00   4.00  ok
zero1     2              15,550 (n = 2)         22.00  1.00   4.00  ok 2/3
zero3     2               9,025 (n = 2)         22.00  1.00   4.00  ok
zero2     2              17,000 (n = 1)         20.00  0.91   4.00  ok
single    1                                                         error
more columns in the report: timed runs, tok/s /device, MFU %, step ms, state MiB, activ. MiB, × comm., loss dev., grad
dev.
tok/s: tokens per second; peak: peak memory of the fullest rank; comm.: bytes that one rank sends per step
[slowest–fastest run] stands behind the median of at least three undisturbed runs
n is the number of undisturbed runs: with fewer than three, speeds are not ranked
zero1 repeat 1, single error: RuntimeError: shards differ
‡ noise warning (other processes used 0.8 of 2 cores): zero3 repeat 1
"""


def test_repeats_of_a_run_are_one_row() -> None:
    """The line of ddp has its median, not its mean of 17,000, and zero3 the median of its undisturbed runs."""
    assert [line.rstrip() for line in printed(repeated(), 120)] == GOLDEN.splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_narrow_tables_omit_columns_and_keep_numbers(width: int) -> None:
    lines = printed(repeated(), width)
    assert max(map(len, lines)) <= width
    assert any(line.startswith("ddp") and "16,000 [15,000–20,000]" in line for line in lines)


SPEEDS = ([1000.0], [1200.0, 1210.0], [990.0, 1013.0, 1000.0], [1020.0, 1020.0, 1100.0], [1200.0, 900.0, 1050.0])


def test_a_ratio_needs_ranked_speeds_and_is_marked_within_run_to_run_variation() -> None:
    """Each pair of a line and its baseline is a table of its own."""
    for own, base in product(SPEEDS, SPEEDS):
        entries = [*runs("zero1", 1, [*own]), *runs("ddp", 50, [*base])]
        columns = comparison_columns(lines_of(merge_repeats(entries)), short=True)
        shown = next((column.cells for column in columns if column.title == "× tok/s"), ["", ""])
        assert shown[1] == ("1.00" if len(base) > 2 else "")
        if min(len(own), len(base)) < 3:
            assert shown[0] == ""
            continue
        gap = max(min(own) - max(base), min(base) - max(own))
        is_certain = gap > max(max(own) - min(own), max(base) - min(base)) / 2
        ratio = statistics.median(own) / statistics.median(base)
        assert shown[0] == f"{ratio:.2f}" + "~" * (not is_certain)


def changed(record: Record, **parts: Any) -> Record:
    """Return repeat 1 of a record, with whole parts of it replaced."""
    return replace(record.with_row(repeat=1, run_id="other"), **parts)


def test_only_runs_that_differ_in_repeat_alone_are_merged() -> None:
    (first,) = runs("ddp", 1, [1000.0])
    first.config.update({"train": {"seed": 0}, "repeat": 0, "name": "a", "force": False})
    assert len(merge_repeats([first, changed(first)])) == 1
    assert (
        len(merge_repeats([first, changed(first, config=first.config | {"repeat": 1, "name": "b", "force": True})]))
        == 1
    )
    apart = [
        changed(first, config={"train": {"seed": 1}}),
        changed(first, versions=first.versions | {"torch": "2.0.0"}),
        changed(first, environment=first.environment | {"cores": 64}),
        changed(first, row=first.row | {"repeat": 1, "world_size": 4}),
        first.with_row(run_id="of another corpus"),
    ]
    for other in apart:
        lines = merge_repeats([first, other])
        assert [line.runs for line in lines] == [[first], [other]]
        assert len(set(column_values(lines_of(lines), "label"))) == 2
    # The run was refused because no configuration could be made, so the row has neither repeat nor world.
    bare = {"run_id": "x", "name": "r", "status": "refused", "reason": "train.steps=0", "strategy": "ddp"}
    config = {"train": {"steps": 0}}
    refused = [Record(bare | {"run_id": str(n)}, config | {"repeat": n}) for n in range(3)]
    assert [len(line.runs) for line in merge_repeats(refused)] == [3]
    values = {"data": {"cache": "/a", "path": "x"}, "measure": {"memory_snapshot": True}, "cluster": {"name": "local"}}
    assert result_affecting_keys(values) == {"data": {"path": "x"}, "cluster": {}}


def test_parts_of_a_whole_come_from_one_run() -> None:
    entries = runs("ddp", 1, [1000.0, 1100.0])
    for entry, part in zip(entries, (8, 9), strict=True):
        entry.row.update({"at_peak_parameter_bytes": 4 * MIB, "at_peak_other_bytes": part * MIB, "idle_seconds": part})
        entry.row["noise_warning"] = f"steps {part}"
    (line,) = merge_repeats(entries)
    assert (line.row["at_peak_parameter_bytes"], line.row["at_peak_other_bytes"]) == (4 * MIB, None)
    assert line.row["idle_seconds"] is None and line.row["peak_allocated_bytes"] == 21 * MIB
    assert labels_by(lines_of([line]), lambda line: line.get("noise_warning")) == {"steps 8; steps 9": ["ddp"]}
    assert column_values(lines_of(entries), "label") == ["ddp repeat 0", "ddp repeat 1"]


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ({"repeat": 0, "repeats": 1}, [0]),
        ({"repeat": 0, "repeats": 3}, [0, 1, 2]),
        ({"repeat": 5, "repeats": 2}, [5, 6]),
        ({"repeat": 0, "repeats": 0}, [0]),
        ({"repeat": "x", "repeats": 2}, ["x"]),
        ({"repeat": 0, "repeats": True}, [0]),
    ],
)
def test_values_of_each_repeat(values: dict[str, Any], numbers: list[Any]) -> None:
    each = expand_repeats(values | {"name": "r"})
    assert [entry["repeat"] for entry in each] == numbers
    assert all(entry["repeats"] == (1 if len(numbers) > 1 else values["repeats"]) for entry in each)


@pytest.mark.long
def test_every_repeat_is_run_and_recorded(harness: Harness, tmp_path: Path) -> None:
    done = harness("name=r", "repeats=2", *SMALL)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "results", "r")
    assert sorted(rows.repeat) == [0, 1] and set(rows.status) == {"ok"} and rows.run_id.nunique() == 2
    times = {tuple(step["seconds"] for step in steps_of(tmp_path / "results" / "r" / name)) for name in rows.run_id}
    assert len(times) == 2  # two measurements, not one shown twice
    assert "[1/2]" in done.stderr and "[2/2]" in done.stderr
    lines = done.stdout.splitlines()
    header = next(line for line in lines if line.startswith("strategy")).split()
    shown = [cell for cell in terminal_cells(lines, "ddp") if cell not in "†‡"]  # three steps are too few to be ranked
    assert sum(x.startswith("ddp ") for x in lines) == 1
    assert shown[header.index("tok/s")] == f"{rows.tokens_per_second.median():,.0f}"

    # What is on file is not run again, and a repeat that ends otherwise is a row too.
    more = harness("name=r", "repeats=3", "timeout_seconds=0.1", *SMALL)
    assert more.returncode == 1 and more.stderr.count("is recorded") == 2
    rows = read_rows(tmp_path / "results", "r")
    assert dict(zip(rows.repeat, rows.status, strict=True)) == {0: "ok", 1: "ok", 2: "timeout"}
    assert " ok 2/3" in next(line for line in more.stdout.splitlines() if line.startswith("ddp "))
    assert "\nddp repeat 2 timeout: " in more.stdout


def test_repeats_of_runs_and_of_refused_runs_in_a_sweep(harness: Harness, tmp_path: Path) -> None:
    done = harness(
        "-m",
        "name=s",
        "strategy=ddp,dp",
        "train.steps=1,0",
        "repeat=3",
        "repeats=2",
        *SMALL[1:2],
        "train.warmup_steps=1",
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "results", "s")
    assert len(rows) == 8 and sorted(rows.status) == ["ok"] * 2 + ["refused"] * 6
    assert sorted(rows[rows.status == "ok"].repeat) == [3, 4]
    assert "[8/8]" in done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith(("ddp ", "dp "))]
    ends = [re.findall(r"^d?dp|steps=\d|ok|refused", line)[:3] for line in table if "reason" not in line]
    assert [end for end in ends if end[-1] in ("ok", "refused")][:4] == [
        ["ddp", "steps=1", "ok"],
        *([name, f"steps={n}", "refused"] for name, n in (("ddp", 0), ("dp", 1), ("dp", 0))),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"), [("0", "is not a positive whole number"), ("x", "is not a whole number")]
)
def test_an_invalid_number_of_repeats_is_a_one_line_error(
    wrong: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([f"results_dir={tmp_path}/results", f"repeats={wrong}"]) == 2
    printed = capfd.readouterr().err
    assert printed.startswith(f"repeats={wrong} {message}") and printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
