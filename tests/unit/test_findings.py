"""The findings of a report: golden tables and sentences, marks only as the spread allows, and files that agree."""

import itertools
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.cli.report import main
from harness.records.runs_csv import rows_of, write_runs_csv
from harness.records.schema import Record
from harness.records.store import read_all, write_record
from harness.report import markdown
from harness.report.best import best
from harness.report.caveats import caveats
from harness.report.charts import render
from harness.report.charts.growth import memory_wall
from harness.report.charts.render import svgs
from harness.report.document import BulletList, Chart, Paragraph, Section, Table
from harness.report.findings import findings
from harness.report.overview import pivots
from harness.report.parquet import write_runs_parquet
from harness.report.sections import sections
from harness.report.view import MOST, View, merge_folders, truncate
from tests.support.example_records import FAILED, HOSTILE, MIB, PARAMETERS, mixed, record_of, records, row

GOLDEN = Path(__file__).parent / "golden_report.md"


def line(first: int, strategy: str, engine: str, stage: int, speeds: list[float], **changes: Any) -> list[Record]:
    """Return a run for each speed that differ only in their repeat, with fixed shares of a step and of a peak."""
    records = []
    for repeat, speed in enumerate(speeds):
        step = 1024 / speed
        figures = {"repeat": repeat, "tokens_per_second": speed, "tokens_per_second_per_device": speed / 2}
        figures |= {"step_seconds": step, "step_seconds_iqr_ratio": 0.02, "step_seconds_p95": 1.25 * step}
        figures |= {"forward_seconds": step / 4, "backward_seconds": step / 2, "optimizer_seconds": step / 8}
        figures |= {"data_seconds": step / 16, "exposed_communication_seconds": step / 16, "idle_seconds": 0.0}
        entry = row(first + repeat, strategy, engine, stage, **(figures | changes))
        peak = entry["peak_allocated_bytes"]
        state = entry["parameter_bytes"] + entry["optimizer_bytes"]
        parts = {"parameter": entry["parameter_bytes"], "optimizer": entry["optimizer_bytes"], "activation": MIB}
        entry |= {f"at_peak_{name}_bytes": size for name, size in parts.items()} | {"peak_phase": "backward"}
        entry |= {"at_peak_temporary_bytes": peak - state - MIB, "predicted_peak_bytes": peak * 11 // 10}
        records.append(record_of(entry))
    return records


def example() -> list[Record]:
    """Return seven lines: three of repeated runs, one checkpointed, one alone, one out of memory and one refused."""
    full = {"checkpointing": "full", "activation_bytes": MIB // 2, "peak_allocated_bytes": 16 * MIB}
    sent = {"communication_bytes": 6 * PARAMETERS, "peak_allocated_bytes": 12 * MIB}
    refused = "strategy.tp=3 does not divide model.num_attention_heads=4: choose 1, 2 or 4"
    return [
        *line(1, "ddp", "torch", 0, [16000.0, 15900.0, 16100.0]),
        *line(11, "ddp", "torch", 0, [12000.0, 12100.0, 11900.0], **full),
        *line(21, "zero1", "deepspeed", 1, [15950.0, 15000.0, 16800.0], peak_allocated_bytes=18 * MIB),
        *line(31, "zero3", "deepspeed", 3, [8000.0], **sent),
        record_of(row(41, "tp", "torch", 0, status="oom", reason="rank 1 in backward: out of memory", **FAILED)),
        record_of(row(42, "tp_sp", "torch", 0, status="refused", reason=refused, **FAILED)),
    ]


def texts(report: list[Section]) -> list[str]:
    """Return every sentence of these sections."""
    parts = [part for section in report for part in section.parts]
    prose = [part.text for part in parts if isinstance(part, Paragraph)]
    return prose + [text for part in parts if isinstance(part, BulletList) for _, text in part.items]


def test_the_report_equals_the_golden_file() -> None:
    """If it changed on purpose, python -m tests.unit.test_findings writes the file anew, to be read line by line."""
    assert golden() == GOLDEN.read_text(encoding="utf-8")


def golden() -> str:
    """Return the report without what differs between machines, which is versions."""
    page = markdown.page("example", sections(View("example", example())))
    page = re.sub(r" Recorded with python .*", "", page)
    return re.sub(r"## Versions and environment\n\n.*", "", page, flags=re.DOTALL)


FASTEST = (
    "Fastest by its median is ddp: 16,000 tokens/s (± 0.6 % over 3 runs), but the spreads leave open whether zero1 is"
    " as fast."
)

SENTENCES = [
    FASTEST,
    "zero3 needs the least memory: 12.00 MiB at the peak of its fullest rank, 60 % of ddp's, at 0.50 of its tokens/s.",
    "The fastest that a device's memory allows: from 12.00 MiB zero3 (8,000 tokens/s), from 16.00 MiB ddp full (12,000"
    " tokens/s), from 18.00 MiB zero1 (15,950 tokens/s), from 20.00 MiB ddp (16,000 tokens/s). In less than the first"
    " nothing measured here fits.",
    "zero1 holds 90 % of ddp's peak, runs at 1.00 (the spreads meet) of its tokens/s and sends 1.00 × its bytes.",
    "zero3 holds 60 % of ddp's peak, runs at 0.50 of its tokens/s and sends 1.50 × its bytes.",
    "Checkpointing full takes 67 % off the activations and 20 % off the peak of ddp, and costs 25 % of its speed.",
    "The peaks predicted for 4 configurations are off by 10 % in the median and by 10 % at most.",
    "2 of 6 configurations have no figures (1 oom, 1 refused): the reasons are under Failures.",
]


def test_sentences_state_the_figures_of_the_rows() -> None:
    assert texts(findings(View("example", example()))) == SENTENCES


@pytest.mark.parametrize(
    ("column", "factor"),
    [("tokens_per_second", 1.01), ("peak_allocated_bytes", 1024), ("communication_bytes", 2), ("activation_bytes", 3)],
)
def test_a_wrong_unit_changes_the_sentences(column: str, factor: float) -> None:
    """The golden sentences depend on every one of these columns."""
    spoiled = example()
    for record in spoiled[3:6] if column == "activation_bytes" else spoiled[9:10]:
        record.row[column] = type(record.row[column])(record.row[column] * factor)
    assert texts(findings(View("example", spoiled))) != SENTENCES


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (20 * MIB, "Of the 4 of 4 that fit in 20.00 MiB, ddp is fastest: 16,000 tokens/s in 20.00 MiB; the spreads"),
        (20 * MIB - 1, "Of the 3 of 4 that fit in 20.00 MiB, zero1 is fastest: 15,950 tokens/s in 18.00 MiB."),
        (13 * MIB, "Of the 1 of 4 that fit in 13.00 MiB, zero3 is fastest: 8,000 tokens/s in 12.00 MiB."),
        (MIB, "Nothing measured here fits in 1.00 MiB: the least is 12.00 MiB."),
    ],
)
def test_a_recommendation_respects_the_memory_limit(size: int, expected: str) -> None:
    assert texts(findings(View("example", example()), size))[2].startswith(expected)


