"""Compare simulated step times with the planner's, and both with published measurements.

python -m tests.benchmarks.simulated_step_seconds --out results/simulator/step_seconds.csv
Cluster files are taken as they are. Published rows are those of layouts that the torch engine shares: FSDP of
Modalities and llm-foundry, and nanotron's without ZeRO and with an MFU of 10 % or more. Every n-th row of a source is
taken, by EVERY; of nanotron's pipelines those that the fewest layer passes simulate. Without pipelines a step is linear
in the layers and in the micro-batches: a row with more than DEPTHS or BATCHES is simulated at these and extrapolated.
Pipelines are simulated at full depth, and extrapolated in the micro-batches alone. A table that exists is completed.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from harness.config.schema import RunConfig
from harness.config.stack import load_stack
from harness.cost_model.timing.step_time import estimate_step_time
from harness.engines.base import load_engine
from harness.hardware.machine import described_cluster, described_machine
from harness.layout.layout import Layout, resolve_layout
from harness.records.rank_report import SimulatedTime
from harness.simulator.process import StepRequest
from tests.support.campaigns import complete_table, parse_options, read_table
from tests.support.commands import compose_layout
from tests.support.published import PublishedRow, llm_foundry, modalities, nanotron
from tests.support.published.step_times import row_hardware, step_seconds
from tests.support.simulated_steps import simulate_steps

DEPTHS, BATCHES = (2, 4), (1, 2)  # the layers and micro-batches at which a row is simulated that has more

MIN_MFU = 0.1  # of nanotron's rows

PIPELINES = 8  # of nanotron's rows that are simulated

EVERY = {"Modalities, A100 of 64 GB": 4, "llm-foundry, A100": 7, "llm-foundry, H100": 5, "nanotron, H100": 6}

PLANNED = "plan, 8 x H100"  # the source of configurations of which there is no measurement

PIPELINED = ("model.num_hidden_layers=8", "model.tie_word_embeddings=false")  # the model of a pipeline

STRATEGIES = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "tp", "tp_sp", "cp", "pp_1f1b", "3d")

KEYS = ("source", "row", "group")

FIELDS = (
    *(*KEYS, "layout", "published_seconds", "simulated_seconds", "planned_seconds"),
    *("harness_planned_seconds", "simulated_ratio", "planned_ratio", "harness_planned_ratio", "simulated_of"),
    *("exposed_seconds", "idle_seconds", "largest_operators", "simulation_seconds"),
)

RATIOS = ("simulated_ratio", "planned_ratio", "harness_planned_ratio")

Line = dict[str, str]


class Case(NamedTuple):
    """A configuration whose step is simulated, and what is known of it."""

    source: str
    row: str
    group: str
    config: RunConfig
    layout: Layout
    published: float | None
    planned: float  # with the stack that was measured
    planned_here: float  # with the engines of this project


class Corner(NamedTuple):
    """A number of layers and of micro-batches at which a case is simulated."""

    layers: int
    micro_batches: int


def published_cases() -> Iterator[Case]:
    """Yield the published rows that are simulated."""
    grid = [as_engine(row) for row in nanotron.rows() if row.status == "ok" and row.measured.get("mfu", 0) >= MIN_MFU]
    grid = [row for row in grid if not is_refused(row)]
    sources = {
        "Modalities, A100 of 64 GB": modalities.rows(),
        "llm-foundry, A100": llm_foundry.rows(),
        "llm-foundry, H100": llm_foundry.h100_rows(),
        "nanotron, H100": [row for row in grid if not row.layout.pp_enabled],
    }
    for source, rows in sources.items():
        yield from (published_case(source, row) for row in rows[:: EVERY[source]])
    pipelines = sorted((row for row in grid if row.layout.pp_enabled), key=pipeline_passes)
    yield from (published_case("nanotron's pipelines, H100", row) for row in spread(pipelines))


def as_engine(row: PublishedRow) -> PublishedRow:
    """Return a row with the replicas of tensor-parallel ranks as the torch engine has them: by fully_shard."""
    if row.layout.tp == 1 or row.config.strategy.data_parallel != "ddp":
        return row
    strategy = dataclasses.replace(row.config.strategy, data_parallel="fsdp")
    config = dataclasses.replace(row.config, strategy=strategy)
    return dataclasses.replace(row, config=config, layout=resolve_layout(strategy, row.layout.world_size))


def is_refused(row: PublishedRow) -> bool:
    """Return whether a row is refused, such as ZeRO stage 1 with master weights, or for want of micro-batches."""
    if row.layout.num_stages > row.layout.grad_accumulation_steps(row.config.train):
        return True  # torch's schedules need a micro-batch for each stage
    machine = described_machine(described_cluster(on_hardware(row).cluster))
    return any(load_engine("torch").unsupported(row.config, row.layout, machine))


def on_hardware(row: PublishedRow) -> RunConfig:
    """Return a row's configuration with the hardware on which it was measured."""
    return dataclasses.replace(row.config, cluster=dataclasses.replace(row.config.cluster, hardware=row_hardware(row)))


