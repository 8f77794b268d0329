"""What random layouts reserve and need on simulated GPUs, beside what is planned.

python -m tests.benchmarks.simulated_layouts --out results/simulator/random_layouts.csv
Each layout is one rank of a model of 1b to 70b with two micro-batches, or one for each stage of a pipeline. The least
capacity is that of the smallest device on which the rank's allocations can be served, since torch gives back what it
has cached before it runs out; it is found within one percent. Layouts that the output has are not simulated again.
"""

import random
from collections.abc import Iterator

from harness.cost_model.memory import estimate_memory
from harness.layout.compatibility import incompatibilities
from harness.layout.layout import resolve_layout
from harness.simulator.process import StepRequest
from harness.util.text import UserError
from tests.support.campaigns import REQUIRED_PATH, Line, complete_table, parse_options
from tests.support.commands import compose_config, widths_of
from tests.support.simulated_steps import simulate_steps

STRATEGIES = (
    *("ddp", "zero1", "zero1_tuned", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "zero3_defaults", "zero1_tp"),
    *("fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_no_shard", "fsdp_hybrid_shard", "fsdp_tp", "tp", "tp_sp", "cp"),
    *("pp_1f1b", "fsdp_pp", "tp_pp", "3d"),
)

MODELS = ("1b", "3b", "7b", "8b", "13b", "mistral_7b", "gpt_1.3b", "gpt_2.7b", "gpt_6.7b", "30b", "70b")

MOST_BYTES = 79 * 2**30  # of a planned peak

MOST_LAYERS = 2600  # times micro-batches: a simulation takes some ten milliseconds for each

KEYS = ("draw",)

COLUMNS = (
    *("draw", "strategy", "model", "world_size", "checkpointing", "precision", "overrides", "rank", "status"),
    *("planned_bytes", "requested_bytes", "allocated_bytes", "reserved_bytes", "least_capacity_bytes"),
)


def draw(seed: int) -> tuple[str, ...]:
    """Return the overrides of a random layout."""
    r = random.Random(seed)
    strategy, model = r.choice(STRATEGIES), r.choice(MODELS)
    world_size = r.choice((2, 4, 8)) if strategy in ("tp", "tp_sp", "cp", "pp_1f1b") else r.choice((8, 16, 64, 256))
    micro_batch, seq_len = r.choice((1, 1, 2, 4)), r.choice((1000, 1024, 2048, 2048, 4096, 8192))
    settings = {
        "strategy": strategy,
        "model": model,
        "world_size": world_size,
        "checkpointing": r.choice(("none", "selective", "full")),
        "precision": r.choice(("bf16_mixed", "bf16_mixed", "bf16_mixed", "bf16", "fp32")),
        "train.micro_batch": micro_batch,
        "train.seq_len": seq_len,
        "train.loss_chunks": r.choice((1, 1, 1, 4)),
    }
    overrides = tuple(f"{key}={value}" for key, value in settings.items())
    layout = resolve_layout(compose_config(*overrides).strategy, world_size)
    passes = layout.pp if layout.pp_enabled else 2
    return (*overrides, f"train.global_batch={layout.dp * micro_batch * passes}", "data=synthetic", "cluster=8xh100")


def requests(seed: int) -> Iterator[StepRequest]:
    """Yield the request of a draw that can be planned and is neither too large nor too slow."""
    try:
        overrides = draw(seed)
        config = compose_config(*overrides)
        layout = resolve_layout(config.strategy, int(overrides[2].partition("=")[2]))
        memory = estimate_memory(config, layout, widths_of(config, layout), "cuda")
    except (UserError, ValueError):
        return
    if any(incompatibilities(config, layout)):
        return
    layers = config.model.num_hidden_layers // layout.pp * layout.grad_accumulation_steps(config.train)
    if memory.peak_bytes <= MOST_BYTES and layers <= MOST_LAYERS:
        yield StepRequest(config, layout, memory.rank, device_bytes=None)


def simulate_layout(case: tuple[int]) -> Line:
    """Return what a layout's fullest rank is planned and simulated to take."""
    (seed,) = case
    (request,) = requests(seed)
    config, layout = request.config, request.layout
    memory = estimate_memory(config, layout, widths_of(config, layout), "cuda")
    (report,) = simulate_steps([request], module=("tests.support.least_capacity",))
    return {
        "draw": str(seed),
        "strategy": config.strategy.name,
        "model": config.model.name,
        "world_size": layout.world_size,
        "checkpointing": config.checkpointing.name,
        "precision": config.precision.name,
        "overrides": " ".join(draw(seed)),
        "rank": request.rank,
        "status": report.status if report.status == "ok" else f"{report.status}: {report.reason}",
        "planned_bytes": memory.peak_bytes,
        "requested_bytes": report.peak_requested_bytes,
        "allocated_bytes": report.peak_allocated_bytes,
        "reserved_bytes": report.peak_reserved_bytes,
        "least_capacity_bytes": report.peak_active_bytes,
    }


def main() -> None:
    options = parse_options(__doc__, out=REQUIRED_PATH, count={"default": 120}, first={"default": 1})
    cases = ((str(seed),) for seed in range(options.first, options.first + 20 * options.count) if [*requests(seed)])
    chosen = [case for case, _ in zip(cases, range(options.count), strict=False)]
    complete_table(
        options.out,
        COLUMNS,
        KEYS,
        chosen,
        lambda case: simulate_layout((int(case[0]),)),
        lambda line: line["status"] == "ok",
    )


if __name__ == "__main__":
    main()
