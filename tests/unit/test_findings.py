"""The findings of a report: golden tables and sentences, a test for each falsehood, and files that agree."""

import itertools
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.cli.main import main
from harness.records.runs_csv import rows_of, write_runs_csv
from harness.records.schema import Record
from harness.records.store import read_all, write_record
from harness.report import markdown
from harness.report.appendix import failures
from harness.report.caveats import by_kind, caveats
from harness.report.charts import render
from harness.report.charts.memory import memory_wall
from harness.report.charts.render import svgs
from harness.report.claim_peers import Claim
from harness.report.columns import ShownColumn, line_table
from harness.report.document import BulletList, Chart, Paragraph, Section, Table
from harness.report.files import write_runs_parquet
from harness.report.findings import beside, findings
from harness.report.first_screen import first_screen
from harness.report.lines import column_values, lines_of
from harness.report.overview import best, pivots
from harness.report.sections import sections
from harness.report.sentences import labels_text
from harness.report.view import MOST, View, truncate, view_of
from tests.support.example_records import FAILED, HOSTILE, MIB, PARAMETERS, mixed, record_of, records, row
from tests.support.tables import printed

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


ANSWERS = [
    (
        "Fastest",
        "Not certain. None of these is certainly slower than ddp, the highest median: ddp 16,000 tokens/s"
        " [15,900–16,100]; zero1 15,950 tokens/s [15,000–16,800].",
    ),
    ("Least memory", "zero3 with 12.00 MiB at the peak of the fullest rank, 60 % of ddp's."),
    (
        "Why",
        "The peak of ddp is 8.00 MiB above that of zero3, mainly by 4.00 MiB more temporary tensors and 2.00 MiB more"
        " parameters.",
    ),
    ("Checkpointing", "Of the peak of ddp, full saves 20 %, at 25 % less speed."),
    (
        "How sure",
        "Speeds are medians [ranges] of 3 undisturbed runs; a configuration is called faster only if its range lies"
        " above the other's, of three runs by half the wider one. Not ranked: zero3 (1"
        " undisturbed run). Memory and communication are counted to the"
        " byte. All 4 are proven to have run the same training as the reference for 16 steps.",
    ),
]

SENTENCES = [
    "zero1 beside ddp: 90 % of its peak memory; no certain difference in speed; 1.00 × its bytes sent.",
    "zero3 beside ddp: 60 % of its peak memory; 1.50 × its bytes sent.",
    "full checkpointing of ddp: activations 67 % smaller and the peak 20 % smaller, at 25 % less speed.",
    "The peaks predicted for 4 configurations are off by 10 % in the median and by 10 % at most.",
    "2 of 6 configurations have no figures (1 oom, 1 refused): the reasons are under Failures.",
]


def test_sentences_state_the_figures_of_the_rows() -> None:
    screen = first_screen(View("example", example()))
    assert list(screen.answers) == ANSWERS and screen.warning == ""
    assert texts(findings(View("example", example()))) == SENTENCES
    assert screen.compared == (
        "6 configurations (4 ok, 1 oom, 1 refused) in 12 runs: tiny (1,048,576 parameters); fp32; 2 ranks; 8 × 128 ="
        " 1,024 tokens per step; micro-batch 4; on cpu; ranks launched as processes. They differ in strategy and"
        " checkpointing. Measured on 2026-01-02."
    )
    assert screen.fits is not None and [list(cells) for cells in screen.fits.rows] == [
        ["from 16.00 MiB", "ddp + full checkpointing", "", "12,000 [11,900–12,100]"],
        ["from 18.00 MiB", "zero1", "ddp from 20.00 MiB", "15,950 [15,000–16,800]"],
    ]
    gpu = [record.with_row(measured_on="NVIDIA H200") for record in example()]
    assert "GPUs carry over: model state" in screen.banner and first_screen(View("gpu", gpu)).banner == ""


def clear() -> list[Record]:
    """Return a winner with its costs: ddp, then zero1, then tp with the least memory and much communication."""
    return [
        *line(1, "ddp", "torch", 0, [16000.0, 15900.0, 16100.0]),
        *line(11, "zero1", "deepspeed", 1, [12000.0, 12100.0, 11900.0], peak_allocated_bytes=18 * MIB),
        *line(21, "tp", "torch", 0, [4000.0, 4010.0, 3990.0], peak_allocated_bytes=16 * MIB, idle_seconds=0.15),
    ]


