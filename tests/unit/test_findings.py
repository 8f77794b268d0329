"""The findings of a report: a golden page, the sentences that follow from made-up runs, and files that agree."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.cli.main import main
from harness.records.schema import Record
from harness.records.store import read_all, rows_of, write_record, write_runs_csv
from harness.report.caveats import by_kind
from harness.report.charts import render
from harness.report.claims import Claim
from harness.report.columns import ShownColumn, line_table
from harness.report.document import Chart, Table
from harness.report.files import write_runs_parquet
from harness.report.findings import beside
from harness.report.first_screen import first_answers
from harness.report.lines import column_values, lines_of
from harness.report.overview import best
from harness.report.sections import sections
from harness.report.text import labels_text
from harness.report.view import MOST, View, truncate, view_of
from tests.support.example_records import FAILED, HOSTILE, MIB, PARAMETERS, mixed, record_of, records, row
from tests.support.tables import changed, page, page_text, printed

GOLDEN = Path(__file__).parent / "golden_report.md"


def line(first: int, strategy: str, engine: str, stage: int, speeds: list[float], **changes: Any) -> list[Record]:
    """Return a run for each speed that differ only in their repeat, with fixed shares of a step and of a peak."""
    shares = {"step_seconds": 1, "step_seconds_p95": 1.25, "forward_seconds": 1 / 4, "backward_seconds": 1 / 2}
    shares |= {"optimizer_seconds": 1 / 8, "data_seconds": 1 / 16, "exposed_communication_seconds": 1 / 16}
    records = []
    for repeat, speed in enumerate(speeds):
        figures = {"repeat": repeat, "tokens_per_second": speed, "tokens_per_second_per_device": speed / 2}
        figures |= {"idle_seconds": 0.0} | {name: share * 1024 / speed for name, share in shares.items()}
        entry = row(first + repeat, strategy, engine, stage, **(figures | changes))
        peak, state = (
            entry["peak_allocated_bytes"],
            {name: entry[f"{name}_bytes"] for name in ("parameter", "optimizer")},
        )
        parts = state | {"activation": MIB, "temporary": peak - sum(state.values()) - MIB}
        entry |= {f"at_peak_{name}_bytes": size for name, size in parts.items()}
        records.append(record_of({"predicted_peak_bytes": peak * 11 // 10, "peak_phase": "backward"} | entry))
    return records


def several(*rows: tuple[str, dict[str, Any]], **shared: Any) -> list[Record]:
    """Return a run of torch for each strategy with its changes."""
    return [record_of(row(number, name, "torch", 0, **shared | own)) for number, (name, own) in enumerate(rows)]


DDP = line(1, "ddp", "torch", 0, [16000.0, 15900.0, 16100.0])

REFUSED = "strategy.tp=3 does not divide model.num_attention_heads=4: choose 1, 2 or 4"

# Seven lines: three of repeated runs, one checkpointed, one alone, one out of memory and one refused.
EXAMPLE = [
    *DDP,
    *line(
        *(11, "ddp", "torch", 0, [12000.0, 12100.0, 11900.0]),
        checkpointing="full",
        activation_bytes=MIB // 2,
        peak_allocated_bytes=16 * MIB,
    ),
    *line(21, "zero1", "deepspeed", 1, [15950.0, 15000.0, 16800.0], peak_allocated_bytes=18 * MIB),
    *line(31, "zero3", "deepspeed", 3, [8000.0], communication_bytes=6 * PARAMETERS, peak_allocated_bytes=12 * MIB),
    record_of(row(41, "tp", "torch", 0, status="oom", reason="rank 1 in backward: out of memory", **FAILED)),
    record_of(row(42, "tp_sp", "torch", 0, status="refused", reason=REFUSED, **FAILED)),
]

# A winner with its costs: ddp, then zero1, then tp with the least memory and much communication.
CLEAR = [
    *DDP,
    *line(11, "zero1", "deepspeed", 1, [12000.0, 12100.0, 11900.0], peak_allocated_bytes=18 * MIB),
    *line(21, "tp", "torch", 0, [4000.0, 4010.0, 3990.0], peak_allocated_bytes=16 * MIB, idle_seconds=0.15),
]

ALONE = CLEAR[::3]


def test_the_report_equals_the_golden_file() -> None:
    """If it changed on purpose, python -m tests.unit.test_findings writes the file anew, to be read line by line."""
    assert golden() == GOLDEN.read_text(encoding="utf-8")


def golden() -> str:
    """Return the report without what differs between machines, which is versions."""
    text = re.sub(r" Recorded with python .*", "", page("example", EXAMPLE))
    return re.sub(r"## Versions and environment\n\n.*", "", text, flags=re.DOTALL)


H100: dict[str, Any] = {"launch": "simulated", "measured_on": "NVIDIA H100 80GB HBM3"}

GPU: dict[str, Any] = {"measured_on": "NVIDIA H200"}

BUSY: dict[str, Any] = {"noise_warning": "busy"}

BRIEF: dict[str, Any] = {"step_seconds_iqr_ratio": None}  # fewer than four steps were timed

SIMULATED = several(("ddp", {}), ("tp", {"peak_allocated_bytes": 18 * MIB}), **H100, memory_limit_bytes=80 * MIB)

SIXTY_FOUR = {"environment": {"devices": 8}, "config": {"cluster": {"nodes": 64}}}

BUDGET = {"config": {"cluster": {"memory_budget": "80MiB"}}}

THREADS = several(("single", {"world_size": 1}), ("ddp", {}))


def scaling(cores: int, **changes: Any) -> list[Record]:
    """Return a strategy on one rank, whose row may be changed, and on two."""
    entries = line(1, "ddp", "torch", 0, [1000.0, 1001.0, 999.0], **{"world_size": 1} | changes)
    entries += line(11, "ddp", "torch", 0, [1800.0, 1801.0, 1799.0])
    return changed(entries, parts={"environment": {"cores": cores}})


# A curve of scaling has one configuration: a compiled run is not the larger world of an uncompiled one.
WAYS = [
    line(10 * n, "ddp", "torch", 0, [speed, speed + 1, speed - 1], world_size=ranks, compile=is_compiled)
    for n, (ranks, is_compiled, speed) in enumerate(
        ((1, False, 1000.0), (2, False, 1500.0), (1, True, 4000.0), (2, True, 6400.0))
    )
]

OOM = FAILED | {"status": "oom", "reason": "rank 0 in backward: out of memory"}

# Two strategies at two sizes of the model in 18 MiB per rank, of which one runs out of it at the larger.
WALL = several(
    *(
        (
            name,
            {"parameters": size * 10**6, "peak_allocated_bytes": each * size * MIB} | (OOM if each * size > 18 else {}),
        )
        for (name, each), size in itertools.product((("ddp", 12), ("zero3", 8)), (1, 2))
    ),
    memory_limit_bytes=18 * MIB,
)

SENT = {"ddp": 4 * MIB, "zero1": 4 * MIB + 4, "tp": 6 * MIB}

NORMS = [entry.with_row(communication_bytes=SENT[entry.row["strategy"]]) for entry in ALONE]  # ZeRO sends a norm

PEAKS = [entry.with_row(peak_allocated_bytes=peak * MIB) for entry, peak in zip(DDP, (20, 21, 20), strict=True)]

OTHERS = several(("ddp", {}), ("tp", {}), precision="bf16_mixed")

UNRANKED = "Not ranked: of 3 configurations, "

# Runs, sentences that their report has, and words that it lacks.
REPORTS: dict[str, tuple[list[Record], tuple[str, ...], tuple[str, ...]]] = {
    "a winner with its cost and reason": (
        CLEAR,
        (
            "**Fastest**: ddp at 16,000 tokens/s [15,900–16,100], 1.33 × the speed of zero1, the next.",
            "**Cost**: ddp takes 20.00 MiB per rank at the peak, 1.25 × that of tp; 4.00 MiB sent per rank and step.",
            "take tp for memory: 16.00 MiB per rank at the peak, 80 % of ddp's, at 0.25 × the speed of ddp.",
            "takes 21.3 ms longer than one of ddp in the median run of each, mainly by 10.7 ms more backward and"
            " 5.33 ms more forward. A step of tp takes 192 ms longer than one of ddp in the median run of each,"
            " mainly by 150 ms more idle and 96 ms more backward. The peak of ddp is 4.00 MiB above that of tp,"
            " mainly by 4.00 MiB more",
        ),
        (),
    ),
    "a disturbed speed is struck and stands in no sentence": (
        changed(CLEAR, "ddp", **BUSY),
        (
            "zero1 at 12,000 tokens/s [11,900–12,100], 3.00 × the speed of tp",
            "Not ranked: ddp (disturbed)",
            "Speeds and times of ddp: something disturbed every run",
            "~~16,000 ‡~~",
            "~~64.0~~",
        ),
        ("Ignore all speeds", "× the speed of ddp"),
    ),
    "a busy machine": (
        changed(CLEAR, "ddp", "zero1", **BUSY),
        (
            "# Memory and communication of three strategies for",
            "Speeds are not ranked (disturbed): more repeats on a quiet machine would rank them.",
            "| strategy | ranks | peak memory MiB | × peak memory | communication MiB | status |",
            "| strategy | ranks | tokens/s |",
            "~~16,000 ‡~~",
        ),
        ("Ignore all speeds", "machine was busy", "tokens per second of"),
    ),
    "few steps": (
        changed(CLEAR, "ddp", "zero1", **BRIEF),
        ("2 timed over fewer than four steps and 1 with 3 undisturbed runs or more; train.steps=10",),
        ("Ignore all speeds",),
    ),
    "few steps in all": (
        changed(CLEAR, **BRIEF),
        ("Speeds are not ranked (disturbed): train.steps=10 and more repeats would rank them.",),
        ("Ignore all speeds",),
    ),
    "single runs are not ranked": (
        ALONE,
        (UNRANKED + "3 ran once; repeats=3 would rank them.", "16,000 (n = 1)"),
        ("the speed of", "Each row is certainly faster", "**16,000", "In the runs of median speed, a step of"),
    ),
    "each is unranked for another reason": (
        [*CLEAR[:4], *changed(CLEAR[6:7], **BUSY)],
        (UNRANKED + "1 disturbed, 1 ran once undisturbed and 1 with 3 undisturbed runs or more; repeats=3 on a quiet",),
        (),
    ),
    "one is brief": (
        [*DDP, *changed(CLEAR[3:4], **BRIEF), CLEAR[6]],
        ("1 timed over fewer than four steps, 1 ran once and 1 with 3",),
        (),
    ),
    "repeats that were disturbed": (
        [entry.with_row(**BUSY) if entry.row["repeat"] else entry for entry in CLEAR],
        ("3 ran once; more repeats on a quiet machine would rank them.",),
        (),
    ),
    "scaling": (scaling(2), ("ddp on 2 ranks instead of 1 has 1.80 × the tokens/s, 90 % of linear scaling.",), ()),
    "scaling on shared cores": (scaling(1), ("up to 2 ranks shared 1 core",), ("linear scaling",)),
    "scaling of disturbed speeds": (scaling(2, **BUSY), (), ("linear scaling",)),
    "scaling of brief runs": (scaling(2, **BRIEF), (), ("linear scaling",)),
    "scaling of two variants": ([*itertools.chain(*WAYS)], ("1.50 × the tokens/s", "1.60 × the tokens/s"), ()),
    "scaling of two variants, backwards": (
        [*itertools.chain(*WAYS[::-1])],
        ("1.50 × the tokens/s", "1.60 × the tokens/s"),
        (),
    ),
    "no scaling from one variant to another": (WAYS[0] + WAYS[3], (), ("linear scaling",)),
    "simulations": (
        changed(SIMULATED, parts=SIXTY_FOUR),
        (
            "Not ranked, as these are tokens/s by a model of the device: ",
            "The code of one or more ranks of each layout ran on simulated devices",
            "Simulated for 8 × NVIDIA H100 80GB HBM3, 64 nodes, on",
            "Nothing was measured: the engines' code ran on simulated devices",
            "2 layouts fit in the 80.00 MiB of a device (1.68 GiB of it are left for its CUDA context and NCCL, as"
            " one H200 needed): 18.00 MiB to 20.00 MiB allocated, without workspaces",
        ),
        (),
    ),
    "simulations in a budget": (
        changed(SIMULATED, parts=BUDGET),
        ("2 layouts fit in the 80.00 MiB of cluster.memory_budget: 18.00 MiB to",),
        ("left for its CUDA context",),
    ),
    "GPUs": (changed(EXAMPLE, **GPU), (), ("GPUs carry over", "share one memory", "layouts fit in", "Launch-bound")),
    "one cause of several failures": (
        several(*[("tp", OOM | {"repeat": n}) for n in range(3)]),
        ("## Failures\n\n- **tp repeat 0, tp repeat 1, tp repeat 2**: oom: rank 0 in backward: out of memory\n\n",),
        (),
    ),
    "a single rank with more threads": (
        [
            *changed(THREADS[:1], parts={"environment": {"threads": 2}}),
            *changed(THREADS[1:], parts={"environment": {"threads": 1}}),
        ],
        ("a single rank computed with 2 threads, others with 1, and all configurations had the same",),
        (),
    ),
    "notes": (
        [dataclasses.replace(entry, notes=["memory is not counted: no compiler", "few cores"]) for entry in EXAMPLE],
        ("- Noted as they ran: ", ": memory is not counted: no compiler; few cores."),
        (),
    ),
    "equal threads": (changed(THREADS, parts={"environment": {"threads": 1}}), (), ("with 1, so that",)),
    "groups by ranks": (mixed(), ("**Speed on 4 ranks**", "On 2 ranks:", "On 4 ranks:"), ()),
    "groups by precision": (
        [*EXAMPLE, *OTHERS],
        ("In fp32:", "In bf16_mixed:", "- zero1 beside ddp: 90 % of its peak memory; no certain difference in speed"),
        (),
    ),
    "a single run": (
        DDP[:1],
        (
            "- The peaks predicted for 1 configuration are off by 10 % in the median and by 10 % at most.",
            "ddp ran alone, in 20.00 MiB per rank at the peak, at 16,000 tokens/s (n = 1).",
            "1 undisturbed run: ddp",
        ),
        (" beside ddp", "**Fastest**", "**How sure**"),
    ),
    "failures alone": (EXAMPLE[-2:], ("2 of 2 configurations have no figures (1 oom, 1 refused)",), ("**Fastest**",)),
    "the largest model": (
        WALL,
        ("The largest model that ran in 18.00 MiB per rank: 2.0 million parameters with zero3; 1.0 million",),
        (),
    ),
    "models that all fit": ([entry for entry in WALL if entry.status == "ok"], (), ("The largest model",)),
    "a setting of some rows": (
        [entry.with_row(checkpointing_every=2) if n == 3 else entry for n, entry in enumerate(EXAMPLE)],
        (),
        ("; checkpointing in 1 of 2 layers",),
    ),
    "a setting of all rows": (changed(EXAMPLE, checkpointing_every=2), ("; checkpointing in 1 of 2 layers",), ()),
    "models of several sizes": (
        [entry.with_row(parameters=number) for number, entry in enumerate(EXAMPLE)],
        (),
        ("One model was trained",),
    ),
    "the bytes of a norm": (
        NORMS,
        ("take ddp or zero1 for communication: 4.00 MiB sent per rank and step.",),
        ("| **4.00** |",),
    ),
    "the bytes of a norm alone": (NORMS[:2], (), ("for communication",)),
    "memory is the same in every table": (
        [*changed(PEAKS, predicted_peak_bytes=22 * MIB), *CLEAR[3:]],
        (
            "| ddp | 2 | **16,000 [15,900–16,100]** | 1.00 | 21.00 |",
            "| 21.00 | 1.00 | 19.50 |",
            "| 22.00 | 21.00 |",
            "| from 21.00 MiB | ddp |",
            "ddp takes 21.00 MiB per rank",
        ),
        ("20.00",),
    ),
    "idle GPUs": (
        changed(CLEAR, **GPU, idle_seconds=0.2),
        ("Launch-bound: in 3 of 3 configurations the GPUs were idle for more than half",),
        (),
    ),
    "busy GPUs": (changed(CLEAR, **GPU, idle_seconds=0.02), (), ("Launch-bound",)),
    "idle stages": (changed(CLEAR, **GPU, idle_seconds=0.2, pp=2), (), ("Launch-bound",)),
    "an idle CPU": (changed(CLEAR, idle_seconds=0.2), (), ("Launch-bound",)),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_says_what_follows_from_its_runs(name: str) -> None:
    entries, present, absent = REPORTS[name]
    text = "\n".join([page_text(entries), *printed(entries, 400)])
    assert [words for words in present if words not in text] == [] == [words for words in absent if words in text]


def test_what_a_paper_says_stands_behind_its_own_figure() -> None:
    """The bytes sent and the model state each have the paper's figure; the peak has none."""
    claim = Claim("zero3", "bytes sent", "", "paper", 1.5, "", 1.5, True, "", True)
    state = Claim("zero3", "model state", "", "paper", 2.0, "", 1.6, False, "a copy in fp32", False)
    members = {line.label: line for line in View("papers", EXAMPLE).largest_groups[0].members}
    assert beside(members["zero3"], members["ddp"], [claim, state]) == (
        "zero3 beside ddp: 60 % of its peak memory; 1.50 × its bytes sent (by the paper's formula 1.50 ×);"
        " 0.62 × its model state (by the paper's formula 0.50 ×, different: a copy in fp32)."
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (20 * MIB, "4 of 4 configurations. A tie within run-to-run variation: ddp"),
        (
            20 * MIB - 1,
            "3 of 4 configurations. The fastest of them is zero1: 15,950 tokens/s [15,000–16,800] in 18.00",
        ),
        (13 * MIB, "1 of 4 configurations: zero3 in 12.00 MiB."),
        (MIB, "Nothing measured here: the least is 12.00 MiB."),
    ],
)
def test_a_recommendation_respects_the_memory_limit(size: int, expected: str) -> None:
    lead, text = next(first_answers(View("example", EXAMPLE), size))
    assert lead.startswith("Fits in ") and text.startswith(expected)