def test_settings_are_not_mixed() -> None:
    """Two world sizes have sentences of their own, and no sentence compares across them."""
    sentences = texts(findings(View("mixed", mixed())))
    assert {"For world size 2:", "For world size 4:"} <= set(sentences)
    other = [record_of(row(50 + n, s, "torch", 0, precision="bf16_mixed")) for n, s in enumerate(("ddp", "tp"))]
    sentences = texts(findings(View("both", [*example(), *other])))
    assert {"For fp32:", "For bf16_mixed:"} <= set(sentences)
    assert set(SENTENCES[:-2]) <= set(sentences)


def test_speeds_of_unknown_spread_are_left_out() -> None:
    entries = example()
    for record in entries:
        record.row.update({"step_seconds_iqr_ratio": None, "repeat": 0})
    entries = [entries[0], entries[3], entries[6], entries[9]]
    sentences = " ".join(texts(findings(View("unsure", entries))))
    assert "tokens/s" not in sentences and "speed" not in sentences and "60 % of ddp's peak" in sentences
    assert "too few steps were timed" in " ".join(texts(caveats(View("unsure", entries))))


def test_no_runs_have_no_summary_and_a_single_run_has_no_comparison() -> None:
    assert findings(View("none", [])) == caveats(View("none", [])) == []
    assert texts(findings(View("one", example()[:1]))) == [
        "The peaks predicted for 1 configuration are off by 10 % in the median and by 10 % at most."
    ]
    assert "Every configuration ran once" in " ".join(texts(caveats(View("one", example()[:1]))))
    failed = [record for record in example() if record.row["status"] != "ok"]
    assert texts(findings(View("failed", failed))) == [SENTENCES[-1].replace("2 of 6", "2 of 2")]