def test_the_winner_has_its_cost_and_its_reason() -> None:
    assert list(first_screen(View("clear", clear())).answers)[:4] == [
        ("Fastest", "ddp at 16,000 tokens/s [15,900–16,100], 1.33 × the speed of zero1, the next."),
        ("Cost", "ddp takes 20.00 MiB per rank at the peak, 1.25 × that of tp; 4.00 MiB sent per rank and step."),
        (
            "Least memory",
            "tp with 16.00 MiB at the peak of the fullest rank, 80 % of ddp's, at 0.25 × the speed of ddp.",
        ),
        (
            "Why",
            "A step of zero1 takes 21.3 ms longer than one of ddp in median runs, mainly by 10.7 ms more backward and"
            " 5.33 ms more forward. A step of tp takes 192 ms longer than one of ddp in median runs, mainly by 150 ms"
            " more idle and 96 ms more backward. The peak of ddp is 4.00 MiB above that of tp, mainly by 4.00 MiB"
            " more temporary tensors.",
        ),
    ]


def spoiled(column: str, value: Any, strategies: tuple[str, ...] = ("zero1",)) -> View:
    """Return `clear` with a column of some strategies changed in every run."""
    return View(
        "spoiled",
        [record.with_row(**{column: value}) if record.row["strategy"] in strategies else record for record in clear()],
    )


def everything(view: View) -> str:
    """Return all answers and sentences."""
    return " ".join([text for pair in first_screen(view).answers for text in pair] + texts(findings(view)))


@pytest.mark.parametrize(("column", "value"), [("noise_warning", "busy"), ("step_seconds_iqr_ratio", None)])
def test_disturbed_speeds_stand_in_no_sentence_and_no_ranking(column: str, value: Any) -> None:
    view = spoiled(column, value, ("ddp",))
    text = everything(view)
    assert "16,000" not in text and "zero1 at 12,000 tokens/s [11,900–12,100], 3.00 × the speed of tp, the next" in text
    assert "× the speed of ddp" not in text and "Not ranked: ddp (disturbed)" in text
    assert not any("ddp" in text.split(" takes ")[0] for text in re.findall(r"A step of .*", text))
    assert {line.label for line in best(view)["tokens_per_second"]} == {"zero1"}
    assert column_values(view.lines, "tokens_per_second_ratio") == [None] * 3  # the base is disturbed
    page = markdown.page("page", sections(view))
    assert "~~16,000 ‡~~" in page and "~~64.0~~" in page
    assert first_screen(view).warning == ""


@pytest.mark.parametrize(
    ("column", "value", "begins"),
    [
        ("noise_warning", "busy", "The machine was busy: the times of 2 of 3 configurations were disturbed."),
        ("step_seconds_iqr_ratio", None, "Fewer than four steps were timed in 2 of 3 configurations."),
    ],
)
def test_a_busy_machine_is_the_first_thing_that_is_said(column: str, value: Any, begins: str) -> None:
    view = spoiled(column, value, ("ddp", "zero1"))
    assert first_screen(view).warning.startswith(begins) and "Ignore all speeds" in first_screen(view).warning
    assert printed(list(view.records), 120)[0].startswith(begins[:60])
    first = markdown.page("page", sections(view)).split("## Summary")[1].strip()
    assert first.startswith(f"> **{begins[:40]}")


def test_speeds_of_single_runs_are_not_ranked() -> None:
    """Neither sentence nor mark says which is faster, however calm the steps of each run were."""
    alone = [record for record in clear() if record.row["repeat"] == 0]
    view = View("alone", alone)
    text = everything(view)
    assert "Not ranked: of 3 configurations, 3 ran once; repeats=3 would rank them." in text
    mixed_up = [*clear()[:3], clear()[3], clear()[6].with_row(noise_warning="busy")]
    assert first_screen(View("mixed up", mixed_up)).answers[0][1] == (
        "Not ranked: of 3 configurations, 1 disturbed, 1 ran once undisturbed and 1 with 3 undisturbed"
        " runs or more; repeats=3 on a quiet machine would rank them."
    )
    assert "tokens/s" not in text and "× the speed" not in text and "In the runs of median speed, a step of" not in text
    assert not {"tokens_per_second", "step_seconds"} & best(view).keys() and first_screen(view).fits is None
    assert "16,000 (n = 1)" in markdown.page("page", sections(view))
    assert {"Least memory", "Least communication"} - {lead for lead, _ in first_screen(view).answers} <= {
        "Least communication"
    }