def spread(rows: Sequence[PublishedRow]) -> list[PublishedRow]:
    """Return rows of different degrees and models, each the one with the fewest passes."""
    kinds: dict[tuple[int, int, int], PublishedRow] = {}
    for row in rows:
        kinds.setdefault((row.layout.pp, row.layout.tp, row.config.model.hidden_size), row)
    return list(kinds.values())[:PIPELINES]


def pipeline_passes(row: PublishedRow) -> int:
    """Return the passes of layers that simulate a pipeline."""
    return row.config.model.num_hidden_layers * sum(corner.micro_batches for corner in corners(row.config, row.layout))


def published_case(source: str, row: PublishedRow) -> Case:
    """Return the case of a published row; a head of a pipeline is not tied, which the engine refuses."""
    config = on_hardware(row)
    if row.layout.pp_enabled:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, tie_word_embeddings=False))
    here = planned_seconds(config, row.layout, row.gpus_per_node)
    (planned,) = step_seconds([row])
    published = row.measured["step_seconds"]
    return Case(source, str(row.row_number), row.group, config, row.layout, published, planned, here)


def planned_seconds(config: RunConfig, layout: Layout, gpus_per_node: int) -> float:
    """Return the step that is planned with the engines of this project."""
    hardware, timing = config.cluster.hardware, load_stack("harness").timing
    return estimate_step_time(config, layout, hardware, timing, None, gpus_per_node).step_seconds


def planned_cases() -> Iterator[Case]:
    """Yield a case for every strategy on one node, of few layers."""
    for model in ("1b", "7b"):
        for strategy in STRATEGIES:
            shape = PIPELINED if strategy in ("pp_1f1b", "3d") else ("model.num_hidden_layers=4",)
            batch = 1 if strategy in ("tp", "tp_sp", "cp") else 8
            overrides = (f"strategy={strategy}", f"model={model}", *shape, f"train.global_batch={batch}")
            config, layout = compose_layout(8, *overrides, "cluster=8xh100", "precision=bf16_mixed")
            seconds = planned_seconds(config, layout, 8)
            yield Case(PLANNED, strategy, f"{model} on 8 GPUs", config, layout, None, seconds, seconds)


def corners(config: RunConfig, layout: Layout) -> list[Corner]:
    """Return the layers and micro-batches at which a configuration is simulated."""
    layers, batches = config.model.num_hidden_layers, layout.grad_accumulation_steps(config.train)
    few = (layout.pp, layout.pp + 1) if layout.pp_enabled else BATCHES
    depths = DEPTHS if layers > DEPTHS[1] and not layout.pp_enabled else (layers,)
    return [Corner(depth, number) for depth in depths for number in (few if batches > few[1] else (batches,))]


