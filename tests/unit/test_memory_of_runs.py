"""The planned peak and the proof of shares beside what random runs measured, as results/random_runs.csv has it."""

import shlex
from collections.abc import Iterator
from functools import cache
from statistics import median

import pytest

from harness.config.schema import RunConfig
from harness.cost_model import sharding
from harness.cost_model.data_parallel_buckets import DistributedDataParallel
from harness.cost_model.deepspeed_buckets import BucketedZero
from harness.cost_model.deepspeed_zero import DeepSpeedZero, ZeroStage1
from harness.cost_model.fully_shard import FullyShard
from harness.cost_model.memory import estimate_memory
from harness.cost_model.whole_parameters import ParameterCoordinator, whole_parameters
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.proof.layout import gradient_problems
from harness.records.rank_report import ProfiledStep, RankReport
from tests.support.campaigns import read_table
from tests.support.commands import ROOT, compose_layout, long, widths_of

TABLE = {line["draw"]: line for line in read_table(ROOT / "results" / "random_runs.csv")}

# Runs that were trained, proven and predicted, by their draws; no compiled run is predicted.
RUNS = {draw: run for draw, run in TABLE.items() if run["status"] == "ok" and run["predicted_peak_bytes"]}

# Draws of every kind of data parallelism, by what their peak shows.
DRAWS = {
    "4035": "a pipeline's last stage, whose head is in fully_shard's root group",
    "4036": "fully_shard reduces a large head, and a loop refers to its gradient",
    "4092": "fully_shard pads gradients that five ranks cannot share evenly",
    "4144": "DDP allocates its buckets anew beside gradients",
    "5063": "the engine refers to DDP's old buckets in mixed precision",
    "5029": "DeepSpeed's stage 2 gathers parameters beside gradients on the host",
    "5061": "DeepSpeed's stage 3 keeps the matrices that a second forward gathered",
    "1025": "DeepSpeed's stage 3 keeps parameters whole that are used again soon",
    "1054": "DeepSpeed's stage 1 copies a rank's own gradients as it reduces them",
    "1032": "DeepSpeed's stage 1 copies the partition in mixed precision, beside the bucket",
    "1109": "a tied head's gradient waits for the embedding's before it is added to a sum",
    "1135": "the gradient of a tied embedding is added to the sum of a head's in two parts",
    "6045": "DeepSpeed's stage 2 keeps its partition in fp32, on a CPU too",
    "6021": "DeepSpeed's stage 1 has no bucket before the first gradient",
    "5140": "DeepSpeed's stage 3 sums the gradients of a head in two parts in place",
}

# DDP's 16-bit buckets are reduced in fp32 copies, and stage 3 copies all gradients for its optimizer. Stage 2 keeps
# whole gradients of the parameters in a rank's partition; stage 3 and gloo copy what they reduce. Draw 1013 (stage 3 on
# one rank, the loss in two parts) is planned 5.8 % too high.
COPIES_OF_GRADIENTS = [
    "1008",
    "1057",
    "1104",
    "1111",
    "2017",
    "2069",
    "2076",
    "2090",
    "1046",
    "1050",
    "1061",
    "1071",
    "1094",
    "2094",
    "2127",
    "1093",
]

# With one warm-up step and accumulation, DDP's new buckets lie beside gradients in the first timed step. Without
# accumulation (5013, 5118) no gradients exist then.
NEW_BUCKETS = ["1048", "4051", "4067", "4087", "4144", "5013", "5118"]

# A bucket has 2e8 to 2e9 bytes, far more than these models; BF16_Optimizer has none, stage 2 has 16-bit ones.
WITH_BUCKETS = ("zero1_defaults", "zero1_tuned", "zero2_defaults", "zero2_tuned", "zero3_defaults")

BUCKETS_OF_DEEPSPEED = [draw for draw, run in RUNS.items() if run["strategy"] in WITH_BUCKETS]