def test_the_pareto_front_has_the_points_that_no_other_dominates() -> None:
    sizes = itertools.product((1000.0, 2000.0, 3000.0), (10, 20, 30))
    records = [
        record_of(
            row(n, f"s{n}", "torch", 0, tokens_per_second=speed, peak_allocated_bytes=peak * MIB)
            | {"step_seconds_iqr_ratio": 0.0}
        )
        for n, (speed, peak) in enumerate(sizes)
    ]
    for chosen in itertools.combinations(records, 4):
        view = View("front", chosen)
        text = " ".join(texts(findings(view)))
        rows = [record.row for record in chosen]
        front = [row for row in rows if not any(_beats(other, row) for other in rows)]
        ladder = text.partition("memory allows: ")[2].partition(". In less")[0]
        named = re.findall(r"MiB (s\d)", ladder)
        distinct = {(row["tokens_per_second"], row["peak_allocated_bytes"]) for row in front}
        assert len(named) == (len(distinct) if len(distinct) > 1 else 0)
        assert set(named) <= {row["strategy"] for row in front}


def _beats(row: dict[str, Any], other: dict[str, Any]) -> bool:
    speed, peak = "tokens_per_second", "peak_allocated_bytes"
    no_worse = row[speed] >= other[speed] and row[peak] <= other[peak]
    return no_worse and (row[speed] > other[speed] or row[peak] < other[peak])


def test_best_marks_need_a_difference_beyond_the_spread() -> None:
    view = View("example", example())
    labels = view.line_medians["label"].tolist()
    marked = {column: {labels[position] for position in positions} for column, positions in best(view).items()}
    assert marked == {  # in speed ddp and zero1 meet; ddp and zero1 send the same
        "peak_allocated_bytes": {"zero3"},
        "state_bytes": {"zero3"},
        "activation_bytes": {"ddp full"},
    }
    clear = [*line(1, "ddp", "torch", 0, [16000.0, 15900.0]), *line(11, "tp", "torch", 0, [15000.0, 15100.0])]
    assert best(View("clear", clear))["tokens_per_second"] == {0} == best(View("clear", clear))["step_seconds"]
    close = [*line(1, "ddp", "torch", 0, [16000.0, 15900.0]), *line(11, "tp", "torch", 0, [15890.0, 15910.0])]
    assert "tokens_per_second" not in best(View("close", close))
    peaks = [*line(1, "ddp", "torch", 0, [16000.0] * 2), *line(11, "tp", "torch", 0, [15000.0] * 2)]
    for record, size in zip(peaks, (20, 22, 19, 23), strict=True):  # MiB: the largest of a line stands for it
        record.row["peak_allocated_bytes"] = size * MIB
    assert "peak_allocated_bytes" not in best(View("peaks", peaks))


def test_best_marks_compare_rows_of_the_same_setting_and_world_size() -> None:
    winners = best(View("mixed", mixed()))
    assert all(len(positions) <= 2 for positions in winners.values())
    single = [record for record in records() if record.row["strategy"] == "single"]
    assert best(View("alone", single)) == {}
    entries = records()
    assert "tokens_per_second" not in best(View("ten", entries))  # how sure the speeds are is not known
    for record in entries:
        record.row["step_seconds_iqr_ratio"] = 0.01
    positions = best(View("ten", entries))["tokens_per_second"]  # 16,000 against 12,345.6
    assert [entries[position].row["strategy"] for position in positions] == ["ddp"]


def test_any_column_can_be_the_pivot() -> None:
    (section,) = pivots(View("mixed", mixed()), "world_size")
    peak, speed = section.parts
    assert isinstance(peak, Table) and isinstance(speed, Table) and section.title == "Results by world size"
    assert list(peak.header) == ["strategy", "2", "4"] and peak.caption == "Peak memory (MiB)"
    assert [list(cells) for cells in peak.rows] == [[s, "20.00", "20.00"] for s in ("ddp", "tp", "pp_1f1b", "pp_gpipe")]
    by_kind, _ = pivots(View("example", example()), "checkpointing")[0].parts
    assert isinstance(by_kind, Table) and list(by_kind.header) == ["strategy", "none", "full"]
    assert [list(cells) for cells in by_kind.rows] == [
        ["ddp", "20.00", "16.00"],
        ["zero1", "18.00", ""],
        ["zero3", "12.00", ""],
        ["tp", "oom", ""],
        ["tp_sp", "refused", ""],
    ]


