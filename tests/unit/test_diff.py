"""Two folders side by side: only what differs, the right pairs, and ratios of B over A."""

import io
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from harness.cli.main import main
from harness.records.schema import Record
from harness.records.store import read_runs_csv, rows_of, write_record, write_runs_csv
from harness.report import folder_changes
from harness.report.folder_changes import DEFINING_COLUMNS, pairs
from harness.report.labels import OTHER_OPTIONS, VARYING
from harness.runner.config_columns import config_columns
from tests.support.commands import ROOT, compose_layout
from tests.support.tables import changed

MIB = 2**20

HOSTILE = "[red]r[/red] \x1b[31mred\x1b[0m\n:smile: | \u202edrow"

ROW: dict[str, Any] = {
    "name": "demo",
    "status": "ok",
    "reason": "",
    "model": "tiny",
    "checkpointing": "none",
    "precision": "fp32",
    "world_size": 2,
    "global_batch": 8,
    "seq_len": 128,
    "tokens_per_second": 1000.0,
    "step_seconds": 1.024,
    "step_seconds_iqr_ratio": 0.02,
    "peak_allocated_bytes": 20 * MIB,
    "communication_bytes": 4 * MIB,
    "loss_deviation": 1e-7,
    "grad_deviation": 2e-6,
    "repeat": 0,
}

CONFIG: dict[str, Any] = {
    "name": "demo",
    "results_dir": "results",
    "model": {"name": "tiny", "hidden_size": 96},
    "train": {"steps": 10, "lr": 0.001},
    "data": {"path": None, "cache": "~/.cache"},
    "tracking": {"mode": "none"},
    "world_size": None,
    "timeout_seconds": 1800.0,
    "hang_seconds": 600.0,
}


def record(number: int, strategy: str, config: dict[str, Any] | None = None, **row: Any) -> Record:
    """Return an ok run on two ranks, with the configuration of such a run."""
    own = {"run_id": f"{number:010x}", "strategy": strategy, "started_at": f"2026-01-02T03:{number:02d}:00Z"}
    named = {"strategy": {"name": strategy, "layers_per_stage": None}, "repeat": row.get("repeat", 0)}
    return Record.from_json(
        {
            "row": ROW | own | row,
            "config": CONFIG | named | (config or {}),
            "environment": {"device_name": "cpu", "cores": 2, "driver": None, "variables": {"OMP_NUM_THREADS": "1"}},
            "versions": {"torch": "2.13.0", "deepspeed": None, "code": "0123456789ab"},
            "commit": {"commit": "a" * 40, "dirty": False},
        }
    )


def runs_of(strategy: str, *values: float | None, first: int = 1, column: str = "tokens_per_second") -> list[Record]:
    """Return repeats of one configuration with these speeds, or these values of another column."""
    return [record(first + repeat, strategy, repeat=repeat, **{column: value}) for repeat, value in enumerate(values)]


def diff(
    folder: Path, first: Sequence[Record], second: Sequence[Record], *options: str, as_table: bool = False
) -> tuple[int, str]:
    """Return the exit status and the output of the command on two folders, or on a table and a folder."""
    paths = [folder / "one", folder / "two"]
    for path, records in zip(paths, (first, second), strict=True):
        for entry in records:
            write_record(path / entry.run_id, entry)
    if as_table:
        paths[0] = write_runs_csv(folder, rows_of(first))
    before = sorted(folder.rglob("*"))
    with redirect_stdout(io.StringIO()) as text:
        status = main(["diff", *map(str, paths), *options])
    assert sorted(folder.rglob("*")) == before
    return status, text.getvalue()


OTHER_PARTS: dict[str, Any] = {
    "versions": {"torch": "2.14.0", "deepspeed": "0.19.8"},
    "commit": {"commit": "b" * 40, "dirty": True},
    "environment": {"cores": 4, "processor": "EPYC", "variables": {"NCCL_DEBUG": "INFO"}},
    "config": {
        "name": "other",
        "results_dir": "/elsewhere",
        "tracking": {"mode": "online"},
        "train": {"steps": 20, "lr": 0.001},
        "data": {"path": "corpus.txt", "cache": "/tmp/cache"},
        "strategy": {"name": "ddp", "layers_per_stage": None, "offload": "none"},  # a key of later versions
    },
}

