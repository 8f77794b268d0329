"""Two folders side by side: only what differs, the right pairs, and ratios of B over A."""

import copy
import io
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from harness.cli.main import main
from harness.records.runs_csv import read_runs_csv, rows_of, write_runs_csv
from harness.records.schema import Record
from harness.records.store import write_record
from tests.support.commands import ROOT

MIB = 2**20

HOSTILE = "[red]r[/red] \x1b[31mred\x1b[0m\n:smile: | \u202edrow"


def record(number: int, strategy: str, **row: Any) -> Record:
    """Return an ok run on two ranks, with the configuration of such a run."""
    return Record.from_json(
        {
            "row": {
                "run_id": f"{number:010x}",
                "name": "demo",
                "status": "ok",
                "reason": "",
                "model": "tiny",
                "strategy": strategy,
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
                "started_at": f"2026-01-02T03:{number:02d}:00Z",
            }
            | row,
            "config": {
                "name": "demo",
                "results_dir": "results",
                "model": {"name": "tiny", "hidden_size": 96},
                "strategy": {"name": strategy, "layers_per_stage": None},
                "train": {"steps": 10, "lr": 0.001},
                "data": {"path": None, "cache": "~/.cache"},
                "tracking": {"mode": "none"},
                "world_size": None,
                "timeout_seconds": 1800.0,
                "hang_seconds": 600.0,
                "repeat": row.get("repeat", 0),
            },
            "environment": {"device_name": "cpu", "cores": 2, "driver": None, "variables": {"OMP_NUM_THREADS": "1"}},
            "versions": {"torch": "2.13.0", "deepspeed": None, "code": "0123456789ab"},
            "commit": {"commit": "a" * 40, "dirty": False},
        }
    )


def runs_of(
    strategy: str, *values: float | None, first: int = 1, column: str = "tokens_per_second", **row: Any
) -> list[Record]:
    """Return repeats of one configuration with these speeds, or these values of another column."""
    return [
        record(first + repeat, strategy, repeat=repeat, **{column: value}, **row) for repeat, value in enumerate(values)
    ]