def growing() -> list[Record]:
    """Return two strategies at two sizes of the model in 18 MiB per rank, of which one runs out of it at the larger."""
    records = []
    for number, (strategy, size) in enumerate(itertools.product(("ddp", "zero3"), (1, 2))):
        changes: dict[str, Any] = {"parameters": size * 10**6, "memory_limit_bytes": 18 * MIB}
        changes |= {"peak_allocated_bytes": (8 if strategy == "zero3" else 12) * size * MIB}
        if strategy == "ddp" and size == 2:
            changes |= FAILED | {"status": "oom", "reason": "rank 0 in backward: out of memory"}
        records.append(record_of(row(number, strategy, "torch", 0, **changes)))
        records[-1].config.update({"model": {"num_hidden_layers": size}})
    return records


def test_the_memory_wall_is_the_largest_model_that_ran() -> None:
    sentences = texts(findings(View("wall", growing())))
    assert sentences[0] == (
        "The largest model that ran in 18.00 MiB per rank: 2.0 million parameters with zero3; 1.0 million parameters"
        " with ddp."
    )
    calm = [record for record in growing() if record.row["status"] == "ok"]
    assert "The largest" not in " ".join(texts(findings(View("calm", calm))))
    picture = memory_wall(View("wall", growing()))
    assert picture is not None and [list(cells) for cells in picture.table.rows] == [
        ["ddp", "ok", "1.000", "12.00"],
        ["ddp", "oom", "2.000", ""],
        ["zero3", "ok", "1.000", "8.00"],
        ["zero3", "ok", "2.000", "16.00"],
    ]
    svg = svgs({"wall": picture.spec})["wall"]
    assert svg.count('aria-roledescription="point"') == 3 and svg.count(">×<") == 1
    assert "limit 18.00 MiB" in svg and "1 ran out of memory" in picture.alt_text


def test_variants_of_a_strategy_are_separate_curves() -> None:
    """A curve of scaling has one configuration: a compiled run is not the larger world of an uncompiled one."""
    ways = ((1, False, 1000.0), (2, False, 1500.0), (1, True, 4000.0), (2, True, 6400.0))
    entries = [
        record_of(row(n, "ddp", "torch", 0, world_size=world, compile=compiled, tokens_per_second=speed))
        for n, (world, compiled, speed) in enumerate(ways)
    ]
    for chosen in (entries, entries[::-1]):
        sentences = [text for text in texts(findings(View("ways", chosen))) if "ranks:" in text]
        assert sorted(text.split(":")[1][:7] for text in sentences) == [" 1.50 ×", " 1.60 ×"]
    assert not any("ranks:" in text for text in texts(findings(View("ways", [entries[0], entries[3]]))))


def test_limitations_name_the_rows_they_concern() -> None:
    sentences = " ".join(texts(caveats(View("example", example()))))
    assert "The speed of CPU processes tells little about GPUs" in sentences and "(repeats=3): zero3." in sentences
    assert "are not known because they did not end ok: tp, tp_sp." in sentences
    entries = example()
    for record in entries:
        record.environment.update({"cores": 1})
    assert "Up to 2 ranks shared 1 core" in " ".join(texts(caveats(View("crowded", entries))))
    gpu = [record.with_row(measured_on="NVIDIA H200") for record in entries]
    assert not re.search(r"CPU|shared", " ".join(texts(caveats(View("gpu", gpu)))))
    entries[0].row.update({"noise_warning": "other load", "loss_deviation": None})
    sentences = " ".join(texts(caveats(View("noise_warning", entries))))
    assert "listed under Runs with a noise warning, for ddp" in sentences


def stored(folder: Path, entries: list[Record]) -> Path:
    for entry in entries:
        write_record(folder / entry.row["run_id"], entry)
    return folder


def test_several_folders_form_a_single_comparison(tmp_path: Path) -> None:
    """The same run in both folders keeps its place and its own steps."""
    folders = [stored(tmp_path / name, records()) for name in ("a", "b")]
    view = merge_folders([(folder, read_all(folder)) for folder in folders])
    assert len(view.records) == len(view.folders) == 2 * len(records()) and view.name == "a + b"
    assert len(set(view.line_medians["label"])) == len(view.lines)
    for run_id, folder in view.folders.items():
        assert folder == tmp_path / run_id and (folder / "record.json").exists()
    alone = merge_folders([(folders[0], read_all(folders[0]))])
    assert alone.name == "a" and not any("/" in record.row["run_id"] for record in alone.records)