OOM = {"status": "oom", "reason": "rank 1 ran out of memory", "tokens_per_second": None}

SAME = "Versions: no difference\nEnvironment: no difference\nConfiguration shared by all runs: no difference"

UNCERTAIN = "~ marks a difference that is not certain"

FEW = "which is faster is not certain, with fewer than 3 undisturbed runs"

CALM = runs_of("ddp", 1000.0, 1010.0, 990.0)

LENGTHS = [
    record(
        n, "ddp", {"train": {"steps": 10, "lr": 0.001, "seq_len": 128 * n}}, seq_len=128 * n, tokens_per_second=1e3 * n
    )
    for n in (1, 2)
]

TRIPLED = [entry.with_row(tokens_per_second=3 * entry.row["tokens_per_second"]) for entry in LENGTHS[::-1]]

NUMBERED = {n: record(n, "ddp", seq_len=n, tokens_per_second=1000.0 * n) for n in (1, 2, 3, 4)}

ACCELERATE = [
    record(n, "ddp", {"strategy": {"name": "ddp", "options": {"static_graph": is_static}}}, engine="accelerate")
    for n, is_static in ((3, False), (4, True))
]

LABELLED = [
    record(1, "ddp", engine="torch", compile=False),
    record(2, "ddp", {"train": {"compile": True}}, engine="torch", compile=True),
    *ACCELERATE,
]

CHANGED = {"tokens_per_second": 800.0, "peak_allocated_bytes": 30 * MIB, "communication_bytes": MIB}