def diff(
    folder: Path, first: list[Record], second: list[Record], *options: str, as_table: bool = False
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


def compared(folder: Path, first: list[Record], second: list[Record]) -> list[str]:
    """Return the lines of two folders side by side."""
    status, text = diff(folder, first, second)
    assert status == 0
    return text.splitlines()


def cells(lines: list[str], name: str) -> list[str]:
    return next(line for line in lines if line.startswith(name + " ")).split()


def section(lines: list[str], title: str) -> list[list[str]]:
    """Return the rows of a table of changes."""
    start = next(n for n, line in enumerate(lines) if line.startswith(title) and line.split()[-2:] == ["A", "B"])
    ends = ("Versions", "Environment", "Configuration", " ")
    end = next(n for n, line in enumerate(lines) if n > start and line.startswith(ends))
    return [line.split() for line in lines[start + 1 : end]]


def test_every_difference_is_listed_and_nothing_else(tmp_path: Path) -> None:
    first = [record(1, "ddp"), record(2, "zero3")]
    second = copy.deepcopy(first)
    for entry in second:
        entry.row["tokens_per_second"] = 1500.0
        entry.versions.update({"torch": "2.14.0", "deepspeed": "0.19.8"})
        entry.commit.update({"commit": "b" * 40, "dirty": True})
        entry.environment.update({"cores": 4, "processor": "EPYC", "variables": {"NCCL_DEBUG": "INFO"}})
        entry.config.update({"name": "other", "results_dir": "/elsewhere", "tracking": {"mode": "online"}})
        entry.config["train"] = {"steps": 20, "lr": 0.001}
        entry.config["data"] = {"path": "corpus.txt", "cache": "/tmp/cache"}
        entry.config["strategy"]["offload"] = "none"  # a key of later versions
    lines = compared(tmp_path, first, second)
    command = [sys.executable, "-m", "harness", "diff", *(str(tmp_path / name) for name in ("one", "two"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (0, "", lines)
    assert [line.rsplit("/", 1)[1] for line in lines[:2]] == ["one, 2 runs", "two, 2 runs"]
    assert section(lines, "Versions") == [
        ["commit", "a" * 12, "b" * 12, "and", "changes"],
        ["deepspeed", "-", "0.19.8"],
        ["torch", "2.13.0", "2.14.0"],
    ]
    assert section(lines, "Environment") == [
        ["cores", "2", "4"],
        ["processor", "-", "EPYC"],
        ["variables.NCCL_DEBUG", "-", "INFO"],
        ["variables.OMP_NUM_THREADS", "1", "-"],
    ]
    assert section(lines, "Configuration shared by all runs") == [
        ["data.path", "null", "corpus.txt"],
        ["strategy.offload", "-", "none"],
        ["train.steps", "10", "20"],
    ]
    for strategy in ("ddp", "zero3"):
        assert cells(lines, strategy)[:5] == [strategy, "ok", "1,000", "1,500", "1.50"]


def test_a_folder_does_not_differ_from_itself(tmp_path: Path) -> None:
    runs = [record(1, "ddp"), record(2, "zero3", status="oom", tokens_per_second=None, reason="rank 1")]
    lines = compared(tmp_path, runs, runs)
    for title in ("Versions", "Environment", "Configuration shared by all runs"):
        assert f"{title}: no difference" in lines
    assert " ".join(cells(lines, "ddp")) == ("ddp ok 1,000 1,000 1.00 20.00 20.00 1.00 4.00 4.00 1.00 1.0e-7 2.0e-6")
    assert not any(line.startswith(("only in", "A: zero3", "B: zero3")) for line in lines)


def test_ratios_are_of_b_over_a_in_every_column(tmp_path: Path) -> None:
    changed = {"tokens_per_second": 800.0, "peak_allocated_bytes": 30 * MIB, "communication_bytes": MIB}
    changed |= {"loss_deviation": 3e-7, "grad_deviation": None}
    lines = compared(tmp_path, [record(1, "ddp")], [record(1, "ddp", **changed)])
    assert " ".join(cells(lines, "ddp")) == (
        "ddp ok 1,000 800 0.80 20.00 30.00 1.50 4.00 1.00 0.25 1.0e-7 → 3.0e-7 2.0e-6 → -"
    )
    below = next(n for n, line in enumerate(lines) if line.startswith("run "))
    headers = [" ".join(line.split()) for line in lines[below - 1 : below + 1]]
    assert headers[0] == "tok/s tok/s × peak MiB peak MiB × comm. MiB comm. MiB × loss dev. grad dev."
    assert headers[1] == "run status A B tok/s A B peak A B comm. A → B A → B"
    assert max(map(cell_len, lines[2:])) <= 120 and "× is the ratio of B to A" in lines


@pytest.mark.parametrize(
    ("speeds", "mark"),
    [
        ([1040.0, 1000.0, 1090.0], "~"),
        ([1200.0, 1210.0, 1190.0], ""),
        ([1200.0, 1400.0, 1025.0], "~"),  # its own range is wide, though beyond A's
        ([1200.0, 1210.0], "few"),
    ],
)
def test_a_difference_within_run_to_run_variation_is_marked(speeds: list[float], mark: str, tmp_path: Path) -> None:
    lines = compared(tmp_path, runs_of("ddp", 1000.0, 1010.0, 990.0), runs_of("ddp", *speeds))
    assert cells(lines, "ddp")[4].endswith("~") == (mark == "~")
    assert ("~ marks a difference that is not certain" in lines) == (mark == "~")
    few = "fewer than 3 undisturbed runs, so that it is not certain which is faster: every run"
    assert (few in lines) == (mark == "few")


def test_changed_figures_without_a_column_are_listed(tmp_path: Path) -> None:
    record_a = record(1, "ddp", optimizer_bytes=2**20, in_flight=2, executed_flops=1000, forward_seconds=0.1)
    record_b = record(1, "ddp", optimizer_bytes=2**21, in_flight=2, executed_flops=1009, forward_seconds=0.2)
    assert "ddp: optimizer_bytes 1.00 MiB → 2.00 MiB" in compared(tmp_path, [record_a], [record_b])


def test_repeats_share_a_row_of_their_median(tmp_path: Path) -> None:
    lines = compared(tmp_path, runs_of("ddp", 900.0, 1000.0, 1100.0), [record(1, "ddp", tokens_per_second=1090.0)])
    assert cells(lines, "ddp")[2:5] == ["1,000", "1,090", "1.09"]


def test_changed_statuses_have_reasons_and_unmatched_rows_name_their_folder(tmp_path: Path) -> None:
    dead = {"status": "oom", "reason": "rank 1 ran out of memory", "tokens_per_second": None}
    first = [record(1, "ddp"), record(2, "zero3"), record(3, "tp")]
    second = [record(1, "ddp", noise_warning="other processes took 1.0 of 2 cores"), record(2, "zero3", **dead)]
    second.append(record(4, "pp_1f1b", status="refused", reason="no"))
    lines = compared(tmp_path, first, second)
    assert cells(lines, "zero3")[:5] == ["zero3", "ok", "→", "oom", "1,000"] and not any("tp " in x[:3] for x in lines)
    assert "B: zero3 oom: rank 1 ran out of memory" in lines
    assert "B: ddp noise warning: other processes took 1.0 of 2 cores" in lines
    assert lines[-2:] == ["only in A: tp ok", "only in B: pp_1f1b refused"]


def test_models_and_strategies_are_never_ignored(tmp_path: Path) -> None:
    """With one row each every key is shared, and yet the two runs differ."""
    for name, change in (("strategy", {"name": "zero3", "layers_per_stage": None}), ("model", {"name": "7b"})):
        other = record(1, "ddp")
        other.config[name] = change
        lines = compared(tmp_path / name, [record(1, "ddp")], [other])
        assert "no run of A has the same configuration as a run of B" in lines
        assert any(line.startswith("only in A: ddp") for line in lines)


def test_settings_that_vary_within_a_folder_distinguish_its_rows(tmp_path: Path) -> None:
    first = [record(n, "ddp", seq_len=length, tokens_per_second=1000.0 * n) for n, length in ((1, 128), (2, 256))]
    for entry in first:
        entry.config["train"] |= {"seq_len": entry.row["seq_len"]}
    second = copy.deepcopy(first[::-1])
    for entry in second:
        entry.row["tokens_per_second"] *= 3
    lines = compared(tmp_path, first, second)
    cells_of_ddp = [line.split() for line in lines if line.startswith("ddp ")]
    assert [line[line.index("ok") :][:4] for line in cells_of_ddp] == (
        [["ok", "1,000", "3,000", "3.00"], ["ok", "2,000", "6,000", "3.00"]]
    )
    lines = compared(tmp_path / "fewer", first, second[:1])  # 256 alone: what varies in A is not a change for all
    assert "Configuration shared by all runs: no difference" in lines
    assert cells(lines, "ddp seq_len 256")[3:7] == ["ok", "2,000", "6,000", "3.00"]
    assert lines[-1] == "only in A: ddp seq_len 128 ok"


def test_lines_of_one_configuration_are_paired_by_run_and_else_the_latest(tmp_path: Path) -> None:
    sides = ([record(n, "ddp", seq_len=n, tokens_per_second=1000.0 * n) for n in runs] for runs in ((1, 2, 3), (1, 4)))
    lines = compared(tmp_path, *sides)
    shown = [line.split()[2:7] for line in lines if line.startswith("ddp ")]
    assert shown == [["1", "ok", "1,000", "1,000", "1.00"], ["3", "ok", "3,000", "4,000", "1.33"]]
    assert lines[-1] == "only in A: ddp seq_len 2 ok"


def test_hostile_text_is_printed_as_text(tmp_path: Path) -> None:
    hostile = record(1, HOSTILE, status="error", reason=HOSTILE, noise_warning=HOSTILE)
    hostile.environment.update({HOSTILE: HOSTILE, "variables": {"CXX": HOSTILE, "LONG": "x" * 300}})
    hostile.versions.update({"torch": HOSTILE})
    hostile.config.update({HOSTILE: HOSTILE})
    lines = compared(tmp_path, [record(1, HOSTILE)], [hostile])
    text = "".join(lines)
    assert text.isprintable() and text.count("[red]r[/red]") >= 6 and ":smile:" in text
    assert max(map(cell_len, lines)) <= 120 and sum(line.count("x") for line in lines) >= 300


def test_folders_without_records_are_reported_in_a_single_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "good" / "x", record(1, "ddp"))
    (tmp_path / "empty").mkdir()
    for folders in (("good", "missing"), ("missing", "good"), ("good", "empty"), ("empty", "good")):
        assert main(["diff", *(str(tmp_path / name) for name in folders)]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and "results/NAME" in err
    for wrong in ([], [str(tmp_path)], [str(tmp_path)] * 3):
        with pytest.raises(SystemExit) as end:
            main(wrong)
        assert end.value.code == 2


def test_rows_of_the_same_strategy_have_distinct_labels(tmp_path: Path) -> None:
    """They are distinguished by columns if they differ in one, and else by the keys of their configurations."""
    first = [record(1, "ddp", engine="torch", compile=False), record(2, "ddp", engine="torch", compile=True)]
    first += [record(3, "ddp", engine="accelerate"), record(4, "ddp", engine="accelerate")]
    first[1].config["train"]["compile"] = True
    for entry, graph in zip(first[2:], (False, True), strict=True):
        entry.config["strategy"] |= {"engine": "accelerate", "options": {"static_graph": graph}}
    lines = compared(tmp_path, first, copy.deepcopy(first))
    shown = [line.split("  ")[0] for line in lines if line.startswith("ddp ")]
    assert shown == [
        "ddp torch",
        "ddp torch compiled yes",
        "ddp accelerate static_graph=False",
        "ddp accelerate static_graph=True",
    ]


# A baseline to hold.


def held(
    folder: Path, first: list[Record], second: list[Record], limit: str, *options: str, as_table: bool = False
) -> tuple[int, dict[str, Any]]:
    """Return the exit status of a comparison with a baseline and its JSON."""
    status, text = diff(folder, first, second, "--fail-above", limit, "--json", *options, as_table=as_table)
    return status, json.loads(text)


DISTURBED = {"row": {"noise_warning": "other processes took 1.0 of 2 cores"}}

OTHER_DEVICE = {"row": {"measured_on": "NVIDIA H200"}}

OTHER_VERSION = {"versions": {"torch": "2.14.0", "code": "0123456789ab"}}

OTHER_MACHINE = {"environment": {"device_name": "cpu", "cores": 8}}

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
    for number, (column, before, after, changes) in enumerate(cases):
        baseline += runs_of(f"case_{number}", *before, first=10 * number, column=column)
        repeats = runs_of(f"case_{number}", *after, first=10 * number, column=column)
        for entry, part in product(repeats, changes):
            getattr(entry, part).update(changes[part])
        current += repeats
    return baseline, current


@pytest.mark.parametrize("as_table", [False, True], ids=["folder", "table"])
def test_exact_figures_may_grow_up_to_the_limit(as_table: bool, tmp_path: Path) -> None:
    """Of several repeats, they have grown only if they have in all."""
    sides = sides_of((column, before, after, {}) for column, before, after, *_ in FIGURES)
    for limit, position in (("5%", 3), ("0%", 4)):
        status, outcome = held(tmp_path / limit, *sides, limit, as_table=as_table)
        changes = {change["run"]: (change["column"], change["verdict"]) for change in outcome["changes"]}
        expected = {f"case_{number}": (case[0], case[position]) for number, case in enumerate(FIGURES)}
        assert changes == {name: case for name, case in expected.items() if case[1]}
        assert status == 1 and not outcome["holds"]


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


@pytest.mark.parametrize("as_table", [False, True], ids=["folder", "table"])
def test_a_speed_has_changed_only_beyond_the_range_of_undisturbed_repeats(as_table: bool, tmp_path: Path) -> None:
    sides = sides_of(("tokens_per_second", *case[:3]) for case in SPEEDS)
    for position, options in ((3, []), (4, ["--across-versions"])):
        status, outcome = held(tmp_path / str(position), *sides, "5%", *options, as_table=as_table)
        verdicts = {change["run"]: change["verdict"] for change in outcome["changes"]}
        verdicts |= {name: "unjudged" for names in outcome["unjudged_speeds"].values() for name in names}
        expected = {f"case_{number}": case[position] for number, case in enumerate(SPEEDS)}
        assert verdicts == {name: verdict for name, verdict in expected.items() if verdict} and status == 1


@pytest.mark.parametrize("as_table", [False, True], ids=["folder", "table"])
def test_runs_that_fail_or_are_missing_regress_and_new_ones_do_not(as_table: bool, tmp_path: Path) -> None:
    failed = {"status": "oom", "reason": "rank 1 ran out of memory", "peak_allocated_bytes": None}
    baseline = [record(1, "ddp"), record(2, "zero3"), record(3, "tp", **failed), record(4, "cp", **failed)]
    baseline += [*runs_of("zero1", 1000, 1000, first=10), record(5, "single", peak_allocated_bytes=100)]
    current = [record(2, "zero3", **failed), record(3, "tp"), record(4, "cp", **failed), record(6, "pp_1f1b")]
    current += [record(5, "single", peak_allocated_bytes=110), record(10, "zero1", repeat=0)]
    current.append(record(11, "zero1", repeat=1, **failed))
    status, outcome = held(tmp_path, baseline, current, "20%", as_table=as_table)
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
    other = record(1, "ddp", peak_allocated_bytes=MIB)
    other.config["train"] = {"steps": 10, "lr": 0.001, "seq_len": 64}
    baseline = record(1, "ddp")
    baseline.config["train"] |= {"seq_len": 128}
    status, outcome = held(tmp_path, [baseline], [other], "5%")
    assert status == 1 and [change["after"]["value"] for change in outcome["changes"]] == ["missing"]
    assert outcome["configuration"] == {"train.seq_len": ["128", "64"]}


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [record(1, "ddp", mfu=0.25, compile=True, at_peak_gathered_bytes=3, dropout=1e-9)]
    entries.append(record(2, "-zero", status="error", reason="=1+1, 'quoted' and \"so\"", peak_allocated_bytes=None))
    rows = rows_of(entries)
    read = read_runs_csv(write_runs_csv(tmp_path, rows))
    known = [{name: value for name, value in row.items() if value not in (None, "")} for row in rows]
    assert [{name: value for name, value in line.row.items() if value is not None} for line in read] == known
    assert known[0]["machine"] == "2 cores" and "torch 2.13.0, code" in known[0]["versions"]


@pytest.mark.parametrize(
    "table", sorted((ROOT / "results" / "published").glob("*/runs.csv")), ids=lambda path: path.parent.name
)
def test_published_tables_hold_themselves_as_a_baseline(table: Path, tmp_path: Path) -> None:
    """Whatever version wrote them; one more byte in every repeat is shown."""
    records = read_runs_csv(table)
    for line in records:
        if line.status == "ok":
            line.row["peak_allocated_bytes"] += 1
    worse = write_runs_csv(tmp_path, rows_of(records))
    with redirect_stdout(io.StringIO()) as text:
        assert main(["diff", str(table), str(table.parent), "--fail-above", "0%"]) == 0
        assert main(["diff", str(table), str(worse), "--fail-above", "0%"]) == 1
    assert "peak memory" in text.getvalue()


def test_mistakes_have_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, status in enumerate(("ok", "oom"), start=1):
        write_record(tmp_path / status / "x", record(number, "ddp", status=status, reason=""))
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    ok, oom = str(tmp_path / "ok"), str(tmp_path / "oom")
    assert main(["diff", oom, ok, "--fail-above", "5%"]) == 2 and "is no baseline" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "notes.csv"), ok]) == 2 and "is not a table of runs" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "missing.csv"), ok]) == 2 and "cannot be read" in capsys.readouterr().err
    for options in (["--fail-above", "5"], ["--fail-above", "-5%"], ["--json"], ["--across-versions"]):
        with pytest.raises(SystemExit) as end:
            main(["diff", ok, ok, *options])
        assert end.value.code == 2