def test_scaling_is_told_of_ranked_speeds_on_cores_of_their_own() -> None:
    def scaling(cores: int, **changes: Any) -> list[str]:
        entries = [
            *line(1, "ddp", "torch", 0, [1000.0, 1001.0, 999.0], world_size=1, **changes),
            *line(11, "ddp", "torch", 0, [1800.0, 1801.0, 1799.0], world_size=2),
        ]
        for record in entries:
            record.environment.update({"cores": cores})
        return [text for text in texts(findings(View("scaling", entries))) if "linear scaling" in text]

    assert scaling(2) == ["ddp on 2 ranks instead of 1 has 1.80 × the tokens/s, 90 % of linear scaling."]
    assert scaling(1) == scaling(2, noise_warning="busy") == scaling(2, step_seconds_iqr_ratio=None) == []


def test_what_a_paper_says_stands_behind_its_own_figure() -> None:
    """The bytes sent and the model state each have the paper's figure; the peak has none."""
    entries = example()
    claim = Claim("zero3", "bytes sent", "", "paper", 1.5, "", 1.5, True, "", True)
    state = Claim("zero3", "model state", "", "paper", 2.0, "", 1.6, False, "a copy in fp32", False)
    group = View("papers", entries).largest_groups(1)[0]
    zero3, ddp = (next(line for line in group.members if line.label == name) for name in ("zero3", "ddp"))
    assert beside(zero3, ddp, [claim, state]) == (
        "zero3 beside ddp: 60 % of its peak memory; 1.50 × its bytes sent (by the paper's formula 1.50 ×);"
        " 0.62 × its model state (by the paper's formula 0.50 ×, different: a copy in fp32)."
    )
    assert "as the paper says" not in everything(View("papers", entries))


@pytest.mark.parametrize(
    ("column", "factor"),
    [("tokens_per_second", 1.01), ("peak_allocated_bytes", 1024), ("communication_bytes", 2), ("activation_bytes", 3)],
)
def test_a_wrong_unit_changes_the_sentences(column: str, factor: float) -> None:
    """The golden sentences depend on every one of these columns."""
    wrong = example()
    chosen = {"activation_bytes": wrong[3:6], "tokens_per_second": wrong[:3]}.get(column, wrong[9:10])
    for record in chosen:
        record.row[column] = type(record.row[column])(record.row[column] * factor)
    view = View("example", wrong)
    assert (texts(findings(view)), list(first_screen(view).answers)) != (SENTENCES, ANSWERS)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (20 * MIB, "4 of 4 configurations. Not certain. None of these is certainly slower than ddp, the"),
        (
            20 * MIB - 1,
            "3 of 4 configurations, of which zero1 is the fastest: 15,950 tokens/s [15,000–16,800] in 18.00",
        ),
        (13 * MIB, "1 of 4 configurations: zero3 in 12.00 MiB."),
        (MIB, "Nothing measured here: the least is 12.00 MiB."),
    ],
)
def test_a_recommendation_respects_the_memory_limit(size: int, expected: str) -> None:
    lead, text = first_screen(View("example", example()), size).answers[0]
    assert lead.startswith("Fits in ") and text.startswith(expected)


def test_a_report_of_simulations_says_that_nothing_was_measured() -> None:
    changes: dict[str, Any] = {"launch": "simulated", "measured_on": "NVIDIA H100 80GB HBM3"}
    simulated = [record_of(row(n, name, "torch", 0, **changes)) for n, name in enumerate(("ddp", "tp"))]
    for record in simulated:
        record.environment["devices"] = 8
        record.config["cluster"] = {"nodes": 64}
    screen = first_screen(View("simulated", simulated))
    assert screen.answers[0][1].startswith("Not ranked, as these are tokens/s by a model of the device: ")
    assert screen.answers[-1][1].startswith("The code of one or more ranks of each layout ran on simulated devices")
    assert "Simulated for 8 × NVIDIA H100 80GB HBM3, 64 nodes, on" in screen.compared
    assert screen.banner.startswith("Nothing was measured: the engines' code ran on simulated devices")


