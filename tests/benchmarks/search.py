"""How fast the search of layouts is: candidates and processor seconds by model and world, on one process.

Run it as python -m tests.benchmarks.search; it writes results/planner/search_speed.json.
"""

import json
import time
from pathlib import Path
from typing import Any

from harness.api import compose_run_config
from harness.config.stack import load_stack
from harness.planner.search import search
from harness.planner.space import SearchedSpace
from tests.support.planned import cluster_of_eight

RESULT = Path(__file__).resolve().parents[2] / "results" / "planner" / "search_speed.json"

CASES = (("1b", 1, 64), ("7b", 4, 256), ("13b", 8, 512), ("70b", 32, 1024), ("405b", 2048, 16384))


def measure(model: str, nodes: int, global_batch: int) -> dict[str, Any]:
    """Return the candidates and the processor seconds of one search on nodes of eight devices."""
    overrides = (f"model={model}", "precision=bf16_mixed", f"train.global_batch={global_batch}")
    config, _ = compose_run_config(*overrides)
    cluster = cluster_of_eight(nodes)
    start = time.process_time()
    result = search(SearchedSpace(config, cluster, load_stack("harness"), cluster.world_size))
    seconds = time.process_time() - start
    return {
        "model": model,
        "world_size": cluster.world_size,
        "considered": result.considered,
        "beyond_two_devices": result.beyond,
        "valid": result.valid,
        "memory_estimates": result.memory_estimates,
        "processor_seconds": round(seconds, 2),
        "seconds_per_10000_considered": round(1e4 * seconds / result.considered, 2),
        "seconds_per_10000_valid": round(1e4 * seconds / result.valid, 2),
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
