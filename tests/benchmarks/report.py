"""The processor time that a report of 100, 1,000 and 10,000 runs takes, from records to every file.

    python -m tests.benchmarks.report --rounds 3 --out results/report_speed.json

The records are those of a small real sweep, multiplied under other batches and sequences; each report is the command as
a user starts it. Processor time counts the command and what it starts, such as the drawing of charts. The three sizes
take turns, since a busy machine makes that time longer as well.
"""

import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import orjson

from harness.records.schema import Record
from harness.records.store import read_all, write_record
from tests.benchmarks.overhead import ROOT, describe_machine
from tests.support.campaigns import parse_options

COUNTS = (100, 1_000, 10_000)

SWEEP = ("strategy=single,ddp,zero3,fsdp_full_shard,tp,pp_1f1b", "checkpointing=none,full", "train.steps=5")


def main() -> None:
    out = {"default": ROOT / "results" / "report_speed.json"}
    options = parse_options(__doc__, rounds={"default": 3}, out=out)
    with tempfile.TemporaryDirectory() as scratch:
        real = real_records(Path(scratch))
        folders = {count: multiply_records(real, count, Path(scratch) / f"of_{count}") for count in COUNTS}
        rounds = [{count: time_report(folder) for count, folder in folders.items()} for _ in range(options.rounds)]
    medians = {count: statistics.median(seconds[count] for seconds in rounds) for count in COUNTS}
    growth = medians[COUNTS[-1]] / medians[COUNTS[0]]
    by_run = {
        f"{fewer} to {more}": 1000 * (medians[more] - medians[fewer]) / (more - fewer)
        for fewer, more in pairwise(COUNTS)
    }
    sizes = statistics.median(len(orjson.dumps(record)) for record in real)
    report = {
        "machine": describe_machine(),
        "record_bytes": sizes,
        "processor_seconds": medians,
        "growth": growth,
        "milliseconds_for_each_further_run": by_run,
        "rounds": rounds,
    }
    options.out.write_text(json.dumps(report) + "\n")
    for count, median in medians.items():
        print(f"{count:6,} runs: {median:.2f} s")
    print(f"{COUNTS[-1]:,} runs take {growth:.1f} times as long as {COUNTS[0]}")
    print("; ".join(f"each further run from {span}: {cost:.2f} ms" for span, cost in by_run.items()))
    print(options.out)


def run_harness(*arguments: str) -> None:
    """Run the command as a user starts it."""
    subprocess.run([sys.executable, "-m", "harness", *arguments], cwd=ROOT, check=True, capture_output=True)


def real_records(scratch: Path) -> list[Record]:
    run_harness("-m", *SWEEP, "name=real", f"results_dir={scratch}", "tracking=none", "cluster.device=cpu")
    return [record for record in read_all(scratch / "real").records if record.row["status"] == "ok"]


def multiply_records(real: Sequence[Record], count: int, folder: Path) -> Path:
    """Write so many runs, which are the real ones with other batches and sequences, as in a sweep over those.

    Every second configuration has three repeats. All runs count as undisturbed, whatever else the machine did.
    """
    configurations = itertools.product(range(count), enumerate(real), range(3))
    runs = (entry for entry in configurations if entry[2] == 0 or entry[1][0] % 2)
    for number, (round_number, (_, record), repeat) in zip(range(count), runs, strict=False):
        batch, length = 8 * (1 + round_number % 25), 128 * (1 + round_number // 25)
        train = record.config["train"] | {"global_batch": batch, "seq_len": length}
        speed = record.row["tokens_per_second"] * (1 + 0.1 * (number * 7919 % 101) / 101)
        run_id = f"{record.row['strategy']}-{number:06d}"
        row = record.row | {
            "global_batch": batch,
            "seq_len": length,
            "tokens_per_second": speed,
            "repeat": repeat,
            "noise_warning": None,
            "step_seconds": batch * length / speed,
            "run_id": run_id,
            "name": folder.name,
        }
        config = record.config | {"train": train, "name": folder.name, "repeat": repeat}
        write_record(folder / run_id, record.to_json() | {"row": row, "config": config})
    return folder


def time_report(folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_harness("report", str(folder))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