def test_simulated_layouts_say_how_much_of_their_devices_they_take() -> None:
    changes: dict[str, Any] = {"launch": "simulated", "measured_on": "NVIDIA H100 80GB HBM3"}
    changes |= {"memory_limit_bytes": 80 * MIB}
    pair = ((0, "ddp", 20 * MIB), (1, "tp", 18 * MIB))
    simulated = [record_of(row(n, name, "torch", 0, peak_allocated_bytes=peak, **changes)) for n, name, peak in pair]
    answers = dict(first_screen(View("simulated", simulated)).answers)
    assert answers["Fits"].startswith(
        "2 layouts fit in the 80.00 MiB of a device, of which 476.8 MiB are assumed for its CUDA context:"
        " 18.00 MiB to 20.00 MiB allocated, without what"
    )
    for run in simulated:
        run.config["cluster"] = {"memory_budget": "80MiB"}
    answers = dict(first_screen(View("simulated", simulated)).answers)
    assert answers["Fits"].startswith("2 layouts fit in the 80.00 MiB of cluster.memory_budget: 18.00 MiB to")
    assert "Fits" not in dict(first_screen(View("example", example())).answers)


def test_what_checkpointing_all_strategies_share_is_in_no_label() -> None:
    full = [record_of(row(n, name, "torch", 0, checkpointing="full")) for n, name in enumerate(("ddp", "tp"))]
    assert column_values(View("full", full).lines, "label") == ["ddp", "tp"]
    assert column_values(View("one", full[:1]).lines, "label") == ["ddp + full checkpointing"]
    mixed_kinds = [*full, record_of(row(5, "ddp", "torch", 0))]
    labels = column_values(View("mixed", mixed_kinds).lines, "label")
    assert sorted(labels) == ["ddp", "ddp + full checkpointing", "tp + full checkpointing"]


def test_a_single_rank_that_had_more_threads_is_a_caveat() -> None:
    runs = [
        record_of(row(n, name, "torch", 0, world_size=world)) for n, name, world in ((0, "single", 1), (1, "ddp", 2))
    ]
    for run, threads in zip(runs, (2, 1), strict=True):
        run.environment["threads"] = threads
    text = " ".join(texts(caveats(View("threads", runs))))
    assert "a single rank computed with 2 threads, and others with 1, so that all configurations had the same" in text
    runs[0].environment["threads"] = 1
    assert "threads" not in " ".join(texts(caveats(View("threads", runs))))


def test_repeated_failures_of_one_cause_are_one_entry() -> None:
    failed = [record_of(row(n, "tp", "torch", n, **FAILED | {"status": "refused", "reason": "no"})) for n in range(3)]
    (section,) = failures(View("failed", failed))
    (entries,) = section.parts
    assert isinstance(entries, BulletList) and [text for _, text in entries.items] == ["refused: no"]


def test_settings_are_not_mixed() -> None:
    """Groups of comparable runs have sentences of their own, and no sentence compares across them."""
    assert first_screen(View("mixed", mixed())).answers[0][0] == "Speed on 4 ranks"
    sentences = texts(findings(View("mixed", mixed())))
    assert {"On 2 ranks:", "On 4 ranks:"} <= set(sentences)
    other = [record_of(row(50 + n, s, "torch", 0, precision="bf16_mixed")) for n, s in enumerate(("ddp", "tp"))]
    sentences = texts(findings(View("both", [*example(), *other])))
    assert {"In fp32:", "In bf16_mixed:"} <= set(sentences)
    assert set(SENTENCES[:-2]) <= set(sentences)