def test_best_marks_are_of_ranked_speeds_and_exact_bytes() -> None:
    """In the example ddp and zero1 are about as fast and send the same; a single run has none to compare with."""
    views = {"example": EXAMPLE, "clear": CLEAR, "alone": records()[2:3], "mixed": mixed()}
    marks = {
        (name, column): {line.label for line in lines}
        for name, entries in views.items()
        for column, lines in best(View(name, entries)).items()
    }
    assert marks == {
        ("example", "peak_allocated_bytes"): {"zero3"},
        ("example", "state_bytes"): {"zero3"},
        ("example", "activation_bytes"): {"ddp + full checkpointing"},
        ("clear", "tokens_per_second"): {"ddp"},
        ("clear", "step_seconds"): {"ddp"},
        ("clear", "tokens_per_second_per_device"): {"ddp"},
        ("clear", "peak_allocated_bytes"): {"tp"},
        ("clear", "state_bytes"): {"zero1"},
    }


def test_notes_that_many_rows_share_say_so_once() -> None:
    causes = [(f"s{n}", f"other processes took {n / 10} of 2 cores") for n in range(3, 12)]
    causes.append(("s3", "steps became 11% faster; other processes took 1.9 of 2 cores"))
    assert by_kind(causes) == {
        "other processes took 0.3 to 1.9 of 2 cores": [f"s{n}" for n in range(3, 12)],
        "steps became 11% faster": ["s3"],
    }
    names = [labels_text(list("abcdefgh")[:n], 8) for n in (2, 7, 8)]
    assert names == ["a, b", "7 of 8 configurations", "all 8 configurations"]


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
    assert all(at == tmp_path / name and (at / "record.json").exists() for name, at in view.folders.items())
    alone = view_of((folders[0], read_all(folders[0])))
    assert alone.name == "a" and not any("/" in record.row["run_id"] for record in alone.records)


