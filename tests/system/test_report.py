"""The report's numbers, units and ratios, its width, and hostile text, which stays text."""

import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len

from harness.cli.main import main
from harness.layout.layout import resolve_layout
from harness.records.provenance import versions
from harness.records.schema import COLUMNS, Record
from harness.records.store import write_record
from harness.report.columns import comparison_columns
from harness.report.labels import OTHER_OPTIONS, VARYING, column_title
from harness.report.lines import column_values, lines_of
from harness.report.markdown import escape
from harness.report.text import byte_unit, format_numbers
from harness.runner.config_columns import config_columns
from tests.support.commands import compose_config
from tests.support.example_records import FAILED, HOSTILE, MIB, mixed, record_of, records, row
from tests.support.processes import run_python
from tests.support.tables import changed, page, page_text, printed, terminal_cells

TORCH, OTHER = ("ddp", "torch", 0), ("ddp", "accelerate", 0)


def runs(*entries: tuple[tuple[str, str, int], dict[str, Any]], **shared: Any) -> list[Record]:
    """Return a run of each strategy, engine and stage with its changes."""
    return [record_of(row(number, *named, **shared | own)) for number, (named, own) in enumerate(entries)]


OLD = changed(records(), "ddp", parts={"versions": {"torch": "2.10.0"}})

PREDICTED = {"predicted_peak_bytes": 19 * MIB, "predicted_step_seconds": 0.05}

UNUSUAL = {"compile": True, "loss_chunks": 4, "dropout": 0.1, "fused_optimizer": False}

STALE = "† stale, recorded with other versions than are installed"