def test_no_runs_have_no_summary_and_a_single_run_has_no_comparison() -> None:
    assert findings(View("none", [])) == caveats(View("none", [])) == []
    alone = View("one", example()[:1])
    assert texts(findings(alone)) == [
        "The peaks predicted for 1 configuration are off by 10 % in the median and by 10 % at most."
    ]
    assert first_screen(alone).answers == (
        ("Measured", "ddp: 16,000 tokens/s (n = 1), 20.00 MiB per rank at the peak."),
    )
    assert "1 undisturbed run: ddp" in " ".join(texts(caveats(alone)))
    failed = [record for record in example() if record.row["status"] != "ok"]
    assert texts(findings(View("failed", failed))) == [SENTENCES[-1].replace("2 of 6", "2 of 2")]
    assert first_screen(View("failed", failed)).answers == ()


def test_best_marks_are_of_ranked_speeds_and_exact_bytes() -> None:
    view = View("example", example())
    marked = {column: {line.label for line in lines} for column, lines in best(view).items()}
    assert marked == {  # ddp and zero1 are about as fast and send the same
        "peak_allocated_bytes": {"zero3"},
        "state_bytes": {"zero3"},
        "activation_bytes": {"ddp + full checkpointing"},
    }
    marks = {column: {line.position for line in lines} for column, lines in best(View("clear", clear())).items()}
    assert marks["tokens_per_second"] == marks["step_seconds"] == {0} and marks["peak_allocated_bytes"] == {2}
    assert best(View("alone", [record for record in records() if record.row["strategy"] == "single"])) == {}
    assert all(len(positions) <= 2 for positions in best(View("mixed", mixed())).values())


def test_any_column_can_be_the_pivot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal shows the requested table too, and what fits in the requested memory."""
    (section,) = pivots(View("mixed", mixed()), "world_size")
    peak, speed = section.parts
    assert isinstance(peak, Table) and isinstance(speed, Table) and section.title == "Results by ranks"
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
    assert (
        main(["report", str(stored(tmp_path / "a", example())), "--pivot", "checkpointing", "--fits-in", "18MiB"]) == 0
    )
    shown = capsys.readouterr().out
    assert re.search(r"strategy +none +full", shown) and re.search(r"ddp +20.00 +16.00", shown)
    assert "Fits in 18.00 MiB: 3 of 4 configurations, of which zero1 is the fastest" in shown
    assert shown.index("How sure: ") > shown.index("fastest that fits") > shown.index("more columns")


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
    assert first_screen(View("wall", growing())).answers[0] == (
        "Largest model",
        "The largest model that ran in 18.00 MiB per rank: 2.0 million parameters with zero3; 1.0 million parameters"
        " with ddp.",
    )
    calm = [record for record in growing() if record.row["status"] == "ok"]
    assert "The largest" not in everything(View("calm", calm))
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
        line(10 * n, "ddp", "torch", 0, [speed, speed + 1, speed - 1], world_size=ranks, compile=compiled)
        for n, (ranks, compiled, speed) in enumerate(ways)
    ]
    for chosen in (entries, entries[::-1]):
        view = View("ways", [record for runs in chosen for record in runs])
        sentences = [text for text in texts(findings(view)) if "linear scaling" in text]
        assert sorted(re.findall(r"([\d.]+) × the tokens/s", " ".join(sentences))) == ["1.50", "1.60"]
    mismatched = View("ways", [*entries[0], *entries[3]])
    assert not any("linear scaling" in text for text in texts(findings(mismatched)))


def test_settings_of_some_rows_are_not_those_of_all() -> None:
    """The faults: "in 1 of 2 layers" for rows without checkpointing, and "one model" for models of several sizes."""
    some = [record.with_row(checkpointing_every=2) if n == 3 else record for n, record in enumerate(example())]
    assert "in 1 of 2 layers" not in first_screen(View("some", some)).compared
    every = [record.with_row(checkpointing_every=2) for record in example()]
    assert "; checkpointing in 1 of 2 layers" in first_screen(View("every", every)).compared
    sizes = [record.with_row(parameters=n) for n, record in enumerate(example())]
    assert "One model" in str(caveats(View("one", example()))) and "One model" not in str(caveats(View("n", sizes)))


def test_bytes_of_a_norm_make_no_difference() -> None:
    """The fault: ddp "with the least communication", by the four bytes of ZeRO's gradient norm."""
    sent = {"ddp": 4 * MIB, "zero1": 4 * MIB + 4, "tp": 6 * MIB}
    alone = [record.with_row(communication_bytes=sent[record.row["strategy"]]) for record in clear()[::3]]
    answers = dict(first_screen(View("norm", alone)).answers)
    assert answers["Least communication"] == "ddp and zero1 with 4.00 MiB sent per rank and step."
    assert "communication_bytes" not in best(View("norm", alone))
    assert "Least communication" not in dict(first_screen(View("norm", alone[:2])).answers)