def requests(case: Case, corner: Corner) -> list[StepRequest]:
    """Return the requests for one rank of every pipeline stage, with so many layers and micro-batches."""
    layout, train = case.layout, case.config.train
    global_batch = train.micro_batch * corner.micro_batches * layout.dp_replicate * layout.dp_shard
    config = dataclasses.replace(
        case.config,
        model=dataclasses.replace(case.config.model, num_hidden_layers=corner.layers),
        train=dataclasses.replace(train, global_batch=global_batch),
    )
    ranks = range(0, layout.world_size, layout.world_size // layout.pp)
    return [StepRequest(config, layout, rank, "cuda", "simulated CUDA device", None) for rank in ranks]


def extrapolate(values: Mapping[Corner, float], goal: Corner) -> float:
    """Return a value that is linear in layers and in micro-batches at other layers and micro-batches."""
    of_depth = {
        depth: on_line({m: value for (layers, m), value in values.items() if layers == depth}, goal.micro_batches)
        for depth in dict.fromkeys(corner.layers for corner in values)
    }
    return on_line(of_depth, goal.layers)


def on_line(heights: Mapping[int, float], position: int) -> float:
    """Return the height of the line through two points at a position, or that of a single point."""
    low, high = min(heights), max(heights)
    slope = (heights[high] - heights[low]) / max(high - low, 1)
    return heights[low] + slope * (position - low)


def simulate(case: Case) -> tuple[dict[Corner, SimulatedTime], str]:
    """Return the slowest stage's time at every corner, and why there is none."""
    grouped = {corner: requests(case, corner) for corner in corners(case.config, case.layout)}
    reports = iter(simulate_steps([request for group in grouped.values() for request in group]))
    times = {}
    for corner, group in grouped.items():
        own = list(itertools.islice(reports, len(group)))
        known = [report.simulated_time for report in own if report.status == "ok" and report.simulated_time]
        if len(known) < len(own):
            failed = next(report for report in own if report.status != "ok" or not report.simulated_time)
            return {}, f"{failed.error}: {failed.reason}"
        times[corner] = min(known, key=lambda time: time.idle_seconds)
    return times, ""


def line_of(case: Case) -> Line:
    """Return the line of a case, which is simulated."""
    started = time.monotonic()
    times, reason = simulate(case)
    goal = Corner(case.config.model.num_hidden_layers, case.layout.grad_accumulation_steps(case.config.train))
    line: Line = {
        "source": case.source,
        "row": case.row,
        "group": case.group,
        "layout": layout_text(case),
        "published_seconds": f"{case.published:.5g}" if case.published else "",
        "simulated_of": reason,
        "simulation_seconds": f"{time.monotonic() - started:.1f}",
    }
    seconds = {"planned": case.planned, "harness_planned": case.planned_here}
    if times:
        seconds["simulated"] = extrapolate({corner: own.step_seconds for corner, own in times.items()}, goal)
        exposed = extrapolate({c: sum(own.exposed_seconds.values()) for c, own in times.items()}, goal)
        idle = extrapolate({c: own.idle_seconds for c, own in times.items()}, goal)
        line |= {
            "simulated_of": " ".join(f"{corner.layers}x{corner.micro_batches}" for corner in times),
            "exposed_seconds": f"{exposed:.5g}",
            "idle_seconds": f"{idle:.5g}",
            "largest_operators": largest_operators(times, goal),
        }
    for name, value in seconds.items():
        line |= {f"{name}_seconds": f"{value:.5g}", f"{name}_ratio": f"{value / (case.published or case.planned):.4f}"}
    return dict.fromkeys(FIELDS, "") | line


def largest_operators(times: Mapping[Corner, SimulatedTime], goal: Corner, count: int = 8) -> str:
    """Return the operators that take most of a step, with their seconds, each as if it ran alone."""
    seconds = {
        name: extrapolate({corner: own.operator_seconds.get(name, 0.0) for corner, own in times.items()}, goal)
        for name in {name for own in times.values() for name in own.operator_seconds}
    }
    return "; ".join(f"{name} {seconds[name]:.4g}" for name in sorted(seconds, key=lambda name: -seconds[name])[:count])


def layout_text(case: Case) -> str:
    """Return a case's degrees and batches in words."""
    layout, train = case.layout, case.config.train
    degrees = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp, "cp": layout.cp}
    texts = [f"{name}={degree}" for name, degree in (degrees | {"pp": layout.pp}).items() if degree > 1]
    batches = layout.grad_accumulation_steps(train)
    checkpointing = case.config.checkpointing.name
    return " ".join([*texts, f"zero={layout.zero_stage} {batches}x{train.micro_batch}x{train.seq_len} {checkpointing}"])


def print_errors(lines: Sequence[Line]) -> None:
    """Print the median error of each source, of the simulation and of both plans."""
    published = pd.DataFrame(lines, columns=FIELDS).query("published_seconds != ''")
    for source, rows in [*published.groupby("source", sort=False), ("all published", published)]:
        known = rows[rows.simulated_ratio != ""][list(RATIOS)].astype(float)
        if len(known):
            medians = (known - 1).abs().median()
            errors = ", ".join(f"{name.removesuffix('_ratio')} {error:.3f}" for name, error in medians.items())
            bias = known.simulated_ratio.median()
            print(f"{source:32} {len(known)} of {len(rows)} rows, median errors: {errors}; ratio {bias:.3f}")


def main() -> None:
    out = parse_options(__doc__, out={"default": Path("results/simulator/step_seconds.csv")}).out
    cases = {(case.source, case.row, case.group): case for case in (*planned_cases(), *published_cases())}
    try:
        complete_table(
            out, FIELDS, KEYS, cases, lambda key: line_of(cases[key]), lambda line: line["idle_seconds"] != ""
        )
    finally:
        print_errors(read_table(out))


if __name__ == "__main__":
    main()