def test_parquet_has_the_rows_of_csv_with_their_types(tmp_path: Path) -> None:
    entries = [*example(), record_of(row(90, HOSTILE, "torch", 0, extra="x", own_bytes=3, mixed=1, compile=True))]
    entries[0].row["mixed"] = 0.5
    rows = rows_of(entries)
    csv = pd.read_csv(write_runs_csv(tmp_path, rows), keep_default_na=False, na_values=[""])
    parquet = pd.read_parquet(write_runs_parquet(tmp_path, rows), dtype_backend="numpy_nullable")
    assert list(csv) == list(parquet) and len(csv) == len(parquet) == len(rows)
    assert parquet["peak_allocated_bytes"].tolist()[0] == 20 * MIB and parquet["mixed"].tolist()[0] == 0.5
    kinds = {name: str(parquet[name].dtype) for name in ("peak_allocated_bytes", "own_bytes", "tokens_per_second")}
    assert kinds == {"peak_allocated_bytes": "Int64", "own_bytes": "Int64", "tokens_per_second": "Float64"}
    assert str(parquet["compile"].dtype) == "boolean" and parquet["status"].tolist() == csv["status"].tolist()
    for name in ("tokens_per_second", "peak_allocated_bytes", "loss_deviation"):
        assert [None if pd.isna(v) else v for v in parquet[name]] == [None if pd.isna(v) else v for v in csv[name]]


def test_a_page_of_many_runs_states_how_many_it_shows() -> None:
    many = [
        record_of(row(n, ("ddp", "tp")[n % 2], "torch", 0, micro_batch=n, tokens_per_second=1000.0 + n))
        for n in range(3 * MOST)
    ]
    view = View("many", many)
    part = truncate(view, MOST)
    assert len(part.records) == len(part.table) == len(part.lines) == len(part.line_medians) == MOST
    assert {"ddp micro-batch 598", "tp micro-batch 599"} <= set(part.line_medians["label"])  # the fastest
    whole = dict(zip(view.line_medians["label"], view.line_medians["tokens_per_second_ratio"], strict=True))
    ratios = zip(part.line_medians["label"], part.line_medians["tokens_per_second_ratio"], strict=True)
    assert all(whole[label] == ratio for label, ratio in ratios)
    page = sections(view)
    assert f"{MOST} of {3 * MOST} runs" in " ".join(texts(page))
    assert all(len(part.rows) <= MOST for section in page for part in section.parts if isinstance(part, Table))


def test_every_chart_has_a_valid_file_name() -> None:
    pictures = [part for section in sections(View("example", example())) for part in section.parts]
    names = [part.name for part in pictures if isinstance(part, Chart)]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


def test_the_command_accepts_several_folders_and_rejects_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(stored(tmp_path / name, example())) for name in ("a", "b")]
    assert main([*folders, "--fits-in", "18MiB", "--pivot", "repeat"]) == 0
    written = {path.name for path in (tmp_path / "a+b").iterdir()}
    assert written == {"runs.csv", "runs.parquet", "report.md", "report.html", "figures"}
    assert "that fit in 18.00 MiB" in (tmp_path / "a+b" / "report.md").read_text()
    capsys.readouterr()
    mistakes = {
        ("--pivot", "nope"): "--pivot=nope is not a column",
        ("--fits-in", "2 suitcases"): "--fits-in=2 suitcases is",
    }
    for mistake, message in mistakes.items():
        assert main([folders[0], *mistake]) == 2
        assert capsys.readouterr().err.startswith(message) and not (tmp_path / "a" / "report.md").exists()


def test_a_report_without_charts_is_complete_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(specs: object) -> dict[str, str]:
        raise render.DrawingError("no renderer")

    monkeypatch.setattr(render, "svgs", fails)
    folder = stored(tmp_path / "plain", example())
    assert main([str(folder)]) == 0
    assert "report.md has no charts: no renderer" in capsys.readouterr().err
    assert "![" not in (folder / "report.md").read_text() and (folder / "report.html").stat().st_size > 10**5


if __name__ == "__main__":
    GOLDEN.write_text(golden(), encoding="utf-8")