def test_memory_is_the_same_in_every_table() -> None:
    """The fault: the comparison had the largest peak of all repeats, and the tables of memory that of another run."""
    peaks = (20 * MIB, 21 * MIB, 20 * MIB)
    repeats = line(1, "ddp", "torch", 0, [16000.0, 15900.0, 16100.0])
    for record, peak in zip(repeats, peaks, strict=True):
        record.row.update({"peak_allocated_bytes": peak, "at_peak_temporary_bytes": peak - 13 * MIB})
    page = markdown.page("page", sections(View("page", [*repeats, *clear()[3:]])))
    assert "20.00" not in page.split("## Comparison")[1].split("## Predicted")[0] and page.count("| 21.00 |") >= 4


def test_gpus_that_wait_for_their_host_are_launch_bound() -> None:
    def banner(idle: float, **changes: Any) -> str:
        waiting = [record.with_row(idle_seconds=idle * record.row["step_seconds"], **changes) for record in clear()]
        return first_screen(View("gpu", waiting)).banner

    gpu = {"measured_on": "NVIDIA H200"}
    assert banner(0.6, **gpu).startswith("Launch-bound: in 3 of 3 configurations the GPUs were idle for more than half")
    assert banner(0.4, **gpu) == banner(0.6, pp=2, **gpu) == "" and "Launch-bound" not in banner(0.6)


def test_what_would_rank_speeds_depends_on_what_they_lack() -> None:
    """The faults: repeats=3 for runs of too few steps, and where there were three repeats already."""
    barely = spoiled("step_seconds_iqr_ratio", None, ("ddp", "zero1", "tp"))
    assert first_screen(barely).warning.endswith("To rank speeds: train.steps=10 and more repeats.")
    part = spoiled("step_seconds_iqr_ratio", None)
    half = View("half", [*part.records[:4], *part.records[6:7]])
    assert "1 timed over fewer than four steps, 1 ran once and 1 with 3" in everything(half)
    busy = [record.with_row(noise_warning="busy") if record.row["repeat"] else record for record in clear()]
    text = everything(View("busy", busy))
    assert "3 ran once; more repeats on a quiet machine would rank them." in text
    assert "in all 3 configurations. Ignore all speeds" in first_screen(barely).warning


def test_limitations_name_the_rows_they_concern() -> None:
    sentences = " ".join(texts(caveats(View("example", example()))))
    assert "here ranks share one memory and its bandwidth" in sentences
    assert "runs are needed. 1 undisturbed run: zero3." in sentences
    assert "are not known because they did not end ok: tp, tp_sp." in sentences
    entries = example()
    for record in entries:
        record.environment.update({"cores": 1})
    assert "up to 2 ranks shared 1 core" in " ".join(texts(caveats(View("crowded", entries))))
    gpu = [record.with_row(measured_on="NVIDIA H200") for record in entries]
    assert not re.search(r"CPU|shared", " ".join(texts(caveats(View("gpu", gpu)))))
    for record in entries[:3]:
        record.row.update({"noise_warning": "other load", "loss_deviation": None})
    sentences = " ".join(texts(caveats(View("noise_warning", entries))))
    assert "Speeds and times of ddp: something disturbed every run" in sentences


def test_notes_that_many_rows_share_say_so_once() -> None:
    causes = [(f"s{n}", f"other processes took {n / 10} of 2 cores") for n in range(3, 12)]
    causes.append(("s3", "steps became 11% faster; other processes took 1.9 of 2 cores"))
    kinds = by_kind(causes)
    assert kinds == {
        "other processes took 0.3 to 1.9 of 2 cores": [f"s{n}" for n in range(3, 12)],
        "steps became 11% faster": ["s3"],
    }
    assert [labels_text(list("abcdefgh")[:n], 8) for n in (2, 7, 8)] == [
        "a, b",
        "7 of 8 configurations",
        "all 8 configurations",
    ]