# Records of A and B, what the lines of the command have, spaces aside, and what none of them begins with.
SIDES: dict[str, tuple[list[Record], list[Record], str, str]] = {
    "every difference and nothing else": (
        [record(1, "ddp")],
        changed([record(1, "ddp")], parts=OTHER_PARTS, tokens_per_second=1500.0),
        f"""Versions A B
commit {"a" * 12} {"b" * 12} and changes
deepspeed - 0.19.8
torch 2.13.0 2.14.0
Environment A B
cores 2 4
processor - EPYC
variables.NCCL_DEBUG - INFO
variables.OMP_NUM_THREADS 1 -
Configuration shared by all runs A B
data.path null corpus.txt
strategy.offload - none
train.steps 10 20
ddp ok 1,000 1,500 1.50""",
        "code|driver|name|results_dir|tracking|data.cache|train.lr",
    ),
    "a folder and itself": (
        [record(1, "ddp"), record(2, "zero3", **OOM)],
        [record(1, "ddp"), record(2, "zero3", **OOM)],
        f"{SAME}\nddp ok 1,000 1,000 1.00 20.00 20.00 1.00 4.00 4.00 1.00 1.0e-7 2.0e-6",
        "only in|A: zero3|B: zero3",
    ),
    "ratios of B over A": (
        [record(1, "ddp")],
        [record(1, "ddp", **CHANGED, loss_deviation=3e-7, grad_deviation=None)],
        """tok/s tok/s × peak MiB peak MiB × comm. MiB comm. MiB × loss dev. grad dev.
run status A B tok/s A B peak A B comm. A → B A → B
ddp ok 1,000 800 0.80 20.00 30.00 1.50 4.00 1.00 0.25 1.0e-7 → 3.0e-7 2.0e-6 → -
× is the ratio of B to A""",
        UNCERTAIN,
    ),
    "ranges that meet": (CALM, runs_of("ddp", 1040.0, 1000.0, 1090.0), f"1,000 1,040 1.04~\n{UNCERTAIN}", FEW),
    "ranges apart": (CALM, runs_of("ddp", 1200.0, 1210.0, 1190.0), "1,000 1,200 1.20 ", f"{UNCERTAIN}|{FEW}"),
    "a wide range": (CALM, runs_of("ddp", 1200.0, 1400.0, 1025.0), f"1,000 1,200 1.20~\n{UNCERTAIN}", FEW),
    "two runs": (CALM, runs_of("ddp", 1200.0, 1210.0), f"1,000 1,205 1.21 \n{FEW}: every run", UNCERTAIN),
    "figures without a column": (
        [record(1, "ddp", optimizer_bytes=2**20, in_flight=2, executed_flops=1000, forward_seconds=0.1)],
        [record(1, "ddp", optimizer_bytes=2**21, in_flight=2, executed_flops=1009, forward_seconds=0.2)],
        "ddp: optimizer_bytes 1.00 MiB → 2.00 MiB",
        "ddp: executed|ddp: in_flight|ddp: forward",
    ),
    "the median of repeats": (
        runs_of("ddp", 900.0, 1000.0, 1100.0),
        [record(1, "ddp", tokens_per_second=1090.0)],
        "ddp ok 1,000 1,090 1.09",
        UNCERTAIN,
    ),
    "statuses and runs without a pair": (
        [record(1, "ddp"), record(2, "zero3"), record(3, "tp")],
        [
            record(1, "ddp", noise_warning="other processes took 1.0 of 2 cores"),
            record(2, "zero3", **OOM),
            record(4, "pp_1f1b", status="refused", reason="no"),
        ],
        """zero3 ok → oom 1,000
B: zero3 oom: rank 1 ran out of memory
B: ddp noise warning: other processes took 1.0 of 2 cores
only in A: tp ok
only in B: pp_1f1b refused""",
        "tp ok",
    ),
    "another strategy alone": (  # every key is shared, and yet the two runs differ
        [record(1, "ddp")],
        [record(1, "ddp", {"strategy": {"name": "zero3", "layers_per_stage": None}})],
        "no run of A has the same configuration as a run of B\nonly in A: ddp",
        "ddp",
    ),
    "another model alone": (
        [record(1, "ddp")],
        [record(1, "ddp", {"model": {"name": "7b"}})],
        "no run of A has the same configuration as a run of B\nonly in A: ddp",
        "ddp",
    ),
    "a setting that varies": (
        LENGTHS,
        TRIPLED,
        "ddp seq_len 128 ok 1,000 3,000 3.00\nddp seq_len 256 ok 2,000 6,000 3.00",
        "only in",
    ),
    "what varies in A is no change for all": (
        LENGTHS,
        TRIPLED[:1],
        "Configuration shared by all runs: no difference\nddp seq_len 256 ok 2,000 6,000\nonly in A: ddp seq_len 128",
        "only in B",
    ),
    "lines of one configuration": (  # paired by run, and else the latest
        [NUMBERED[n] for n in (1, 2, 3)],
        [NUMBERED[n] for n in (1, 4)],
        "1 ok 1,000 1,000 1.00\n3 ok 3,000 4,000 1.33\nonly in A: ddp seq_len 2 ok",
        "only in B",
    ),
    "labels of one strategy": (
        LABELLED,
        LABELLED,
        "ddp torch ok\nddp torch compiled yes ok\nddp accelerate static_graph=False\nddp accelerate static_graph=True",
        "only in",
    ),
}


@pytest.mark.parametrize("name", SIDES)
def test_what_differs_is_listed_and_nothing_else(name: str, tmp_path: Path) -> None:
    first, second, present, absent = SIDES[name]
    status, text = diff(tmp_path, first, second)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert status == 0 and max(map(cell_len, text.splitlines()[2:])) <= 120
    assert [line for line in present.splitlines() if not any(line in f"{shown} " for shown in lines)] == []
    assert [line for line in lines if line.startswith(tuple(absent.split("|")))] == []


