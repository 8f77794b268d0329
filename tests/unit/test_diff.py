"""Two folders side by side: only what differs, the right pairs, and ratios of B over A."""

import copy
import io
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from harness.cli.diff import main
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


def compared(tmp_path: Path, first: list[Record], second: list[Record], in_process: bool = True) -> list[str]:
    """Return what the command prints, which reads two folders and writes nothing."""
    folders = tmp_path / "one", tmp_path / "two"
    for folder, records in zip(folders, (first, second), strict=True):
        for entry in records:
            write_record(folder / entry.row["run_id"], entry)
    before = sorted(tmp_path.rglob("*"))
    arguments = [*map(str, folders)]
    if in_process:
        with redirect_stdout(io.StringIO()) as text:
            assert main(arguments) == 0
        printed = text.getvalue()
    else:
        command = [sys.executable, "-m", "harness", "diff", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr
        printed = done.stdout
    assert sorted(tmp_path.rglob("*")) == before
    return printed.splitlines()


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
    lines = compared(tmp_path, first, second, in_process=False)
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
    ("first", "second", "speed", "marked"),
    [
        (0.05, 0.05, 1040.0, True),
        (0.05, 0.05, 1060.0, False),
        (0.0, 0.40, 1200.0, True),  # B's alone
        (0.50, 0.0, 1200.0, True),  # A's alone
        (0.30, 0.30, 1200.0, True),  # neither's alone, and both together
        (0.05, 0.05, 960.0, True),
        (0.05, 0.05, 940.0, False),
        (None, 0.10, 1040.0, True),
        (None, None, 1000.1, False),  # an unknown spread has a note but no mark
    ],
)
def test_a_difference_within_the_spread_is_marked(
    first: float | None, second: float | None, speed: float, marked: bool, tmp_path: Path
) -> None:
    record_a = record(1, "ddp", step_seconds_iqr_ratio=first)
    record_b = record(1, "ddp", step_seconds_iqr_ratio=second, tokens_per_second=speed)
    lines = compared(tmp_path, [record_a], [record_b])
    assert cells(lines, "ddp")[4].endswith("~") == marked
    assert any(line.startswith("~ marks a difference within the spreads of A and B") for line in lines) == marked
    unknown = [line for line in lines if line.startswith("no spread is known")]
    assert len(unknown) == (first is None and second is None) and all(line.endswith(": ddp") for line in unknown)


def test_changed_figures_without_a_column_are_listed(tmp_path: Path) -> None:
    record_a = record(1, "ddp", optimizer_bytes=2**20, in_flight=2, executed_flops=1000, forward_seconds=0.1)
    record_b = record(1, "ddp", optimizer_bytes=2**21, in_flight=2, executed_flops=1009, forward_seconds=0.2)
    assert "ddp: optimizer_bytes 1.00 MiB → 2.00 MiB" in compared(tmp_path, [record_a], [record_b])


def test_repeats_share_a_row_and_their_range_is_the_spread(tmp_path: Path) -> None:
    first = [record(n, "ddp", repeat=n, tokens_per_second=speed) for n, speed in enumerate((900.0, 1000.0, 1100.0))]
    close, far = (
        [record(1, "ddp", tokens_per_second=speed, step_seconds_iqr_ratio=0.001)] for speed in (1090.0, 1110.0)
    )
    assert cells(compared(tmp_path / "close", first, close), "ddp")[2:5] == ["1,000", "1,090", "1.09~"]
    assert cells(compared(tmp_path / "far", first, far), "ddp")[2:5] == ["1,000", "1,110", "1.11"]


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
        assert main([str(tmp_path / name) for name in folders]) == 2
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
