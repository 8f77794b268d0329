"""The report's numbers, units and ratios, its width, and hostile text, which stays text."""

import re
import resource
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len

from harness.cli.main import main
from harness.layout.layout import resolve_layout
from harness.records.columns import COLUMN_TYPES
from harness.records.provenance import versions
from harness.records.schema import Record
from harness.records.store import write_record
from harness.report import markdown
from harness.report.comparison_columns import comparison_columns
from harness.report.labels import OTHER_OPTIONS, VARYING, column_title
from harness.report.lines import column_values, lines_of
from harness.report.markdown import escape
from harness.report.sections import sections
from harness.report.text import byte_unit, format_numbers
from harness.report.view import View
from harness.runner.config_columns import config_columns
from tests.support.commands import compose_config
from tests.support.example_records import FAILED, HOSTILE, MIB, mixed, record_of, records, row
from tests.support.tables import printed, terminal_cells


def stored(results_dir: Path, entries: list[Record]) -> Path:
    for record in entries:
        write_record(results_dir / record.row["run_id"], record)
    return results_dir


def page(name: str, entries: list[Record], problems: list[str]) -> str:
    """Return report.md of these records."""
    return markdown.page(name, sections(View(name, entries, problems)))


def grids(text: str) -> dict[str, list[dict[str, str]]]:
    """Return every table of a page by its heading, as a Markdown parser reads it, with a dict for each row."""
    tables: dict[str, list[dict[str, str]]] = {}
    heading = ""
    lines: list[list[str]] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for before, token in pairwise(tokens):
        if token.type == "inline" and before.type == "heading_open":
            heading = token.content.split(" (")[0]
        if token.type == "inline" and token.content == "More columns:":
            heading = "More columns"
        if token.type == "inline" and before.type in ("th_open", "td_open"):
            lines[-1].append("".join(child.content for child in token.children or []))
        if token.type == "tr_open":
            lines.append([])
        if token.type == "table_open":
            lines = []
        if token.type == "table_close":
            tables.setdefault(heading, [dict(zip(lines[0], cells, strict=True)) for cells in lines[1:]])
    return tables


def test_the_terminal_shows_eight_columns() -> None:
    """The others are in the report, and the speeds of single runs are not compared."""
    lines = printed(records(), 120)
    assert lines[0].startswith(
        "tiny (1,048,576 parameters); fp32; checkpointing none; 8 × 128 = 1,024 tokens per step; micro-batch 4; on cpu;"
    )
    alone = ["(n", "=", "1)"]
    assert terminal_cells(lines, "ddp") == ["ddp", "2", "16,000", *alone, "20.00", "1.00", "4.00", "ok"]
    assert terminal_cells(lines, "zero3") == ["zero3", "2", "12,346", *alone, "10.00", "0.50", "6.00", "ok"]
    assert terminal_cells(lines, "single") == ["single", "1", "8,000", *alone, "20.00", "1.00", "0.00", "ok"]
    repeated = [
        record_of(row(10 * n + repeat, name, "torch", 0, repeat=repeat, tokens_per_second=speed + repeat))
        for n, (name, speed) in enumerate({"ddp": 16000.0, "tp": 8000.0}.items())
        for repeat in range(3)
    ]
    shown = terminal_cells(printed(repeated, 120), "tp")
    assert shown == ["tp", "2", "8,001", "[8,000–8,002]", "0.50", "20.00", "1.00", "4.00", "ok"]
    (more,) = (line for line in lines if line.startswith("more columns in the report: "))
    assert "step ms, state MiB, activ. MiB" in more


def test_header_names_the_units_of_the_columns_below() -> None:
    lines = printed(records(), 120)
    bottom = next(number for number, line in enumerate(lines) if line.startswith("strategy"))
    starts = [match.span() for match in re.finditer(r"\S+", lines[bottom])]
    ddp = next(line for line in lines if line.startswith("ddp "))
    over = {
        ddp[:end].split()[-1]: (lines[bottom - 1][:end].split() or [""])[-1] + " " + lines[bottom][start:end]
        for start, end in starts
    }
    assert over["20.00"] == "peak MiB" and over["4.00"] == "comm. MiB" and over["1)"] == " tok/s"
    assert over["1.00"] == "× peak" and over["ok"].endswith(" status")