def test_the_command_prints_the_same_in_a_process_of_its_own(tmp_path: Path) -> None:
    first, second, *_ = SIDES["every difference and nothing else"]
    _, text = diff(tmp_path, first, second)
    command = [sys.executable, "-m", "harness", "diff", *(str(tmp_path / name) for name in ("one", "two"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", text)
    assert [line.rsplit("/", 1)[1] for line in text.splitlines()[:2]] == ["one, 1 run", "two, 1 run"]


def test_hostile_text_is_printed_as_text(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"environment": {HOSTILE: HOSTILE, "variables": {"CXX": HOSTILE, "LONG": "x" * 300}}}
    parts |= {"versions": {"torch": HOSTILE}, "config": {HOSTILE: HOSTILE}}
    broken = record(1, HOSTILE, status="error", reason=HOSTILE, noise_warning=HOSTILE)
    lines = diff(tmp_path, [record(1, HOSTILE)], changed([broken], parts=parts))[1].splitlines()
    text = "".join(lines)
    assert text.isprintable() and text.count("[red]r[/red]") >= 6 and ":smile:" in text
    assert max(map(cell_len, lines)) <= 120 and text.count("x") >= 300


# A baseline to hold.


def held(
    folder: Path, *sides: list[Record], limit: str = "5%", options: Sequence[str] = (), as_table: bool = False
) -> Any:
    """Return the exit status of a comparison with a baseline and its JSON."""
    status, text = diff(folder, *sides, "--fail-above", limit, "--json", *options, as_table=as_table)
    return status, json.loads(text)


FORMS = pytest.mark.parametrize("as_table", [False, True], ids=["folder", "table"])

# What a figure was and is in the repeats, and what becomes of it within a limit of 5 %, and of 0 %; None is no change.
FIGURES: list[tuple[str, list[int | None], list[int | None], str | None, str | None]] = [
    ("peak_allocated_bytes", [2000], [2100], "within limit", "regressed"),
    ("peak_allocated_bytes", [2000], [2101], "regressed", "regressed"),
    ("peak_allocated_bytes", [2000], [2000], None, None),
    ("peak_allocated_bytes", [2000], [1000], "improved", "improved"),
    # Timing decides how many of gloo's buffers exist at the peak of a run on a CPU.
    ("peak_allocated_bytes", [1000, 1040, 1000], [1000, 1200, 1040], None, None),
    ("peak_allocated_bytes", [1000, 1040, 1000], [1200, 1100, 1100], "regressed", "regressed"),
    ("communication_bytes", [0], [1], "regressed", "regressed"),
    ("communication_bytes", [100], [None], "regressed", "regressed"),
    ("communication_bytes", [None], [100], None, None),
    ("executed_flops", [10**15], [10**15 + 1], "within limit", "regressed"),
    ("activation_bytes", [1000], [1060], "regressed", "regressed"),
    ("optimizer_bytes", [1000], [1050], "within limit", "regressed"),
]


def sides_of(
    cases: Iterable[tuple[str, Sequence[float | None], Sequence[float | None], dict[str, Any]]],
) -> tuple[list[Record], list[Record]]:
    """Return the records of both sides: a configuration for each column, its values in A and B, and changes of B."""
    baseline: list[Record] = []
    current: list[Record] = []
    for number, (column, before, after, parts) in enumerate(cases):
        baseline += runs_of(f"case_{number}", *before, first=10 * number, column=column)
        current += changed(runs_of(f"case_{number}", *after, first=10 * number, column=column), parts=parts)
    return baseline, current


@FORMS
@pytest.mark.parametrize(("limit", "position"), [("5%", 3), ("0%", 4)])
def test_exact_figures_may_grow_up_to_the_limit(limit: str, position: int, as_table: bool, tmp_path: Path) -> None:
    """Of several repeats, they have grown only if they have in all."""
    sides = sides_of((*case[:3], {}) for case in FIGURES)
    status, outcome = held(tmp_path, *sides, limit=limit, as_table=as_table)
    changes = {change["run"]: (change["column"], change["verdict"]) for change in outcome["changes"]}
    expected = {f"case_{number}": (case[0], case[position]) for number, case in enumerate(FIGURES)}
    assert changes == {name: case for name, case in expected.items() if case[1]}
    assert status == 1 and not outcome["holds"]


DISTURBED = {"row": {"noise_warning": "other processes took 1.0 of 2 cores"}}

OTHER_DEVICE = {"row": {"measured_on": "NVIDIA H200"}}

OTHER_VERSION = {"versions": {"torch": "2.14.0", "code": "0123456789ab"}}

OTHER_MACHINE = {"environment": {"device_name": "cpu", "cores": 8}}

# Speeds of both sides, changes of B's records, and what becomes of the speed, also where versions may differ.
SPEEDS: list[tuple[list[float], list[float], dict[str, Any], str | None, str | None]] = [
    ([1000, 1010, 990], [900, 910, 890], {}, "regressed", "regressed"),
    ([1000, 1010, 890], [900, 910, 890], {}, None, None),  # the ranges meet
    ([1000, 1010, 950], [900, 930, 890], {}, None, None),  # and here they almost do
    ([1000, 1010, 990], [960, 965, 955], {}, None, None),  # less than the limit
    ([1000, 1010, 990], [1100, 1110, 1090], {}, "improved", "improved"),
    ([1000, 1010], [500, 510, 490], {}, "unjudged", "unjudged"),
    ([1000, 1010, 990], [500, 510, 490], DISTURBED, "unjudged", "unjudged"),
    ([1000, 1010, 990], [500, 510, 490], OTHER_VERSION, "unjudged", "regressed"),
    ([1000, 1010, 990], [500, 510, 490], OTHER_MACHINE, "unjudged", "unjudged"),
    ([1000, 1010, 990], [500, 510, 490], OTHER_DEVICE, "unjudged", "unjudged"),
]


@FORMS
@pytest.mark.parametrize(("position", "options"), [(3, []), (4, ["--across-versions"])])
def test_a_speed_has_changed_only_beyond_the_range_of_undisturbed_repeats(
    position: int, options: list[str], as_table: bool, tmp_path: Path
) -> None:
    sides = sides_of(("tokens_per_second", *case[:3]) for case in SPEEDS)
    status, outcome = held(tmp_path, *sides, options=options, as_table=as_table)
    verdicts = {change["run"]: change["verdict"] for change in outcome["changes"]}
    verdicts |= {name: "unjudged" for names in outcome["unjudged_speeds"].values() for name in names}
    expected = {f"case_{number}": case[position] for number, case in enumerate(SPEEDS)}
    assert verdicts == {name: verdict for name, verdict in expected.items() if verdict} and status == 1


@FORMS
def test_runs_that_fail_or_are_missing_regress_and_new_ones_do_not(as_table: bool, tmp_path: Path) -> None:
    failed = OOM | {"peak_allocated_bytes": None}
    baseline = [record(1, "ddp"), record(2, "zero3"), record(3, "tp", **failed), record(4, "cp", **failed)]
    baseline += [*runs_of("zero1", 1000, 1000, first=10), record(5, "single", peak_allocated_bytes=100)]
    current = [record(2, "zero3", **failed), record(3, "tp"), record(4, "cp", **failed), record(6, "pp_1f1b")]
    current += [
        record(5, "single", peak_allocated_bytes=110),
        record(10, "zero1"),
        record(11, "zero1", repeat=1, **failed),
    ]
    status, outcome = held(tmp_path, baseline, current, limit="20%", as_table=as_table)
    changes = {change["run"]: (change["after"]["value"], change["verdict"]) for change in outcome["changes"]}
    assert status == 1 and list(changes)[-1] == "single"
    assert changes == {
        "ddp": ("missing", "regressed"),
        "zero3": ("oom: rank 1 ran out of memory", "regressed"),
        "zero1": ("ok in 1 of 2 runs", "regressed"),
        "single": (110, "within limit"),
    }
    assert outcome["new"] == ["pp_1f1b"] and outcome["compared"] == 4


def test_the_table_is_sorted_by_how_much_worse_each_change_is(tmp_path: Path) -> None:
    grown = {"ddp": 1.06, "zero1": 1.5, "zero2": 1.04, "zero3": 0.5}
    baseline = [record(number, strategy) for number, strategy in enumerate(grown)]
    current = [record(n, name, peak_allocated_bytes=round(20 * MIB * by)) for n, (name, by) in enumerate(grown.items())]
    status, text = diff(tmp_path, baseline, current, "--fail-above", "5%")
    assert status == 1 and [" ".join(line.split()) for line in text.splitlines()[2:]] == [
        "verdict run figure change A B",
        "regressed zero1 peak memory +50.0 % 20.00 MiB 30.00 MiB",
        "regressed ddp peak memory +6.0 % 20.00 MiB 21.20 MiB",
        "within 5 % zero2 peak memory +4.0 % 20.00 MiB 20.80 MiB",
        "improved zero3 peak memory -50.0 % 20.00 MiB 10.00 MiB",
        "compared 4 configurations that are ok in A: memory, bytes sent and FLOPs as exact figures,"
        " and the speeds of 0",
        "speeds not judged for all: fewer than 3 undisturbed runs in A or in B: repeats=3 makes them",
        "REGRESSED: 2 of 4 configurations by more than 5 %",
    ]


def test_a_baseline_of_another_configuration_is_not_held(tmp_path: Path) -> None:
    """A setting that changed for all runs would otherwise make all of them comparable, and smaller."""
    smaller = record(1, "ddp", LENGTHS[1].config, peak_allocated_bytes=MIB)
    status, outcome = held(tmp_path, LENGTHS[:1], [smaller])
    assert status == 1 and [change["after"]["value"] for change in outcome["changes"]] == ["missing"]
    assert outcome["configuration"] == {"train.seq_len": ["128", "256"]}


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [record(1, "ddp", mfu=0.25, compile=True, at_peak_gathered_bytes=3, dropout=1e-9)]
    entries.append(record(2, "-zero", status="error", reason="=1+1, 'quoted' and \"so\"", peak_allocated_bytes=None))
    rows = rows_of(entries)
    read = read_runs_csv(write_runs_csv(tmp_path, rows))
    known = [{name: value for name, value in row.items() if value not in (None, "")} for row in rows]
    assert [{name: value for name, value in line.row.items() if value is not None} for line in read] == known
    assert known[0]["machine"] == "2 cores" and "torch 2.13.0, code" in known[0]["versions"]


TABLES = sorted((ROOT / "results" / "published").glob("*/runs.csv"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_published_tables_hold_themselves_as_a_baseline(table: Path, tmp_path: Path) -> None:
    """Whatever version wrote them; one more byte in every repeat is shown."""
    records = read_runs_csv(table)
    grown = [
        line.with_row(peak_allocated_bytes=line.row["peak_allocated_bytes"] + 1)
        for line in records
        if line.status == "ok"
    ]
    worse = write_runs_csv(tmp_path, rows_of(grown + [line for line in records if line.status != "ok"]))
    with redirect_stdout(io.StringIO()) as text:
        assert main(["diff", str(table), str(table.parent), "--fail-above", "0%"]) == 0
        assert main(["diff", str(table), str(worse), "--fail-above", "0%"]) == 1
    assert "peak memory" in text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((f"good {name}", "results/NAME") for name in ("missing", "empty")),
        *((f"{name} good", "results/NAME") for name in ("missing", "empty")),
        ("oom good --fail-above 5%", "is no baseline"),
        ("notes.csv good", "is not a table of runs"),
        ("missing.csv good", "cannot be read"),
        *(
            (f"good good {options}", "")
            for options in ("--fail-above 5", "--fail-above -5%", "--json", "--across-versions")
        ),
        *((folders, "") for folders in ("", "good", "good good good")),
    ],
)
def test_mistakes_have_status_2(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder or table without runs is reported in a single line, and so are wrong options."""
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "good" / "x", record(1, "ddp"))
    write_record(tmp_path / "oom" / "x", record(2, "ddp", status="oom"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    assert main(["diff", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1


DEFINED_BY = {  # by option, the columns that it changes, on eight ranks
    "strategy=fsdp_full_shard": "",
    "model=gpt_tiny": "model parameters",
    "strategy=zero3": "engine strategy",
    "strategy=fsdp_hybrid_shard strategy.dp_replicate=2": "dp_replicate dp_shard",
    "strategy=fsdp_tp strategy.tp=2": "tp sequence_parallel vocabulary_parallel",
    "strategy=fsdp_full_shard strategy.cp=2": "cp grad_accumulation",
    "strategy=fsdp_full_shard strategy.cp=2 strategy.context_parallel=ulysses": "context_parallel",
    "strategy=fsdp_pp strategy.pp=2 strategy.schedule=gpipe": "pp schedule virtual_stages layers_per_stage",
    "strategy=fsdp_full_shard strategy.secondary_shards=2": "secondary_shards",
    "strategy=fsdp_shard_grad_op": "zero_stage",
    "strategy=fsdp_full_shard strategy.offload=parameters": "offload",
    "strategy=ddp": "data_parallel",
    "strategy=ep model=moe_tiny": "ep routing active_parameters",
    "strategy=ep model=moe_tiny model.routing=balanced": "routing",
    "checkpointing=every_n": "checkpointing checkpointing_every",
    "checkpointing=selective checkpointing.saved_products=every_second": "saved_products",
    "checkpointing=full checkpointing.offload_activations=true": "offload_activations",
    "train.micro_batch=2": "micro_batch grad_accumulation",
    "train.global_batch=64": "global_batch",
    "train.seq_len=64": "seq_len",
    "train.loss_chunks=2": "loss_chunks",
    "train.compile=true": "compile",
    "train.save=sync": "save",
    "train.fused_optimizer=false": "fused_optimizer",
    "optimizer=sgd": "optimizer",
    "adapter=lora": "adapter adapter_rank trained_parameters frozen_parameters",
    "model.attention=eager": "attention",
    "model=gpt_tiny model.dropout=0.1": "dropout",
    "precision=fp8_mixed": "precision recipe",
    "precision=fp8_mixed precision.recipe=rowwise": "recipe",
    "precision=fp8_mixed precision.float8_all_gather=true": "float8_all_gather",
    "launch=simulated": "launch",
}


@cache
def configured_rows() -> dict[str, Record]:
    """Return the row of each option, as a table without configurations has it."""
    words = ("model=tiny", "train.micro_batch=1", "train.global_batch=32", "strategy=fsdp_full_shard")
    configs = {option: compose_layout(8, *words, *option.split()) for option in DEFINED_BY}
    rows = {option: config_columns(*config) | {"run_id": option, "status": "ok"} for option, config in configs.items()}
    return {option: Record(row) for option, row in rows.items()}


def test_every_column_that_defines_a_run_keeps_lines_apart() -> None:
    """A run of one option is no pair of a run of another, and every column that is known before a run is compared."""
    rows = configured_rows()
    columns = {name for line in rows.values() for name in line.row} - {"run_id", "status", "repeat"}
    assert columns | {*VARYING} - {"measured_on", "repeat", OTHER_OPTIONS} == {*DEFINING_COLUMNS}
    assert {name for names in DEFINED_BY.values() for name in names.split()} | {"world_size"} == columns
    for (option, first), (other, second) in itertools.combinations(rows.items(), 2):
        assert len(pairs([first], [second], ())) == 2, (option, other)
        assert len(pairs([first], [first.with_row(run_id="b")], ())) == 1


@pytest.mark.parametrize("name", ["recipe", "float8_all_gather", "routing", "save", "context_parallel", "optimizer"])
def test_without_its_column_an_option_would_be_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs that the test above looks for are made where a column is left out."""
    monkeypatch.setattr(folder_changes, "DEFINING_COLUMNS", tuple({*DEFINING_COLUMNS} - {name}))
    couples = itertools.combinations(configured_rows().values(), 2)
    assert any(len(pairs([first], [second], ())) == 1 for first, second in couples)


def test_an_option_that_a_table_does_not_know_was_not_used(tmp_path: Path) -> None:
    """A folder of adapters holds no table of the time before them, whose rows have no such column."""
    before, after = [record(1, "ddp")], [record(2, "ddp", {"model": {"adapter": {"r": 8}}}, adapter="lora")]
    status, outcome = held(tmp_path, before, after, as_table=True)
    assert status == 1 and [change["after"]["value"] for change in outcome["changes"]] == ["missing"]