def test_parquet_has_the_rows_of_csv_with_their_types(tmp_path: Path) -> None:
    entries = [*EXAMPLE, record_of(row(90, HOSTILE, "torch", 0, extra="x", own_bytes=3, mixed=1, compile=True))]
    rows = rows_of([entries[0].with_row(mixed=0.5), *entries[1:]])
    table = pd.read_csv(write_runs_csv(tmp_path, rows), keep_default_na=False, na_values=[""])
    parquet = pd.read_parquet(write_runs_parquet(tmp_path, rows), dtype_backend="numpy_nullable")
    assert list(table) == list(parquet) and parquet["mixed"].tolist()[0] == 0.5
    kinds = {
        "peak_allocated_bytes": "Int64",
        "own_bytes": "Int64",
        "tokens_per_second": "Float64",
        "compile": "boolean",
    }
    assert {name: str(parquet[name].dtype) for name in kinds} == kinds
    for name in ("status", "strategy", "tokens_per_second", "peak_allocated_bytes", "loss_deviation"):
        assert parquet[name].astype(object).where(parquet[name].notna(), None).tolist() == (
            table[name].astype(object).where(table[name].notna(), None).tolist()
        )


def test_a_page_of_many_runs_states_how_many_it_shows() -> None:
    """Of two kinds the fastest are shown; once a group of which no run is shown had a traceback for a title."""
    many = several(*[(("ddp", "tp")[n % 2], {"micro_batch": n, "tokens_per_second": 1e3 + n}) for n in range(3 * MOST)])
    groups = several(*[("ddp", {"repeat": n % 3, "global_batch": n // 3}) for n in range(3 * MOST)])
    view = View("many", many)
    part = truncate(view, MOST)
    assert len(part.records) == len(part.runs) == len(part.lines) == MOST
    assert {"ddp micro-batch 598", "tp micro-batch 599"} <= set(column_values(part.lines, "label"))
    ratios = {line.label: line.get("peak_allocated_bytes_ratio") for line in view.lines}
    assert all(ratios[line.label] == line.get("peak_allocated_bytes_ratio") for line in part.lines)
    parts = [part for section in sections(view) for part in section.parts]
    assert f"{MOST} of {3 * MOST} runs" in str(parts)
    assert all(len(part.rows) <= MOST for part in parts if isinstance(part, Table))
    pictures = [
        part.name for section in sections(View("groups", groups)) for part in section.parts if isinstance(part, Chart)
    ]
    assert "first" in pictures


@pytest.mark.parametrize("pivot", ["checkpointing", "repeat"])
def test_the_command_has_a_pivot_and_what_fits(pivot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several folders the report stands beside them; the terminal shows the requested tables too."""
    folders = [str(stored(tmp_path / name, EXAMPLE)) for name in ("a", "b")[: 1 + (pivot == "repeat")]]
    assert main(["report", *folders, "--pivot", pivot, "--fits-in", "18MiB"]) == 0
    target, shown = tmp_path / "+".join(("a", "b")[: len(folders)]), capsys.readouterr().out
    names = {"runs.csv", "runs.parquet", "report.md", "report.html", "figures"}
    assert (
        names <= {path.name for path in target.iterdir()} and "Fits in 18.00 MiB" in (target / "report.md").read_text()
    )
    assert shown.index("more columns") < shown.index("Fits in 18.00 MiB: ") < shown.index("How sure: ")
    if pivot == "checkpointing":
        assert re.search(r"strategy +none +full\n(.*\n)*ddp +20.00 +16.00\n", shown)


@pytest.mark.parametrize(
    ("option", "message"),
    [(("--pivot", "nope"), "--pivot=nope is not a column"), (("--fits-in", "2 suitcases"), "--fits-in=2 suitcases is")],
)
def test_wrong_options_are_refused(
    option: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(stored(tmp_path, EXAMPLE)), *option]) == 2
    assert capsys.readouterr().err.startswith(message) and not (tmp_path / "report.md").exists()


def test_a_report_without_charts_is_complete_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(specs: object) -> dict[str, str]:
        raise render.DrawingError("no renderer")

    monkeypatch.setattr(render, "svgs", fails)
    assert main(["report", str(stored(tmp_path, EXAMPLE))]) == 0
    assert "report.md has no charts: no renderer" in capsys.readouterr().err
    assert "![" not in (tmp_path / "report.md").read_text() and (tmp_path / "report.html").stat().st_size > 10**5


def test_a_column_of_labels_stays_where_it_is_empty() -> None:
    """Without it the first column of figures would be taken for labels."""
    columns = [ShownColumn("phase", ["", ""], number=False), ShownColumn("gradients", ["1", "2"])]
    shown = line_table(lines_of(EXAMPLE[:2]), [*columns, ShownColumn("loss", ["", ""])])
    assert shown and (shown.header, shown.label_columns) == (["run", "phase", "gradients"], 2)


if __name__ == "__main__":
    GOLDEN.write_text(golden(), encoding="utf-8")
