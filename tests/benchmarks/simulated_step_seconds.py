"""Compare simulated step times with the planner's, and both with published measurements.

python -m tests.benchmarks.simulated_step_seconds --out results/simulator/step_seconds.csv
Cluster files are taken as they are. Published rows are those of layouts that the torch engine shares: FSDP of
Modalities and llm-foundry, and nanotron's without ZeRO and with an MFU of 10 % or more. Every n-th row of a source is
taken, by EVERY; of nanotron's pipelines those that the fewest layer passes simulate. Without pipelines a step is linear
in the layers and in the micro-batches: a row with more than DEPTHS or BATCHES is simulated at these and extrapolated,
which `--exact` compares with whole steps. Pipelines are simulated at full depth, and extrapolated in the micro-batches
alone. A table that exists is completed, unless --again is given.
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
from harness.hardware.described_cluster import described_cluster, described_machine
from harness.layout.layout import Layout, resolve_layout
from harness.records.rank_report import SimulatedTime
from harness.simulator.process import StepRequest
from tests.support.campaigns import FLAG, parse_options, read_table, write_table
from tests.support.commands import compose_config
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

FIELDS = (
    *("source", "row", "group", "layout", "published_seconds", "simulated_seconds", "planned_seconds"),
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
    hardware, config = row_hardware(row), on_hardware(row)
    if row.layout.pp_enabled:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, tie_word_embeddings=False))
    here = estimate_step_time(
        config, row.layout, hardware, load_stack("harness").timing, None, row.gpus_per_node
    ).step_seconds
    (planned,) = step_seconds([row])
    published = row.measured["step_seconds"]
    return Case(source, str(row.row_number), row.group, config, row.layout, published, planned, here)


def planned_cases() -> Iterator[Case]:
    """Yield a case for every strategy on one node, of few layers."""
    for model in ("1b", "7b"):
        for strategy in STRATEGIES:
            shape = PIPELINED if strategy in ("pp_1f1b", "3d") else ("model.num_hidden_layers=4",)
            batch = 1 if strategy in ("tp", "tp_sp", "cp") else 8
            overrides = (f"strategy={strategy}", f"model={model}", *shape, f"train.global_batch={batch}")
            config = compose_config(*overrides, "cluster=8xh100", "precision=bf16_mixed")
            layout = resolve_layout(config.strategy, 8)
            hardware = config.cluster.hardware
            assert hardware is not None
            time = estimate_step_time(config, layout, hardware, load_stack("harness").timing, None, 8).step_seconds
            yield Case(PLANNED, strategy, f"{model} on 8 GPUs", config, layout, None, time, time)


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
    took = time.monotonic() - started
    goal = Corner(case.config.model.num_hidden_layers, case.layout.grad_accumulation_steps(case.config.train))
    line: Line = {
        "source": case.source,
        "row": case.row,
        "group": case.group,
        "layout": layout_text(case),
        "published_seconds": f"{case.published:.5g}" if case.published else "",
        "simulated_of": reason,
        "simulation_seconds": f"{took:.1f}",
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


def print_exactness(case: Case, layers: int, batches: int) -> None:
    """Print the step of a case at full size, and the one that is extrapolated."""
    goal = Corner(layers, batches)
    times, reason = simulate(case)
    whole = simulate_steps(requests(case, goal))[0].simulated_time
    if not times or whole is None:
        print(f"{case.source} row {case.row}: {reason}")
        return
    guess = extrapolate({corner: own.step_seconds for corner, own in times.items()}, goal)
    print(f"{case.source} row {case.row} at {layers} x {batches}: {guess:.5g} of {whole.step_seconds:.5g} seconds")


def main() -> None:
    arguments = parse_options(
        __doc__,
        out={"default": Path("results/simulator/step_seconds.csv")},
        again=FLAG | {"help": "simulate the rows that the table has too"},
        seconds={"default": float("inf"), "help": "begin no further row after so many"},
        source={"default": "", "help": "the only source to simulate, by the beginning of its name"},
        exact=FLAG | {"help": "compare extrapolated steps with whole ones instead"},
    )
    cases = [case for case in (*planned_cases(), *published_cases()) if case.source.startswith(arguments.source)]
    if arguments.exact:
        for case in cases[:: max(1, len(cases) // 4)]:
            print_exactness(case, 12, 3)
        return
    started, lines = time.monotonic(), read_table(arguments.out)
    if arguments.again:
        lines = [line for line in lines if not line["source"].startswith(arguments.source)]
    have = {(line["source"], line["row"], line["group"]) for line in lines}
    for case in cases:
        if (case.source, case.row, case.group) in have:
            continue
        if time.monotonic() - started > arguments.seconds:
            break
        lines.append(line_of(case))
        write_table(arguments.out, FIELDS, lines)
        last = lines[-1]
        ratios = ", ".join(f"{name} {last[name]}" for name in RATIOS)
        print(f"{case.source:30} {case.row:18} {case.group:24} {ratios} ({last['simulated_of']})", flush=True)
    print_errors(lines)


if __name__ == "__main__":
    main()
