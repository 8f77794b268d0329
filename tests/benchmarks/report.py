"""The time that a report of 100, 1,000 and 10,000 runs takes, from records to every file.

    python -m tests.benchmarks.report --rounds 3 --out results/report_speed.json

The records are those of a small real sweep, multiplied under other batches and sequences; each report is the command as
a user starts it. The three sizes take turns, so that a busy machine slows all of them.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from harness.records.schema import Record
from harness.records.store import read_all
from tests.benchmarks.overhead import ROOT, describe_machine

COUNTS = (100, 1_000, 10_000)

SWEEP = ("strategy=single,ddp,zero3,fsdp_full_shard,tp,pp_1f1b", "checkpointing=none,full", "train.steps=5")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Seconds a report takes by its number of runs.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "report_speed.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        real = real_records(Path(scratch))
        folders = {count: multiply_records(real, count, Path(scratch) / f"of_{count}") for count in COUNTS}
        rounds = [{count: time_report(folder) for count, folder in folders.items()} for _ in range(options.rounds)]
    medians = {count: statistics.median(seconds[count] for seconds in rounds) for count in COUNTS}
    growth = medians[COUNTS[-1]] / medians[COUNTS[0]]
    sizes = statistics.median(len(orjson.dumps(record)) for record in real)
    report = {
        "machine": describe_machine(),
        "record_bytes": sizes,
        "seconds": medians,
        "growth": growth,
        "rounds": rounds,
    }
    options.out.write_text(json.dumps(report) + "\n")
    for count, median in medians.items():
        print(f"{count:6,} runs: {median:.2f} s")
    print(f"{COUNTS[-1]:,} runs take {growth:.1f} times as long as {COUNTS[0]}")
    print(options.out)
    return 0


def real_records(scratch: Path) -> list[Record]:
    command = [sys.executable, "-m", "harness", "-m", *SWEEP, "name=real", f"results_dir={scratch}", "tracking=none"]
    subprocess.run([*command, "cluster.device=cpu"], cwd=ROOT, check=True, capture_output=True)
    return [record for record in read_all(scratch / "real").records if record.row["status"] == "ok"]


def multiply_records(real: Sequence[Record], count: int, folder: Path) -> Path:
    """Return so many runs, which are the real ones with other batches and sequences, as in a sweep over those."""
    runs = zip(range(count), itertools.product(range(count), real), strict=False)
    for number, (round_number, record) in runs:
        batch, length = 8 * (1 + round_number % 25), 128 * (1 + round_number // 25)
        train = record.config["train"] | {"global_batch": batch, "seq_len": length}
        speed = record.row["tokens_per_second"] * (1 + 0.1 * (number * 7919 % 101) / 101)
        row = record.row | {"global_batch": batch, "seq_len": length, "tokens_per_second": speed}
        row |= {"run_id": f"{record.row['strategy']}-{number:06d}", "name": folder.name}
        path = folder / row["run_id"]
        path.mkdir(parents=True)
        changed = record.to_json() | {"row": row, "config": record.config | {"train": train, "name": folder.name}}
        (path / "record.json").write_bytes(orjson.dumps(changed, option=orjson.OPT_INDENT_2))
    return folder


def time_report(folder: Path) -> float:
    command = [sys.executable, "-m", "harness", "report", str(folder)]
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