def stored(folder: Path, entries: list[Record]) -> Path:
    for entry in entries:
        write_record(folder / entry.row["run_id"], entry)
    return folder


def test_several_folders_form_a_single_comparison(tmp_path: Path) -> None:
    """The same run in both folders keeps its place and its own steps."""
    folders = [stored(tmp_path / name, records()) for name in ("a", "b")]
    view = view_of(*((folder, read_all(folder)) for folder in folders))
    assert len(view.records) == len(view.folders) == 2 * len(records()) and view.name == "a + b"
    assert len(set(column_values(view.lines, "label"))) == len(view.lines)
    for run_id, folder in view.folders.items():
        assert folder == tmp_path / run_id and (folder / "record.json").exists()
    alone = view_of((folders[0], read_all(folders[0])))
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
    assert len(part.records) == len(part.runs) == len(part.lines) == MOST
    assert {"ddp micro-batch 598", "tp micro-batch 599"} <= set(column_values(part.lines, "label"))  # the fastest
    whole, ratios = (
        {line.label: line.get("peak_allocated_bytes_ratio") for line in shown.lines} for shown in (view, part)
    )
    assert all(whole[label] == ratio for label, ratio in ratios.items())
    page = sections(view)
    assert f"{MOST} of {3 * MOST} runs" in " ".join(texts(page))
    assert all(len(part.rows) <= MOST for section in page for part in section.parts if isinstance(part, Table))


def test_many_runs_of_several_groups_have_a_report_though_a_group_is_not_shown() -> None:
    """The fault: a traceback, as the title of a group was made of its first run that is shown."""
    many = [
        record_of(row(n, "ddp", "torch", 0, repeat=n % 3, global_batch=n // 3, tokens_per_second=1000.0 + n))
        for n in range(3 * MOST)
    ]
    view = View("many", many)
    part = truncate(view, MOST)
    assert any(not set(group.members) & set(part.lines) for group in part.groups)
    charts = [part for section in sections(view) for part in section.parts if isinstance(part, Chart)]
    assert "first" in {chart.name for chart in charts}


def test_every_chart_has_a_valid_file_name() -> None:
    pictures = [part for section in sections(View("example", example())) for part in section.parts]
    names = [part.name for part in pictures if isinstance(part, Chart)]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


def test_the_command_accepts_several_folders_and_rejects_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(stored(tmp_path / name, example())) for name in ("a", "b")]
    assert main(["report", *folders, "--fits-in", "18MiB", "--pivot", "repeat"]) == 0
    written = {path.name for path in (tmp_path / "a+b").iterdir()}
    assert written == {"runs.csv", "runs.parquet", "report.md", "report.html", "figures"}
    assert "Fits in 18.00 MiB" in (tmp_path / "a+b" / "report.md").read_text()
    capsys.readouterr()
    mistakes = {
        ("--pivot", "nope"): "--pivot=nope is not a column",
        ("--fits-in", "2 suitcases"): "--fits-in=2 suitcases is",
    }
    for mistake, message in mistakes.items():
        assert main(["report", folders[0], *mistake]) == 2
        assert capsys.readouterr().err.startswith(message) and not (tmp_path / "a" / "report.md").exists()


def test_a_report_without_charts_is_complete_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(specs: object) -> dict[str, str]:
        raise render.DrawingError("no renderer")

    monkeypatch.setattr(render, "svgs", fails)
    folder = stored(tmp_path / "plain", example())
    assert main(["report", str(folder)]) == 0
    assert "report.md has no charts: no renderer" in capsys.readouterr().err
    assert "![" not in (folder / "report.md").read_text() and (folder / "report.html").stat().st_size > 10**5


if __name__ == "__main__":
    GOLDEN.write_text(golden(), encoding="utf-8")


def test_a_column_of_labels_stays_where_it_is_empty() -> None:
    """Without it the first column of figures would be taken for labels."""
    lines = lines_of(example()[:2])
    columns = [
        ShownColumn("phase", ["", ""], number=False),
        ShownColumn("gradients", ["1", "2"]),
        ShownColumn("loss", ["", ""]),
    ]
    shown = line_table(lines, columns)
    assert shown and (shown.header, shown.label_columns) == (["run", "phase", "gradients"], 2)
