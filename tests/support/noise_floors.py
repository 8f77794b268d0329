"""A campaign that shows deviations beside noise floors, of honest runs and planted faults, by size and precision.

    python -m tests.support.noise_floors --sizes 0.5,11 --out results/noise_floors.csv

`excess` is the largest deviation relative to its bound. Every run is a row of the CSV file, which is written after each
of them: the same command continues where it was interrupted. An honest run must end as ok, and one
with a fault as an error.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator
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

FAULTS: tuple[tuple[Callable[[str], None], str], ...] = (
    (faults.gradient_scaled, "ddp"),
    (faults.update_scaled, "ddp"),
    (faults.gradient_scaled, "tp"),
    (faults.update_scaled, "tp"),
    (faults.other_data, "ddp"),
    (faults.halved, "fsdp_full_shard"),
    (faults.rows_not_summed, "tp"),
    (faults.other_weights, "pp_1f1b"),
)

# The precisions that are run at one learning rate only: their layouts by size, and their faults at 0.5 million.
FURTHER_PRECISIONS = ("fp16_mixed", "bf16")

FURTHER_LAYOUTS = {"0.5": ("fsdp_full_shard", "tp", "cp"), "11": ("tp",)}

FURTHER_FAULTS = ((faults.gradient_scaled, "tp"), (faults.update_scaled, "ddp"), (faults.halved, "fsdp_full_shard"))

# The faults that a size is not run with: other_weights needs a fourth layer, and 100 million parameters need minutes.
LEFT_OUT = {"11": (faults.other_weights,), "17": tuple(fault for fault, _ in FAULTS), "100": (faults.other_data,)}

COLUMNS = (
    *("millions", "layers", "strategy", "fault", "precision", "lr", "status", "proven_steps", "steps"),
    *("loss_deviation", "loss_floor", "grad_deviation", "grad_floor", "update_deviation", "update_floor"),
    *("excess", "reason"),
)

KEYS = ("millions", "strategy", "fault", "precision", "lr")


class Case(NamedTuple):
    """One run of the campaign."""

    millions: str
    strategy: str
    fault: Callable[[str], None] | None
    precision: str
    lr: str

    @property
    def key(self) -> tuple[str, ...]:
        """The values of KEYS."""
        fault = "" if self.fault is None else self.fault.__name__
        return (self.millions, self.strategy, fault, self.precision, self.lr)


def cases(sizes: list[str]) -> Iterator[Case]:
    """Yield the runs of these sizes: honest ones at several learning rates, then those with faults."""
    for name in sizes:
        rates = {"0.5": ("1e-5", "3e-4", "1e-2"), "100": ("3e-4",)}.get(name, ("1e-5", "1e-2"))
        layouts = LAYOUTS if name in ("0.5", "100") else ("ddp", "fsdp_full_shard", "tp")
        precisions = ("fp32",) if name == "100" else ("fp32", "bf16_mixed")
        for precision, rate, layout in itertools.product(precisions, rates, layouts):
            yield Case(name, layout, None, precision, rate)
        for precision, (fault, layout) in itertools.product(precisions, FAULTS):
            is_small = fault in (faults.gradient_scaled, faults.update_scaled)
            for rate in rates if is_small and name == "0.5" and layout == "ddp" else ("3e-4",):
                if fault not in LEFT_OUT.get(name, ()):
                    yield Case(name, layout, fault, precision, rate)
        for precision in FURTHER_PRECISIONS:
            for layout in FURTHER_LAYOUTS.get(name, ()):
                yield Case(name, layout, None, precision, "3e-4")
            for fault, layout in FURTHER_FAULTS if name == "0.5" else ():
                yield Case(name, layout, fault, precision, "3e-4")


def run(case: Case, results: Path) -> dict[str, Any]:
    """Return the row of one run."""
    entry = case.fault or worker_main.main
    repeat = 0 if case.fault is None else zlib.crc32(entry.__qualname__.encode())
    overrides = (f"strategy={case.strategy}", f"precision={case.precision}", f"train.lr={case.lr}", f"repeat={repeat}")
    size = SIZES[case.millions].split()
    config, command = compose(f"results_dir={results}", "name=noise", "world_size=2", *overrides, *size)
    record = execute_run(config, command, entry)
    row = record.row
    known = {column: row.get(column) for column in COLUMNS if column in row}
    steps = {"layers": config.model.num_hidden_layers, "steps": config.train.total_steps, "reason": row["reason"]}
    checks = record.proof.get("checks", [])
    steps["excess"] = max((c["deviation"] / c["bound"] for c in checks if c["deviation"] and c["bound"]), default=None)
    return known | dict(zip(KEYS, case.key, strict=True)) | steps


def main() -> None:
    options = parse_options(
        __doc__,
        sizes={"default": "0.5,1.7,11,17", "help": f"of {', '.join(SIZES)}"},
        out={"default": Path("results/noise_floors.csv")},
        results={"default": Path("results"), "help": "the folder of the runs themselves"},
    )
    chosen = {case.key: case for case in cases(options.sizes.split(","))}

    def is_right(row: dict[str, Any]) -> bool:
        return bool(row["status"] == ("error" if row["fault"] else "ok"))

    complete_table(options.out, COLUMNS, KEYS, chosen, lambda case: run(case, options.results), is_right)


if __name__ == "__main__":
    main()
