"""Measure the time and the memory of the simulator itself, as world and depth grow.

python -m tests.benchmarks.simulator_speed --out results/simulator/speed.json
Every layout is simulated in a process of its own. Seconds are by the clock and depend on the machine; operators and
host memory do not. `ratio` is the seconds relative to the first layout's of the same run of this script.
"""

import json
import resource
import time
from typing import Any

from harness.simulator.process import StepRequest
from tests.support.campaigns import REQUIRED_PATH, parse_options
from tests.support.commands import compose_layout
from tests.support.simulated_steps import simulate_steps

FULL = ("checkpointing=full", "precision=bf16_mixed")

FSDP = ("strategy=fsdp_full_shard", *FULL)

PIPELINE = ("strategy=3d", "strategy.zero_stage=2", "strategy.dp_replicate=1", "strategy.dp_shard=-1", "strategy.tp=8")

# Name, ranks, overrides: growth with the world, growth with depth, and the largest layouts.
LAYOUTS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    *(
        (f"7b of 4 layers on {world}", world, (*FSDP, "model=7b", "model.num_hidden_layers=4"))
        for world in (8, 64, 1024)
    ),
    *(
        (f"7b of {layers} layers on 8", 8, (*FSDP, "model=7b", f"model.num_hidden_layers={layers}"))
        for layers in (8, 16)
    ),
    ("7b on 8", 8, (*FSDP, "model=7b")),
    ("70b on 64", 64, (*FSDP, "model=70b")),
    ("70b on 64, zero3_tuned", 64, ("strategy=zero3_tuned", *FULL, "model=70b")),
    (
        "405b on 8192",
        8192,
        (*PIPELINE, *FULL, "strategy.pp=16", "model=405b"),
    ),
)

GLOBAL_BATCH = {8192: 2048}  # 32 micro-batches for each of 16 stages


def measure(name: str, world: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the time and the memory of simulating the rank 0 of a layout, and the peaks that it finds."""
    config, layout = compose_layout(
        world, *overrides, f"train.global_batch={GLOBAL_BATCH.get(world, world)}", f"world_size={world}"
    )
    started = time.monotonic()
    (report,) = simulate_steps([StepRequest(config, layout, device_bytes=None)])
    seconds = time.monotonic() - started
    assert report.status == "ok", report.reason
    return {
        "layout": name,
        "world_size": world,
        "seconds": round(seconds, 1),
        "largest_host_bytes_so_far": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "peak_allocated_bytes": report.peak_allocated_bytes,
        "peak_reserved_bytes": report.peak_reserved_bytes,
    }


def main() -> None:
    only = {"default": "", "help": "only layouts whose name contains this"}
    arguments = parse_options(__doc__, out=REQUIRED_PATH, only=only)
    results = [measure(*layout) for layout in LAYOUTS if arguments.only in layout[0]]
    for result in results:
        result["ratio"] = round(result["seconds"] / results[0]["seconds"], 2)
        print(result)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