# Runs, the lines or the parts of lines that their page or the terminal has, and what both lack.
TABLES: dict[str, tuple[list[Record], str, str]] = {
    "a sweep": (
        records(),
        """| strategy | ranks | peak memory MiB | × peak memory | communication MiB | status |
| zero3 | 2 | 10.00 | 0.50 | 6.00 | ok |
| single | 1 | 20.00 | 1.00 | 0.00 | ok |
| fsdp_shard_grad_op | 2 |  |  |  | oom |
| strategy | ranks | tokens/s | timed runs | tokens/s per device | step ms | model state MiB | activations MiB |
| zero3 | 2 | 12,346 (n = 1) | 1 | 6,173 | 82.94 | 10.00 | 1.50 | 1.50 | 1.2e-7 | 4.6e-6 |
| run | parameters | × parameters | gradients | × gradients | optimizer state | × optimizer state | activations | × act
| × activations | peak memory | × peak memory | smallest peak of any rank |
| zero1 | 4.00 | 1.00 | 4.00 | 1.00 | 6.00 | 0.75 | 1.50 | 1.00 | 18.00 | 0.90 | 17.50 |
| zero2 | 4.00 | 1.00 | 2.00 | 0.50 | 6.00 | 0.75 | 1.50 | 1.00 | 16.00 | 0.80 | 15.50 |
| fsdp_full_shard | 2.00 | 0.50 | 2.00 | 0.50 | 4.00 | 0.50 | 1.50 | 1.00 | 9.00 | 0.45 | 8.50 |
| run | all_reduce on dp_replicate | all_gather on dp_shard | reduce_scatter on dp_shard | total | × total |
| ddp | 4.00 (3) |  |  | 4.00 | 1.00 |
| zero3 |  | 4.00 (7) | 2.00 (5) | 6.00 | 1.50 |
| run | layout | loss deviation | loss floor | gradient deviation | gradient floor | update deviation | update floor |
| ddp | proven | 1.2e-7 | 9.9e-8 | 4.6e-6 | 3.5e-6 | 2.3e-6 | 2.1e-6 | 16 |
## Unreadable records
x 2 data-parallel ranks: choose a multiple of 6
tiny (1,048,576 parameters); fp32; checkpointing none; 8 × 128 = 1,024 tokens per step; micro-batch 4; on cpu; ranks
                                            peak     ×  comm.
strategy            ranks           tok/s    MiB  peak    MiB  status
ddp                 2      16,000 (n = 1)  20.00  1.00   4.00  ok
zero3               2      12,346 (n = 1)  10.00  0.50   6.00  ok
single              1       8,000 (n = 1)  20.00  1.00   0.00  ok
fsdp_shard_grad_op  2                                          oom
more columns in the report: timed runs, tok/s /device, step ms, state MiB, activ. MiB, × comm., loss dev., grad dev.
fsdp_shard_grad_op oom: rank 1 ran out of memory
fsdp_no_shard refused: train.global_batch=8 is not a multiple""",
        "Predicted;Pipelines;bubble;skipped;state on the host;on the host are;dp_shard 2;choose…",
    ),
    "parallelisms": (
        mixed(),
        """| pp_1f1b | 2 | 12,346 (n = 1) | 1 | 6,173 | 82.94 | 0.329 | 0.125 | 16.00 | 1.50 | 1.00 | 1.2e-7 | 4.6e-6 |
| pp_gpipe | 4 | 12,346 (n = 1) | 1 | 6,173 | 82.94 | 0.329 | 0.375 | 16.00 | 1.50 | 1.00 | 1.2e-7 | 4.6e-6 |
| run | all_reduce on dp_replicate | all_reduce on pp | send on pp | all_reduce on tp | total | × total |
| tp on 2 ranks |  |  |  | 4.00 (3) | 4.00 | 1.00 |
| pp_gpipe on 4 ranks |  | 4.00 (3) | 0.50 (16) |  | 4.00 | 1.00 |
| run | rank | stages | layers | working ms | idle ms | bubble | bubble in theory | micro-batches in flight |
| pp_1f1b on 4 ranks | 3 | 3, 7 | 1, 2 | 43.00 | 20.00 | 3.500 | 0.375 | 1 | 1.00 |
| pp_gpipe on 2 ranks | 1 | 1, 3 | 1, 2 | 41.00 | 20.00 | 1.500 | 0.125 | 1 | 3.00 |
strategy  ranks           tok/s    MiB  peak    MiB  status
pp_1f1b   4      12,346 (n = 1)  20.00  1.00   4.00  ok
step ms, bubble, bubble theory, state MiB""",
        "| dp_replicate |",
    ),
    "degrees that strategy and ranks do not imply": (
        [
            *runs(
                *[(("fsdp_tp", "torch", 3), {"dp_shard": 8 // tp, "tp": tp}) for tp in (2, 4)],
                dp_replicate=1,
                world_size=8,
            ),
            record_of(row(9, "tp", "torch", 0, dp_replicate=1, dp_shard=1, tp=2)),
        ],
        """strategy  ranks  dp_shard  tp
fsdp_tp   8      4         2   12,346 (n = 1)  20.00
fsdp_tp   8      2         4   12,346 (n = 1)  20.00
tp        2      1         2   12,346 (n = 1)  20.00""",
        "dp_replicate  ",
    ),
    "predictions": (
        runs((TORCH, PREDICTED)),
        """| run | predicted peak memory MiB | measured peak memory MiB | error of the peak memory % |
| predicted step time ms | measured step time ms | error of the step time % |
| ddp | 19.00 | 20.00 | -5.0 | 50.00 | 82.94 | -39.7 |""",
        "| 19.00 | 1.00",
    ),
    "memory on the host": (
        runs(
            (TORCH, {"offloaded_bytes": 0, "offloaded_activation_bytes": 3 * MIB}),
            (("zero_offload", "deepspeed", 2), {"offloaded_bytes": 8 * MIB}),
        ),
        """| smallest peak of any rank | state on the host | activations on the host |
| 19.50 | 0.00 | 3.00 |
| 19.50 | 8.00 |  |
the state on the host is no part of the device
Activations on the host are the most""",
        "skipped",
    ),
    "skipped steps": (
        runs(
            (TORCH, {"skipped_steps": 0}),
            (("zero1", "deepspeed", 1), {}),
            (("fsdp_full_shard", "torch", 3), {"skipped_steps": 2}),
        ),
        """| steps proven | skipped steps |
| ddp | proven | 1.2e-7 | 9.9e-8 | 4.6e-6 | 3.5e-6 | 2.3e-6 | 2.1e-6 | 16 | 0 |
| zero1 | proven | 1.2e-7 | 9.9e-8 | 4.6e-6 | 3.5e-6 | 2.3e-6 | 2.1e-6 | 16 |  |
| fsdp_full_shard | proven | 1.2e-7 | 9.9e-8 | 4.6e-6 | 3.5e-6 | 2.3e-6 | 2.1e-6 | 16 | 2 |
because a gradient overflowed""",
        "on the host are",
    ),
    "no skipped steps": (runs((TORCH, {"skipped_steps": 0}), (OTHER, {})), "## Proof", "skipped steps"),
    "stale rows": (
        OLD,
        f"""{STALE} (torch 2.10.0 → {versions()["torch"]}): ddp
- **ddp**: torch 2.10.0 → {versions()["torch"]}
| ddp | 2 | 20.00 | 1.00 | 4.00 | ok † |
| zero1 | 2 | 18.00 | 0.90 | 4.00 | ok |
ddp                 2      16,000 (n = 1)  20.00  1.00   4.00  ok †""",
        "zero1: torch",
    ),
    "settings that are not the defaults": (
        runs((TORCH, UNUSUAL), (("fsdp_no_shard", "torch", 0), UNUSUAL)),
        "; compiled yes; loss chunks 4; fused optimizer no; dropout 0.1;",
        "| compiled |",
    ),
    "nothing ran": (
        runs(*[(("tp", "torch", 0), {"status": "refused", "reason": "no room", **FAILED})] * 2),
        "refused: no room",
        "tokens/s",
    ),
    "no runs": ([], "No runs are recorded.", "tokens"),
}


@pytest.mark.parametrize("name", TABLES)
def test_page_and_terminal_have_the_figures_of_the_runs(name: str) -> None:
    entries, present, absent = TABLES[name]
    text = "\n".join([page_text(entries, ["x is not a whole record"]), *map(str.rstrip, printed(entries, 120))])
    assert [line for line in present.splitlines() if line not in text] == []
    assert [words for words in absent.split(";") if words and words in text] == []


def test_rows_stale_for_the_same_reason_share_a_note() -> None:
    old = changed(records(), parts={"versions": {"code": "0123456789ab"}})
    assert sum(line.startswith(f"{STALE} (code 0123456789ab → ") for line in printed(old, 120)) == 1
    assert page_text(old).split("## Stale rows")[1].split("## ")[0].count("- **") == 1


def many_long(number: int) -> list[Record]:
    """Return rows whose names are long and wide and whose numbers are large, and which vary in everything."""
    changes = [
        {"model": f"a-model-of-a-long-name-{n}", "measured_on": "NVIDIA H200 " * (1 + n % 4), "repeat": n}
        | {"precision": ("bf16_mixed", "fp32")[n % 2], "checkpointing": f"every_{n}_of_the_層"}
        | {"seq_len": 131072 * (n + 1), "peak_allocated_bytes": 2**40 + n, "tokens_per_second": 1e7 + n}
        | {"status": ("ok", "interrupted")[n % 2], "reason": "x " * 200, "world_size": 1024 + n}
        for n in range(number)
    ]
    return runs(*[((f"fsdp_of_a_long_名前_{n}", "torch", 3), own) for n, own in enumerate(changes)])


@pytest.mark.parametrize("width", [50, 60, 80, 120, 160])
@pytest.mark.parametrize("entries", [records(), mixed(), many_long(25)], ids=["ten", "mixed", "long"])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(entries: list[Record], width: int) -> None:
    """Narrow terminals have fewer columns, and their cells are those of wide ones."""
    lines, wide = (printed(entries, columns) for columns in (width, 400))
    assert max(map(cell_len, lines)) <= width
    lines = lines[next(place for place, line in enumerate(lines) if line.startswith("str")) :]
    names = [entry.row["strategy"] for entry in entries if entry.row["status"] == "ok"]
    assert sum(line[:4].strip() in {name[:4] for name in names} for line in lines) >= len(names)
    for name in names if len(entries) < 25 else ():
        assert set(terminal_cells(lines, name)) <= set(terminal_cells(wide[2:], name))
    assert any(line.startswith("more columns in the report: ") for line in lines)


GRAPHS = [
    replace(entry, config={"strategy": {"options": options}, "tracking": {"name": entry.row["run_id"]}})
    for entry, options in zip(
        runs(*[(TORCH, {})] * 3, (("zero1", "deepspeed", 1), {})),
        ({}, {"static_graph": True}, {"static_graph": False}, {}),
        strict=True,
    )
]

FULL = runs((TORCH, {}), (("tp", "torch", 0), {}), checkpointing="full")


@pytest.mark.parametrize(
    ("entries", "header", "cells", "labels"),
    [
        (runs((TORCH, {}), (OTHER, {})), "engine", "torch|accelerate", "ddp torch|ddp accelerate"),
        (
            runs((TORCH, {"compile": False}), (TORCH, {"compile": True})),
            *("compiled", "no|yes", "ddp|ddp compiled yes"),
        ),
        (
            runs(*[(TORCH, {"checkpointing_every": every}) for every in (2, 4)], checkpointing="every_n"),
            *("checkpointing every", "2|4"),
            "ddp + every_n checkpointing in 1 of 2 layers|ddp + every_n checkpointing in 1 of 4 layers",
        ),
        (  # alike in every column: -: marks a key that is missing
            GRAPHS[:3],
            *("other options", "static_graph=-|static_graph=True|static_graph=False"),
            "ddp static_graph=-|ddp static_graph=True|ddp static_graph=False",
        ),
        (FULL[:1], "", "", "ddp + full checkpointing"),
        (FULL, "", "", "ddp|tp"),  # what all strategies share is in no label
        ([*FULL, record_of(row(5, *TORCH))], "", "", "ddp + full checkpointing|tp + full checkpointing|ddp"),
        ([GRAPHS[1], GRAPHS[3]], "", "", "ddp|zero1"),
        (
            TABLES["degrees that strategy and ranks do not imply"][0],
            *("", "", "fsdp_tp dp_shard 4 tp 2|fsdp_tp dp_shard 2 tp 4|tp"),
        ),
    ],
)
def test_rows_that_differ_have_distinct_labels(entries: list[Record], header: str, cells: str, labels: str) -> None:
    """Rows differ in the terminal, on the page and in their labels; a column is shown only if it varies."""
    assert "|".join(map(str, column_values(lines_of(entries), "label"))) == labels
    text = page_text(entries)
    assert all(f"| {label} |" in text for label in labels.split("|")) or len(entries) == 1
    columns = {column.title: column.cells for column in comparison_columns(lines_of(entries), short=True)}
    assert "other options" in columns if header == "other options" else "other options" not in columns
    if header:
        assert "|".join(columns[header]) == cells and f"| {header} |" in text
        assert f"| {header} |" not in page_text(entries[:1])
        shown = [line for line in printed(entries, 120) if line.startswith(entries[0].row["strategy"] + " ")]
        assert all(cell in line for cell, line in zip(cells.split("|"), shown, strict=True))


def test_every_varying_column_distinguishes_rows_by_itself() -> None:
    """Every column that describes how a row ran is an axis: two rows that differ in it have different labels."""
    other = {str: ("a", "b"), int: (1, 2), float: (0.0, 0.5), bool: (False, True)}
    for name in set(VARYING) - {OTHER_OPTIONS}:
        pair = [record_of(row(n, *TORCH) | {name: value}) for n, value in enumerate(other[COLUMNS[name].type])]
        lines = lines_of([replace(entry, rank_entries=[]) for entry in pair])
        assert len(set(column_values(lines, "label"))) == 2, name
        assert column_title(name, short=True) in [column.title for column in comparison_columns(lines, short=True)]
    words = ("model=moe_tiny", "checkpointing=every_n", "checkpointing.every=2", "adapter=lora")
    columns: set[str] = set()
    float8 = ("fsdp_full_shard", "precision=fp8_mixed", "precision.float8_all_gather=true")
    for overrides in (("tp_pp", *words), ("cp_ulysses", "train.save=sync"), ("zero3_hpz",), float8):
        config = compose_config("strategy=" + overrides[0], *overrides[1:])
        columns |= config_columns(config, resolve_layout(config.strategy, 4)).keys()
    others = {"name", "strategy", "checkpointing", "grad_accumulation", "active_parameters"}
    others |= {"trained_parameters", "frozen_parameters"}
    assert columns - others == set(VARYING) - {"measured_on", OTHER_OPTIONS}


BY_NAME = {entry.row["strategy"]: entry for entry in records()}

DDP, SINGLE, ZERO1, ZERO3 = (BY_NAME[name] for name in ("ddp", "single", "zero1", "zero3"))

WIDE = DDP.with_row(world_size=4, peak_allocated_bytes=5 * MIB, run_id="wide")

SMALL = ZERO3.with_row(model="small", run_id="other")


@pytest.mark.parametrize(
    ("entries", "ratios"),
    [
        ([ZERO3, DDP, SINGLE], [0.5, 1.0, 1.0]),
        ([ZERO3, SINGLE], [0.5, 1.0]),
        ([ZERO1, ZERO3], [1.0, 10 / 18]),
        ([DDP, WIDE, ZERO3], [1.0, 0.25, 0.5]),  # on the fewest ranks
        ([DDP, WIDE, ZERO3, SINGLE.with_row(peak_allocated_bytes=10 * MIB)], [2.0, 0.5, 1.0, 1.0]),
        ([DDP, SMALL], [None, None]),
        ([DDP, ZERO3, SMALL], [1.0, 0.5, None]),
        ([DDP, ZERO3, *(SMALL.with_row(model=f"m{n}", run_id=str(n)) for n in range(3))], [None] * 5),  # most others
        ([ZERO1, DDP.with_row(status="error"), ZERO3], [1.0, None, 10 / 18]),
        ([DDP.with_row(checkpointing="full", peak_allocated_bytes=10 * MIB, run_id="full"), DDP], [0.5, 1.0]),
    ],
)
def test_a_table_has_one_baseline_or_none(entries: list[Record], ratios: list[float | None]) -> None:
    """It is ddp, then single, then the first; ddp on several numbers of ranks gives way to single."""
    assert column_values(lines_of(entries), "peak_allocated_bytes_ratio") == ratios


def test_the_candidate_with_the_fewest_options_is_the_baseline() -> None:
    changes = ({"checkpointing": "full"}, {"compile": True}, {"compile": False}, {"dropout": 0.0})
    lines = lines_of(runs(*[(TORCH, change) for change in changes]))
    assert column_values(lines, "baseline")[0] == column_values(lines, "label")[2]


def test_a_single_row_is_compared_with_the_baseline_of_all() -> None:
    lines = printed(records(), 120, only={f"{5:010x}"})
    assert " ".join(terminal_cells(lines, "zero3")[:7]) == "zero3 2 12,346 (n = 1) 10.00"
    assert "× is the ratio to ddp" in " ".join(lines) and not any(line.startswith("ddp") for line in lines)


def test_units_and_small_numbers() -> None:
    units = [byte_unit([size]).name for size in (2**30, 2**30 - 1, 2**20 - 1, 1023, None)]
    assert units == ["GiB", "MiB", "KiB", "B", "B"]
    assert format_numbers([3 * 2**30 // 2, None, 1, 0], byte_unit([2**30])) == ["1.50", "", "<0.01", "0.00"]
    assert format_numbers([1023 * MIB, MIB], byte_unit([1023 * MIB])) == ["1,023", "1"]


def test_hostile_text_stays_text() -> None:
    changes = {"model": HOSTILE, "status": "error", "reason": HOSTILE, "checkpointing": HOSTILE}
    (hostile,) = runs(((HOSTILE, "torch", 0), changes))
    hostile = replace(hostile, environment={HOSTILE: HOSTILE}, proof={"layout": HOSTILE})
    text = page(HOSTILE, [hostile, *records()], [HOSTILE])
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    inline = {child.type for token in tokens for child in token.children or []}
    assert inline <= {"text", "text_special", "strong_open", "strong_close"}
    assert not any(token.type.startswith(("html", "fence", "code")) for token in tokens)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text) and "http://" not in text
    assert "<script>alert(1)</script>" in "".join(child.content for token in tokens for child in token.children or [])
    lines = printed([hostile, *records()], 120)
    assert not any("\x1b" in line for line in lines) and any("[red]r[/red] :smile:" in line for line in lines)
    assert "\\|" in escape("a|b") and escape("fsdp_full_shard 2.13.0+cpu") == "fsdp_full_shard 2.13.0+cpu"


def test_the_command_writes_its_files_and_is_quick(tmp_path: Path) -> None:
    for entry in records():
        write_record(tmp_path / "demo" / entry.row["run_id"], entry)
    results = tmp_path / "demo"
    (results / "broken").mkdir()
    (results / "broken" / "record.json").write_text("{")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = run_python(tmp_path, "-m", "harness", "report", str(results))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0, process.stderr
    assert after.ru_utime - before.ru_utime < 8  # of processor time: some 3 s with the drawing of charts
    lines = process.stdout.splitlines()
    assert lines[-4:] == [str(results / name) for name in ("runs.csv", "runs.parquet", "report.md", "report.html")]
    assert len((results / "runs.csv").read_text().splitlines()) == 11
    assert (results / "report.md").read_text().startswith("# Memory and communication of ten strategies for tiny")
    assert process.stderr.startswith("skipped: ") and "broken/record.json is not a whole record" in process.stderr
    assert max(cell_len(line) for line in lines[:-4]) <= 120


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_bad_directories_are_reported_in_a_single_line_with_status_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "results/NAME" in err
