"""A campaign that scales the gradient and the update of every matrix in the reports of honest runs, one at a time.

    python -m tests.support.scaled_matrices --out results/scaled_matrices.csv

Every run is a row of the CSV file: how far rounding moved the norm of a matrix, and how many of the scaled ones its
proof found. An honest run must be ok, and every scaled matrix an error. Fingerprints are linear in what they are of, so
that those of a scaled matrix follow from those of the run, and no rank trains again.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.proof.training import compare_training, deviation_problems
from harness.records.rank_report import RankReport, TensorFingerprint
from harness.records.run_folder import RunFolder
from tests.support.campaigns import complete_table, parse_options
from tests.support.commands import compose, execute_run
from tests.support.noise_floors import SIZES

SCALE = {"float32": 1.01, "bfloat16": 1.1, "float16": 1.1}

FAULTS = {"gradient": ("first_gradients", "first_moments"), "update": ("first_updates",)}

STRATEGIES = ("ddp", "zero3", "fsdp_full_shard", "tp")

ONE_STEP = "train.steps=1 train.warmup_steps=1"

BOTH = ("bf16_mixed", "fp32")

# What is run, the small model most of all: millions of parameters, vocabulary, data, family, tokens of a micro-batch,
# precisions and learning rate.
RUNS = (
    ("0.5", "256", "text", "llama", ("512", "2048", "4096"), BOTH, "3e-4"),
    ("0.5", "256", "text", "gpt", ("2048", "4096"), ("bf16_mixed",), "3e-4"),
    ("0.5", "32000", "synthetic", "llama", ("2048", "4096"), ("bf16_mixed",), "1e-2"),
    ("11", "32000", "synthetic", "llama", ("512",), BOTH, "3e-4"),
    ("11", "256", "text", "llama", ("2048",), ("bf16_mixed",), "3e-4"),
    ("100", "32000", "text", "llama", ("512",), BOTH, "3e-4"),
)

COLUMNS = (
    *("millions", "vocabulary", "data", "family", "micro_batch_tokens", "precision", "lr", "strategy", "status"),
    *("proven_steps", "steps", "matrices", "gradients_found", "updates_found", "weakest_excess", "norm_deviation"),
    *("norm_floor", "norm_bound", "reason"),
)


class Case(NamedTuple):
    """One run of the campaign: two ranks, and two micro-batches of so many tokens in every step."""

    millions: str
    vocabulary: str
    data: str
    family: str
    micro_batch_tokens: str
    precision: str
    lr: str
    strategy: str

    def overrides(self) -> list[str]:
        """Return the run as overrides."""
        model = [word for word in SIZES[self.millions].split() if word.startswith("model.")]
        model += [f"model.vocab_size={self.vocabulary}", f"model.family={self.family}", "model.context_length=512"]
        length = min(int(self.micro_batch_tokens), 512)
        sequences = int(self.micro_batch_tokens) // length
        batch = f"train.global_batch={2 * sequences} train.micro_batch={sequences} train.seq_len={length} {ONE_STEP}"
        choices = [f"strategy={self.strategy}", f"precision={self.precision}", f"data={self.data}"]
        return [*choices, *model, *batch.split(), f"train.lr={self.lr}"]


def scaled(ranks: Sequence[RankReport], moments: Sequence[str], name: str, scale: float) -> list[RankReport]:
    """Return the reports with one tensor's fingerprints as if it were scaled."""

    def change(entry: TensorFingerprint) -> TensorFingerprint:
        if entry.name != name or entry.square is None or entry.projection is None:
            return entry
        return entry._replace(square=entry.square * scale**2, projection=entry.projection * scale)

    return [
        dataclasses.replace(rank, **{moment: [change(entry) for entry in getattr(rank, moment)] for moment in moments})
        for rank in ranks
    ]


def matrices(reference: RankReport) -> list[str]:
    """Return the names of the parameters that are no vectors."""
    return [entry.name for entry in reference.first_gradients if len(entry.shape) > 1]


def excess_by_fault(
    reference: RankReport, ranks: Sequence[RankReport], compute: str, floor_multiple: float = 10.0
) -> dict[tuple[str, str], float]:
    """Return how many times its bound a scaled matrix deviates, by what is scaled and the matrix; 0 if none is above.

    Only what the fault has scaled counts.
    """
    excesses = {}
    for (fault, moments), name in itertools.product(FAULTS.items(), matrices(reference)):
        comparison = compare_training(reference, scaled(ranks, moments, name, SCALE[compute]), compute, floor_multiple)
        checks = [
            check for check in comparison.checks if check.aspect.moment in moments and f" {name}'s" in check.where
        ]
        excess = max((check.excess for check in checks), default=0.0)
        excesses[fault, name] = excess if excess > 1 and any(deviation_problems(comparison)) else 0.0
    return excesses


def run(case: Case, results: Path) -> dict[str, Any]:
    """Return the row of one run."""
    config, command = compose(f"results_dir={results}", "name=scaled", "world_size=2", *case.overrides())
    record = execute_run(config, command)
    row = {key: value for key, value in record.row.items() if key in ("status", "proven_steps", "reason")}
    row |= case._asdict() | {"steps": config.train.total_steps}
    named = re.search(r"single-[^ ,]*", record.proof.get("reference", ""))
    if named is None:
        return row
    (reference,) = RunFolder(results / "scaled" / "references" / named[0]).read_rank_reports(1)
    ranks = RunFolder(results / "scaled" / record.run_id).read_rank_reports(2)
    excesses = excess_by_fault(reference, ranks, config.precision.compute)
    honest = compare_training(reference, ranks, config.precision.compute, command.proof.floor_multiple)
    norms = [check for check in honest.checks if check.aspect.measure == "norm" and not check.aspect.of_vectors]
    norms = [check for check in norms if check.aspect.moment in (*FAULTS["gradient"], *FAULTS["update"])]
    return row | {
        "matrices": len(excesses) // 2,
        **{f"{fault}s_found": sum(e > 1 for (own, _), e in excesses.items() if own == fault) for fault in FAULTS},
        "weakest_excess": min(excesses.values()),
        "norm_deviation": max(check.deviation for check in norms),
        "norm_floor": max(check.floor for check in norms),
        "norm_bound": max(check.bound or 0.0 for check in norms),
    }


def is_right(row: dict[str, Any]) -> bool:
    """Return whether an honest run was proven, and every scaled matrix found."""
    all_found = row.get("matrices", 0) == row.get("gradients_found") == row.get("updates_found")
    return bool(row["status"] == "ok" and all_found and row["proven_steps"])


def main() -> None:
    options = parse_options(
        __doc__,
        sizes={"default": "0.5,11,100", "help": "of 0.5, 11 and 100 million parameters"},
        out={"default": Path("results/scaled_matrices.csv")},
        results={"default": Path("results"), "help": "the folder of the runs themselves"},
    )
    chosen = [
        Case(*model, tokens, precision, rate, strategy)
        for *model, token_counts, precisions, rate in RUNS
        for precision, tokens, strategy in itertools.product(precisions, token_counts, STRATEGIES)
        if model[0] in options.sizes.split(",")
    ]
    complete_table(options.out, COLUMNS, Case._fields, chosen, lambda case: run(case, options.results), is_right)


if __name__ == "__main__":
    main()
