"""A campaign that shows deviations beside noise floors, of honest runs and planted faults, by size and precision.

    python -m tests.support.noise_floors --sizes 0.5,11 --out results/noise_floors.csv

`excess` is the largest deviation relative to its bound. Every run is a row of the CSV file, which is written after each
of them: the same command continues where it was interrupted. An honest run must end as ok, and one
with a fault as an error.
"""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.worker import main as worker_main
from tests.support import faults
from tests.support.campaigns import complete_table, parse_options
from tests.support.commands import compose, execute_run

TINY = "train.global_batch=4 train.micro_batch=1 train.seq_len=64 train.steps=4 train.warmup_steps=2"
BATCH = "train.global_batch=4 train.micro_batch=1 train.seq_len=64 train.steps=2 train.warmup_steps=1"
SHORT = "train.global_batch=4 train.micro_batch=1 train.seq_len=64 train.steps=1 train.warmup_steps=1"

# Models and their batches as overrides, by millions of parameters.
SIZES = {
    "0.5": f"model.num_hidden_layers=4 {TINY}",
    "1.7": f"model.num_hidden_layers=16 {TINY}",
    "11": "model.hidden_size=384 model.intermediate_size=1024 model.num_hidden_layers=2 model.num_attention_heads=6"
    f" model.num_key_value_heads=2 model.vocab_size=10001 {BATCH}",
    "17": "model.hidden_size=512 model.intermediate_size=1376 model.num_hidden_layers=3 model.num_attention_heads=8"
    f" model.num_key_value_heads=4 model.vocab_size=8000 {BATCH}",
    "100": "model.hidden_size=768 model.intermediate_size=2048 model.num_hidden_layers=12 model.num_attention_heads=12"
    f" model.num_key_value_heads=4 model.vocab_size=16000 {SHORT}",
}

LAYOUTS = ("ddp", "fsdp_full_shard", "zero2", "tp", "pp_1f1b", "cp")

FEWER = ("ddp", "fsdp_full_shard", "tp")

# Layouts with a planted fault.
SMALL = ("ddp gradient_scaled", "ddp update_scaled")

FAULTS = (*SMALL, "tp gradient_scaled", "tp update_scaled", "fsdp_full_shard halved", "tp rows_not_summed")

OTHER_DATA, OTHER_WEIGHTS = "ddp other_data", "pp_1f1b other_weights"  # the latter needs a fourth layer

FURTHER_FAULTS = ("tp gradient_scaled", "ddp update_scaled", "fsdp_full_shard halved")

BOTH, FURTHER = ("fp32", "bf16_mixed"), ("fp16_mixed", "bf16")  # precisions, the further ones at one learning rate only

# What is run: millions of parameters, precisions, learning rates, and layouts without and with a fault.
RUNS = (
    ("0.5", BOTH, ("1e-5", "3e-4", "1e-2"), LAYOUTS),
    ("0.5", BOTH, ("1e-5", "1e-2"), SMALL),
    ("0.5", BOTH, ("3e-4",), (*FAULTS, OTHER_DATA, OTHER_WEIGHTS)),
    ("0.5", FURTHER, ("3e-4",), ("fsdp_full_shard", "tp", "cp", *FURTHER_FAULTS)),
    ("1.7", BOTH, ("1e-5", "1e-2"), FEWER),
    ("1.7", BOTH, ("3e-4",), (*FAULTS, OTHER_DATA, OTHER_WEIGHTS)),
    ("11", BOTH, ("1e-5", "1e-2"), FEWER),
    ("11", BOTH, ("3e-4",), (*FAULTS, OTHER_DATA)),
    ("11", FURTHER, ("3e-4",), ("tp",)),
    ("17", BOTH, ("1e-5", "1e-2"), FEWER),
    ("100", ("fp32",), ("3e-4",), (*LAYOUTS, *FAULTS, OTHER_WEIGHTS)),  # which need minutes
)

COLUMNS = (
    *("millions", "layers", "strategy", "fault", "precision", "lr", "status", "proven_steps", "steps"),
    *("loss_deviation", "loss_floor", "grad_deviation", "grad_floor", "update_deviation", "update_floor"),
    *("excess", "reason"),
)


class Case(NamedTuple):
    """One run of the campaign: the columns of the table that name it."""

    millions: str
    strategy: str
    fault: str
    precision: str
    lr: str


def cases(sizes: Sequence[str]) -> Iterator[Case]:
    """Yield the runs of these sizes."""
    for millions, precisions, rates, trainings in (line for line in RUNS if line[0] in sizes):
        for precision, rate, training in itertools.product(precisions, rates, trainings):
            strategy, _, fault = training.partition(" ")
            yield Case(millions, strategy, fault, precision, rate)


def run(case: Case, results: Path) -> dict[str, Any]:
    """Return the row of one run."""
    entry = getattr(faults, case.fault) if case.fault else worker_main.main
    repeat = zlib.crc32(case.fault.encode())  # 0 without a fault
    overrides = (f"strategy={case.strategy}", f"precision={case.precision}", f"train.lr={case.lr}", f"repeat={repeat}")
    size = SIZES[case.millions].split()
    config, command = compose(f"results_dir={results}", "name=noise", "world_size=2", *overrides, *size)
    record = execute_run(config, command, entry)
    row = record.row
    known = {column: row.get(column) for column in COLUMNS if column in row}
    steps = {"layers": config.model.num_hidden_layers, "steps": config.train.total_steps, "reason": row["reason"]}
    checks = record.proof.get("checks", [])
    steps["excess"] = max((c["deviation"] / c["bound"] for c in checks if c["deviation"] and c["bound"]), default=None)
    return known | case._asdict() | steps


def main() -> None:
    options = parse_options(
        __doc__,
        sizes={"default": "0.5,1.7,11,17", "help": f"of {', '.join(SIZES)}"},
        out={"default": Path("results/noise_floors.csv")},
        results={"default": Path("results"), "help": "the folder of the runs themselves"},
    )

    def is_right(row: dict[str, Any]) -> bool:
        return bool(row["status"] == ("error" if row["fault"] else "ok"))

    chosen = cases(options.sizes.split(","))
    complete_table(options.out, COLUMNS, Case._fields, chosen, lambda case: run(case, options.results), is_right)


if __name__ == "__main__":
    main()