def test_failures_remain_in_order_with_their_reasons() -> None:
    lines = printed(records(), 120)
    assert terminal_cells(lines, "fsdp_shard_grad_op") == ["fsdp_shard_grad_op", "2", "oom"]
    assert "fsdp_shard_grad_op oom: rank 1 ran out of memory" in lines
    refusal = next(line for line in lines if line.startswith("fsdp_no_shard refused:"))
    assert cell_len(refusal) <= 120
    failures = page("demo", records(), []).split("## Failures")[1]
    assert "x 2 data-parallel ranks: choose a multiple of 6" in failures and "choose…" not in failures


def many_long(number: int) -> list[Record]:
    """Return rows whose names are long and wide and whose numbers are large, and which vary in everything."""
    changes = [
        {"model": f"a-model-of-a-long-name-{n}", "measured_on": "NVIDIA H200 " * (1 + n % 4), "repeat": n}
        | {
            "precision": ("bf16_mixed", "fp32")[n % 2],
            "checkpointing": f"every_{n}_of_the_層",
            "seq_len": 131072 * (n + 1),
        }
        | {"peak_allocated_bytes": 2**40 + n, "tokens_per_second": 1e7 + n, "reason": "x " * 200}
        | {"status": ("ok", "interrupted")[n % 2], "world_size": 1024 + n, "global_batch": 4096 * (n + 1)}
        for n in range(number)
    ]
    return [record_of(row(n, f"fsdp_of_a_long_名前_{n}", "torch", 3, **change)) for n, change in enumerate(changes)]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("entries", [records(), many_long(25)], ids=["ten", "long"])
def test_no_line_is_wider_than_the_terminal(entries: list[Record], width: int) -> None:
    lines = printed(entries, width)
    assert max(map(cell_len, lines)) <= width
    rows = [line for line in lines if line.split()[0] in ("zero3", "ddp", "single") or line.startswith("fsdp_")]
    assert len(rows) >= len([entry for entry in entries if entry.row["status"] == "ok"])


def test_a_sweep_in_which_nothing_ran_has_a_report() -> None:
    refused = [row(number, "tp", "torch", 0, status="refused", reason="no room", **FAILED) for number in range(2)]
    for entry in refused:
        entry |= dict.fromkeys(key for key in entry if key.endswith(("_seconds", "_bytes", "_flops")))
    page = markdown.page("refused", sections(View("refused", [record_of(entry) for entry in refused])))
    assert "refused" in page and "no room" in page


def test_narrow_terminals_drop_columns_but_cut_no_number() -> None:
    wide, narrow = printed(records(), 120), printed(records(), 50)
    assert terminal_cells(narrow, "zero3")[:3] == ["zero3", "12,346", "(n"]
    for strategy in ("ddp", "zero3", "single"):
        assert set(terminal_cells(narrow, strategy)) <= set(terminal_cells(wide, strategy))
    assert any(line.startswith("more columns in the report: ") and "comm. MiB" in line for line in narrow)


def test_degrees_are_hidden_where_strategy_and_ranks_imply_them() -> None:
    for width in (80, 120, 160):
        lines = printed(mixed(), width)
        header = next(line for line in lines if line.startswith("strategy")).split()
        assert header[:3] == ["strategy", "ranks", "tok/s"] and max(map(cell_len, lines)) <= width
        assert not {"dp_replicate", "dp_shard", "tp", "cp", "pp", "bubble"} & set(header)
    assert [line.split()[:2] for line in lines if line.startswith("pp_")] == (
        [["pp_1f1b", "2"], ["pp_1f1b", "4"], ["pp_gpipe", "2"], ["pp_gpipe", "4"]]
    )
    assert columns_of(mixed())["bubble"][4:] == ["0.329"] * 4 and "bubble" not in columns_of(records())
    assert columns_of(mixed())["bubble theory"][4:] == ["0.125", "0.375"] * 2


