"""How fast the search of layouts is: candidates and processor seconds by model and world, on one process.

Run it as python -m tests.benchmarks.search; it writes results/planner/search_speed.json.
"""

import json
import time
from pathlib import Path
from typing import Any

from harness.api import compose_run_config
from harness.config.hardware import FittedHardware, HardwareConfig
from harness.config.stack import load_stack
from harness.planner.cluster import PlannedCluster
from harness.planner.search import search
from harness.planner.space import Restrictions

RESULT = Path(__file__).resolve().parents[2] / "results" / "planner" / "search_speed.json"

# Round figures: the speed of a search hardly depends on them.
HARDWARE = HardwareConfig(
    device_name="NVIDIA H100 80GB HBM3",
    memory="80GB",
    memory_bandwidth=3.35e12,
    intra_node_bandwidth=450e9,
    inter_node_bandwidth=50e9,
    sources=("round figures of this benchmark",),
    fitted=FittedHardware(0.8, 0.6, 2.5, 0.8, 3e-6, 5e-6, 0.8, 2e-6, 0.8, 1e-5, 0.1, 0.1),
    fitted_to="nothing",
)

CASES = (("1b", 1, 64), ("7b", 4, 256), ("13b", 8, 512), ("70b", 32, 1024), ("405b", 2048, 16384))


def measure(model: str, nodes: int, global_batch: int) -> dict[str, Any]:
    """Return the candidates and the processor seconds of one search on nodes of eight devices."""
    overrides = (f"model={model}", "precision=bf16_mixed", f"train.global_batch={global_batch}")
    config, _ = compose_run_config(*overrides)
    cluster = PlannedCluster("eight", nodes, 8, HARDWARE, "cuda")
    start = time.process_time()
    result = search(config, cluster, load_stack("harness"), cluster.world_size, Restrictions({}))
    seconds = time.process_time() - start
    return {
        "model": model,
        "world_size": cluster.world_size,
        "considered": result.considered,
        "valid": result.valid,
        "memory_estimates": result.memory_estimates,
        "processor_seconds": round(seconds, 2),
        "seconds_per_10000_candidates": round(1e4 * seconds / result.considered, 2),
    }


def main() -> None:
    """Measure every case and write the result."""
    rows = [measure(*case) for case in CASES]
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