# The most that a planned peak may be off, and the draws whose moments are known so well.
BOUNDS = ((0.005, DRAWS), (0.0025, COPIES_OF_GRADIENTS), (0.0005, NEW_BUCKETS), (0.05, BUCKETS_OF_DEEPSPEED))

CHOSEN = {draw for _, draws in BOUNDS for draw in draws}


@cache
def planned(draw: str) -> tuple[RunConfig, Layout, StateWidths]:
    """Return a run's configuration, its layout and the bytes of its state."""
    config, layout = compose_layout(int(TABLE[draw]["world_size"]), *shlex.split(TABLE[draw]["overrides"]))
    return config, layout, widths_of(config, layout)


def planned_peak(draw: str) -> int:
    """Return the peak that a run has by the present cost model."""
    return estimate_memory(*planned(draw), "cpu").peak_bytes


def error(draw: str, peak_bytes: int) -> float:
    """Return by how much a planned peak is off, in units of the measured one."""
    return abs(peak_bytes / int(RUNS[draw]["peak_allocated_bytes"]) - 1)


@pytest.mark.parametrize("draw", [draw if draw in CHOSEN else long(draw) for draw in RUNS])
def test_the_table_has_what_the_present_cost_model_predicts(draw: str) -> None:
    """Else type python -m tests.support.random_runs --table results/random_runs.csv --predict."""
    assert planned_peak(draw) == int(RUNS[draw]["predicted_peak_bytes"])


def test_the_errors_on_file_are_below_the_bars() -> None:
    """A peak at which gloo's threads were late to free a copy is not predicted, so that the worst row is far off."""
    errors = {draw: error(draw, int(run["predicted_peak_bytes"])) for draw, run in RUNS.items()}
    off = sorted(errors.values())
    assert len(off) >= 400 and len(BUCKETS_OF_DEEPSPEED) >= 19
    assert median(off) <= 0.002 and off[int(0.95 * len(off))] <= 0.05 and off[-1] <= 0.25
    assert [(draw, errors[draw]) for bound, draws in BOUNDS for draw in draws if errors[draw] > bound] == []


# What a fault leaves out of the plan, and what stands in its place.
FAULTS = {
    "optimizer state": (sharding, "state_bytes", lambda *_: 0),
    "reduced gradients": (FullyShard, "reduced", lambda *_: 0),
    "copies of gloo": (DeepSpeedZero, "gathered_copy", lambda *_: 0),
    "gathered tensors": (FullyShard, "whole", lambda *_: 0),
    "copies of a rank's gradients": (ZeroStage1, "waiting", lambda *_: 0),
    "waiting gradients": (BucketedZero, "is_large", lambda *_: False),
    "what second forwards refer to": (ParameterCoordinator, "refer", lambda *_: None),
    "parameters that stay": (ParameterCoordinator, "_stays", lambda *_: False),
    "old buckets": (DistributedDataParallel, "old_bucket_bytes", lambda *_: 0),
    "rebuilt buckets": (DistributedDataParallel, "rebuilds_buckets", False),
}


@pytest.fixture
def no_cached_buffers() -> Iterator[None]:
    """Forget what was gathered without a fault, and with it."""
    whole_parameters.cache_clear()
    yield
    whole_parameters.cache_clear()


@pytest.mark.usefixtures("no_cached_buffers")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_plan_shows_in_these_runs(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    assert max(error(draw, planned_peak(draw)) for draw in DRAWS) > 0.02


@pytest.mark.parametrize(
    ("gradient_bytes", "is_refused"), [(16_052_736, False), (25_700_000, True), (51_400_000, True)]
)
def test_whole_gradients_at_the_edges_of_a_partition_are_no_error(gradient_bytes: int, is_refused: bool) -> None:
    """A partition of 8.6 MB holds parts of parameters of 2.1 MB; half of all gradients is more than that."""
    config, layout, widths = planned("4082")
    ranks = [RankReport(rank=rank, profiled=ProfiledStep(gradient_bytes=gradient_bytes)) for rank in range(6)]
    assert any(gradient_problems(config.model, layout, widths, ranks)) == is_refused