def test_degrees_are_shown_where_strategy_and_ranks_do_not_imply_them() -> None:
    rows = [
        row(n, "fsdp_tp", "torch", 3, world_size=8, dp_replicate=1, dp_shard=8 // tp, tp=tp)
        for n, tp in enumerate((2, 4))
    ]
    entries = [record_of(entry) for entry in (*rows, row(9, "tp", "torch", 0, dp_replicate=1, dp_shard=1, tp=2))]
    lines = printed(entries, 200)
    assert next(line for line in lines if line.startswith("strategy")).split()[:4] == (
        ["strategy", "ranks", "dp_shard", "tp"]
    )
    assert [terminal_cells(lines, name)[:4] for name in ("fsdp_tp", "tp")] == (
        [["fsdp_tp", "8", "4", "2"], ["tp", "2", "1", "2"]]
    )
    assert column_values(lines_of(entries), "label") == [
        "fsdp_tp dp_shard 4 tp 2",
        "fsdp_tp dp_shard 2 tp 4",
        "tp",
    ]


TORCH, OTHER = ("ddp", "torch", 0), ("ddp", "accelerate", 0)

STAGES = {"data_parallel": "fsdp", "dp_shard": 2, "pp": 2, "world_size": 4}


@pytest.mark.parametrize(
    ("several", "header", "cells", "labels"),
    [
        ([(TORCH, {}), (OTHER, {})], "engine", ["torch", "accelerate"], ["ddp torch", "ddp accelerate"]),
        (
            [(TORCH, {"compile": False}), (TORCH, {"compile": True})],
            "compiled",
            ["no", "yes"],
            ["ddp", "ddp compiled yes"],
        ),
        (
            [(("fsdp_pp", "torch", stage), STAGES) for stage in (2, 3)],
            "ZeRO",
            ["2", "3"],
            ["fsdp_pp ZeRO 2", "fsdp_pp ZeRO 3"],
        ),
        (
            [(TORCH, {"checkpointing": "every_n", "checkpointing_every": every}) for every in (2, 4)],
            "checkpointing every",
            ["2", "4"],
            ["ddp + every_n checkpointing in 1 of 2 layers", "ddp + every_n checkpointing in 1 of 4 layers"],
        ),
        (
            [(("cp", "torch", 0), {"data_parallel": data_parallel}) for data_parallel in ("none", "fsdp")],
            "data_parallel",
            ["none", "fsdp"],
            ["cp data_parallel none", "cp data_parallel fsdp"],
        ),
        (
            [(("tp", "torch", 0), {"vocabulary_parallel": cut}) for cut in (True, False)],
            "vocabulary parallel",
            ["yes", "no"],
            ["tp vocabulary parallel yes", "tp vocabulary parallel no"],
        ),
    ],
    ids=["engine", "compile", "zero_stage", "every", "data_parallel", "vocabulary"],
)
def test_rows_that_differ_have_distinct_labels(
    several: list[tuple[Any, dict[str, Any]]], header: str, cells: list[str], labels: list[str]
) -> None:
    """Rows differ in the terminal, on the page and in their labels; a column is shown only if it varies."""
    entries = [record_of(row(n, *named, **changes)) for n, (named, changes) in enumerate(several)]
    assert_distinguished(entries, header, cells, labels)
    assert header not in columns_of(entries[:1]) and header not in grids(page("demo", entries[:1], []))["Comparison"][0]


def columns_of(entries: list[Record]) -> dict[str, list[str]]:
    return {column.title: column.cells for column in comparison_columns(lines_of(entries), short=True)}


def assert_distinguished(entries: list[Record], header: str, cells: list[str], labels: list[str]) -> None:
    assert column_values(lines_of(entries), "label") == labels
    assert columns_of(entries)[header] == cells
    lines = printed(entries, 120)
    assert max(map(cell_len, lines)) <= 120 and header in " ".join(lines)
    shown = [line for line in lines if line.startswith(entries[0].row["strategy"] + " ")]
    assert len(set(shown)) == len(entries) and all(cell in line for cell, line in zip(cells, shown, strict=True))
    tables = grids(page("demo", entries, []))
    assert [line[header] for line in tables["Comparison"]] == cells
    assert [line["run"] for line in tables["Memory"]] == labels


def test_every_varying_column_distinguishes_rows_by_itself() -> None:
    """Every column that describes how a row ran is an axis: two rows that differ in it have different labels."""
    other = {str: ("a", "b"), int: (1, 2), float: (0.0, 0.5), bool: (False, True)}
    for name in set(VARYING) - {OTHER_OPTIONS}:
        pair = [record_of(row(n, *TORCH) | {name: value}) for n, value in enumerate(other[COLUMN_TYPES[name]])]
        alike = [replace(entry, rank_entries=[]) for entry in pair]
        assert len(set(column_values(lines_of(alike), "label"))) == 2 and column_title(name, short=True) in columns_of(
            alike
        ), name
    config = compose_config("strategy=tp_pp", "checkpointing=every_n", "checkpointing.every=2")
    columns = config_columns(config, resolve_layout(config.strategy, 4)).keys()
    others = {"name", "strategy", "checkpointing", "grad_accumulation"}
    assert columns - others == set(VARYING) - {"measured_on", OTHER_OPTIONS}


def test_rows_alike_in_all_columns_are_distinguished_by_configuration_keys() -> None:
    """Rows alike in every column are distinguished by keys of their configurations; -: marks a missing key."""
    entries = [record_of(row(n, *TORCH)) for n in range(3)] + [record_of(row(3, "zero1", "deepspeed", 1))]
    for entry, options in zip(entries, ({}, {"static_graph": True}, {"static_graph": False}, {}), strict=True):
        entry.config.update({"strategy": {"options": options}, "tracking": {"name": entry.row["run_id"]}})
    cells = [f"static_graph={value}" for value in ("-", "True", "False")]
    assert_distinguished(entries[:3], "other options", cells, [f"ddp {text}" for text in cells])
    assert column_values(lines_of(entries), "label")[3] == "zero1"
    assert "other options" not in columns_of([entries[1], entries[3]])


def test_shared_settings_are_mentioned_where_they_are_not_the_defaults() -> None:
    unusual = {"compile": True, "loss_chunks": 4, "dropout": 0.1, "fused_optimizer": False}
    entries = [record_of(row(n, name, "torch", 0, **unusual)) for n, name in enumerate(("ddp", "fsdp_no_shard"))]
    options = ["compiled yes", "loss chunks 4", "fused optimizer no", "dropout 0.1"]
    assert printed(entries, 400)[0].split("; ")[-5:-1] == options


def test_a_single_row_is_compared_with_the_baseline_of_all() -> None:
    lines = printed(records(), 120, only={f"{5:010x}"})
    assert terminal_cells(lines, "zero3")[:6] == ["zero3", "2", "12,346", "(n", "=", "1)"]
    assert "× is the ratio to ddp" in " ".join(lines) and not any(line.startswith("ddp") for line in lines)
    assert printed([], 120) == ["No runs are recorded."]


def test_a_table_has_one_baseline_or_none() -> None:
    """It is ddp, then single, then the first; ddp on several numbers of ranks gives way to single."""
    entries = records()
    by_strategy = {entry.row["strategy"]: entry for entry in entries}

    def ratio_of(*shown: Record) -> list[float | None]:
        return column_values(lines_of(shown), "peak_allocated_bytes_ratio")

    zero1, zero3, ddp, single = (by_strategy[name] for name in ("zero1", "zero3", "ddp", "single"))
    assert ratio_of(zero3, ddp, single) == [0.5, 1.0, 1.0]
    assert ratio_of(zero3, single) == [0.5, 1.0]
    assert ratio_of(zero1, zero3) == [1.0, 10 / 18]
    wide = record_of(ddp.row | {"world_size": 4, "peak_allocated_bytes": 5 * MIB, "run_id": "wide"})
    assert ratio_of(ddp, wide, zero3) == [1.0, 0.25, 0.5]  # on the fewest ranks
    assert column_values(lines_of([ddp, wide, zero3, single]), "baseline") == ["single"] * 4
    other_model = record_of(zero3.row | {"model": "small", "run_id": "other"})
    assert ratio_of(ddp, other_model) == [None, None]
    assert ratio_of(ddp, zero3, other_model) == [1.0, 0.5, None]
    others = [record_of(zero3.row | {"model": f"m{n}", "run_id": f"other{n}"}) for n in range(3)]
    assert ratio_of(ddp, zero3, *others) == [None] * 5  # most rows could not be compared
    dead = record_of(ddp.row | {"status": "error"})
    assert ratio_of(zero1, dead, zero3) == [1.0, None, 10 / 18]
    checkpointed = record_of(ddp.row | {"checkpointing": "full", "peak_allocated_bytes": 10 * MIB, "run_id": "full"})
    assert ratio_of(checkpointed, ddp) == [0.5, 1.0]


def test_the_candidate_with_the_fewest_options_is_the_baseline() -> None:
    changes = ({"checkpointing": "full"}, {"compile": True}, {"compile": False}, {"dropout": 0.0})
    entries = [record_of(row(n, *TORCH, **change)) for n, change in enumerate(changes)]
    assert column_values(lines_of(entries), "baseline")[0] == column_values(lines_of(entries), "label")[2]


def test_units_and_small_numbers() -> None:
    assert [byte_unit([size]).name for size in (2**30, 2**30 - 1, 2**20 - 1, 1023, None)] == [
        "GiB",
        "MiB",
        "KiB",
        "B",
        "B",
    ]
    assert format_numbers([3 * 2**30 // 2, None, 1, 0], byte_unit([2**30])) == ["1.50", "", "<0.01", "0.00"]
    assert format_numbers([1023 * MIB, MIB], byte_unit([1023 * MIB])) == ["1,023", "1"]


def test_markdown_numbers_are_under_their_headers() -> None:
    tables = grids(page("demo", records(), ["results/demo/x/record.json is not a whole record"]))
    comparison, more = ({line["strategy"]: line for line in tables[name]} for name in ("Comparison", "More columns"))
    assert comparison["zero3"]["peak memory MiB"] == "10.00" and comparison["zero3"]["× peak memory"] == "0.50"
    assert comparison["zero3"]["communication MiB"] == "6.00" and more["zero3"]["× communication"] == "1.50"
    assert comparison["zero3"]["tokens/s"] == "12,346 (n = 1)" and more["zero3"]["tokens/s per device"] == "6,173"
    assert (
        comparison["fsdp_shard_grad_op"]["status"] == "oom"
        and comparison["fsdp_shard_grad_op"]["peak memory MiB"] == ""
    )
    memory = {line["run"]: line for line in tables["Memory"]}
    full = memory["fsdp_full_shard"]
    assert [full[name] for name in ("parameters", "gradients", "optimizer state", "activations", "peak memory")] == (
        ["2.00", "2.00", "4.00", "1.50", "9.00"]
    )
    assert [full[f"× {name}"] for name in ("parameters", "optimizer state", "activations", "peak memory")] == [
        "0.50",
        "0.50",
        "1.00",
        "0.45",
    ]
    assert memory["zero1"]["× optimizer state"] == "0.75"
    assert (memory["zero2"]["parameters"], memory["zero2"]["gradients"]) == ("4.00", "2.00")
    assert (memory["zero2"]["× parameters"], memory["zero2"]["× gradients"]) == ("1.00", "0.50")
    communication = {line["run"]: line for line in tables["Communication"]}
    assert communication["zero3"]["all_gather on dp_shard"] == "4.00 (7)"
    assert communication["zero3"]["reduce_scatter on dp_shard"] == "2.00 (5)"
    assert communication["ddp"]["all_reduce on dp_replicate"] == "4.00 (3)"
    assert communication["zero3"]["total"] == "6.00" and communication["zero3"]["× total"] == "1.50"
    assert full["smallest peak of any rank"] == "8.50"
    proof = {line["run"]: line for line in tables["Proof"]}
    assert proof["ddp"] == {
        "run": "ddp",
        "layout": "proven",
        "loss deviation": "1.2e-7",
        "loss floor": "9.9e-8",
        "gradient deviation": "4.6e-6",
        "gradient floor": "3.5e-6",
        "update deviation": "2.3e-6",
        "update floor": "2.1e-6",
        "steps proven": "16",
    }
    assert "Unreadable records" in page("demo", records(), ["bad"]) and "Predicted" not in page("demo", records(), [])


def test_pipelines_have_a_row_per_rank_and_communication_a_column_per_axis() -> None:
    text = page("demo", mixed(), [])
    tables = grids(text)
    assert len(tables["Pipelines"]) == 2 * (2 + 4) and "Pipelines" not in grids(page("demo", records(), []))
    assert tables["Pipelines"][5] == {
        "run": "pp_1f1b on 4 ranks",
        "rank": "3",
        "stages": "3, 7",
        "layers": "1, 2",
        "working ms": "43.00",
        "idle ms": "20.00",
        "bubble": "3.500",
        "bubble in theory": "0.375",
        "micro-batches in flight": "1",
        "activations MiB": "1.00",
    }
    assert tables["More columns"][4]["bubble"] == "0.329" and tables["More columns"][4]["bubble in theory"] == "0.125"
    traffic = {line["run"]: {key: cell for key, cell in line.items() if cell} for line in tables["Communication"]}
    assert list(tables["Communication"][0])[1:5] == (
        ["all_reduce on dp_replicate", "all_reduce on pp", "send on pp", "all_reduce on tp"]
    )
    assert (
        traffic["tp on 2 ranks"]["all_reduce on tp"] == "4.00 (3)"
        and "all_reduce on pp" not in traffic["tp on 2 ranks"]
    )
    assert traffic["pp_gpipe on 4 ranks"]["send on pp"] == "0.50 (16)"


def test_predictions_have_columns_of_their_own() -> None:
    predicted = record_of(row(1, "ddp", "torch", 0, predicted_peak_bytes=19 * MIB, predicted_step_seconds=0.05))
    text = page("demo", [predicted], [])
    assert grids(text)["Predicted and measured values"] == [
        {"run": "ddp", "predicted peak memory MiB": "19.00", "measured peak memory MiB": "20.00"}
        | {"error of the peak memory %": "-5.0"}
        | {"predicted step time ms": "50.00", "measured step time ms": "82.94", "error of the step time %": "-39.7"}
    ]
    assert "19.00" not in text.split("## Predicted")[0]  # but for the error, nothing predicted stands elsewhere


def test_parts_of_the_peak_are_listed_with_the_phase() -> None:
    parts = {"at_peak_parameter_bytes": 4 * MIB, "at_peak_temporary_bytes": 16 * MIB, "peak_phase": "backward"}
    text = page("demo", [record_of(row(1, "ddp", "torch", 0, **parts)), *records()[4:5]], [])
    assert grids(text)["Breakdown of peak memory"][0] == {
        "run": "ddp",
        "phase": "backward",
        "parameters": "4.00",
        "temporary tensors": "16.00",
        "peak memory": "20.00",
    }


def test_memory_on_the_host_has_columns_where_there_is_any() -> None:
    entries = [record_of(row(1, "ddp", "torch", 0)), record_of(row(2, "zero_offload", "deepspeed", 2))]
    without = page("demo", entries, [])
    assert "on the host" not in "".join(grids(without)["Memory"][0]) and "on the host are" not in without
    entries[0].row.update({"offloaded_bytes": 0, "offloaded_activation_bytes": 3 * MIB})
    entries[1].row.update({"offloaded_bytes": 8 * MIB})
    text = page("demo", entries, [])
    memory = grids(text)["Memory"]
    assert [line["state on the host"] for line in memory] == ["0.00", "8.00"]
    assert [line["activations on the host"] for line in memory] == ["3.00", ""]
    assert "the state on the host is no part of the device" in text and "Activations on the host are the most" in text


def test_skipped_steps_are_shown_with_the_proof_where_there_are_any() -> None:
    entries = [record_of(row(1, "ddp", "torch", 0, skipped_steps=0)), record_of(row(2, "zero1", "deepspeed", 1))]
    assert "skipped steps" not in grids(page("demo", entries, []))["Proof"][0]
    entries.append(record_of(row(3, "fsdp_full_shard", "torch", 3, skipped_steps=2)))
    text = page("demo", entries, [])
    assert [line["skipped steps"] for line in grids(text)["Proof"]] == ["0", "", "2"]
    assert "because a gradient overflowed" in text


STALE = "† stale, recorded with other versions than are installed"


def test_rows_stale_for_the_same_reason_share_a_note() -> None:
    old = records()
    for entry in old:
        entry.versions.update({"code": "0123456789ab"})
    assert sum(line.startswith(f"{STALE} (code 0123456789ab → ") for line in printed(old, 120)) == 1
    assert page("demo", old, []).split("## Stale rows")[1].split("## ")[0].count("- **") == 1


def test_pivot_of_strategy_and_checkpointing() -> None:
    rows = [
        row(1, "ddp", "torch", 0),
        row(2, "ddp", "torch", 0, checkpointing="full", peak_allocated_bytes=15 * MIB),
        row(3, "zero3", "deepspeed", 3, status="oom", **FAILED),
        row(4, "zero3", "deepspeed", 3, checkpointing="full", peak_allocated_bytes=7 * MIB),
    ]
    entries = [record_of(entry) for entry in rows]
    assert terminal_cells(printed(entries, 120), "ddp")[:3] == ["ddp", "none", "2"]
    assert grids(page("demo", entries, []))["Strategy × checkpointing"] == [
        {"strategy": "ddp", "none": "20.00", "full": "15.00"},
        {"strategy": "zero3", "none": "oom", "full": "7.00"},
    ]


def test_stale_rows_are_marked() -> None:
    old = records()
    old[1].versions.update({"torch": "2.10.0"})
    lines, text = printed(old, 120), page("demo", old, [])
    installed = versions()["torch"]
    assert terminal_cells(lines, "ddp")[-2:] == ["ok", "†"] and terminal_cells(lines, "zero1")[-1] == "ok"
    assert f"{STALE} (torch 2.10.0 → {installed}): ddp" in lines
    assert f"- **ddp**: torch 2.10.0 → {installed}" in text
    assert {line["strategy"]: line["status"] for line in grids(text)["Comparison"]}["ddp"] == "ok †"


def test_hostile_text_stays_text() -> None:
    hostile = record_of(
        row(1, HOSTILE, "torch", 0, model=HOSTILE, status="error", reason=HOSTILE, checkpointing=HOSTILE)
    )
    hostile.environment.update({HOSTILE: HOSTILE})
    hostile.proof.update({"layout": HOSTILE})
    text = page(HOSTILE, [hostile, *records()], [HOSTILE])
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    inline = {child.type for token in tokens for child in token.children or []}
    assert inline <= {"text", "text_special", "strong_open", "strong_close"}
    assert not any(token.type.startswith(("html", "fence", "code")) for token in tokens)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text) and "http://" not in text
    assert {line["strategy"][:8] for line in grids(text)["Comparison"]} >= {"<script>", "ddp"}
    lines = printed([hostile, *records()], 120)
    assert not any("\x1b" in line for line in lines) and any("[red]r[/red] :smile:" in line for line in lines)
    assert "\\|" in escape("a|b") and escape("fsdp_full_shard 2.13.0+cpu") == "fsdp_full_shard 2.13.0+cpu"


def test_command_reads_only_files_and_is_quick(tmp_path: Path) -> None:
    results = stored(tmp_path / "demo", records())
    (results / "broken").mkdir()
    (results / "broken" / "record.json").write_text("{")
    probe = (
        "import runpy, sys; sys.argv = ['harness', 'report', sys.argv[1]]\n"
        "try: runpy.run_module('harness', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'deepspeed', 'wandb'} & sys.modules.keys()"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run([sys.executable, "-c", probe, str(results)], capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0, process.stderr
    assert after.ru_utime - before.ru_utime < 8  # of processor time: some 3 s with the drawing of charts
    lines = process.stdout.splitlines()
    assert lines[-4:] == [str(results / name) for name in ("runs.csv", "runs.parquet", "report.md", "report.html")]
    assert len((results / "runs.csv").read_text().splitlines()) == 11
    assert (results / "report.md").read_text().startswith("# demo\n")
    assert process.stderr.startswith("skipped: ") and "broken/record.json is not a whole record" in process.stderr
    assert max(cell_len(line) for line in lines[:-4]) <= 120


def test_bad_directories_are_reported_in_a_single_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("missing", "file", "empty"):
        assert main(["report", str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and "results/NAME" in err
