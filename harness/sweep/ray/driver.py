"""The driver of a Ray job: `python -m harness.sweep.ray.driver FILE LOG NODES BUNDLE`.

It waits for as many nodes of the cluster with the resources of BUNDLE, starts harness.sweep.ray.node on each of
them, and ends with the first one, which leads. What node n prints is appended to LOG with n in its name.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from harness.sweep.ray import NODE_LOST

UNHINDERED = {"env_vars": {"RAY_worker_niceness": "0"}}  # Ray lets workers yield to any other process of the machine


def leader_address() -> tuple[str, int]:
    """Return the address of the node that calls it, and a free port there."""
    import socket  # Ray sends the function alone to the node

    import ray

    with socket.create_server(("", 0)) as listening:
        return ray.util.get_node_ip_address(), listening.getsockname()[1]


def run_process(command: list[str], folder: str, log: str) -> int:
    """Run a command in a folder to its end, with its output in a log, and return its exit status."""
    import subprocess

    with open(log, "ab") as file, subprocess.Popen(command, cwd=folder, stdout=file, stderr=file) as process:
        try:
            return process.wait()
        finally:
            process.terminate()


def main() -> int:
    """Run the job and return the exit status of its leader, NODE_LOST if Ray lost that one's node or its process."""
    path, log, count, bundle = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    ray.init()
    group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
    print(f"waiting for {count} nodes with {bundle}", flush=True)
    ray.get(group.ready())
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}

    def on_node(rank: int, function: Any, *arguments: object, **resources: Any) -> Any:
        """Call a function on the node of this rank."""
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {"max_retries": 0, "scheduling_strategy": place, "runtime_env": UNHINDERED, **resources}
        remote = ray.remote(function).options(**options)
        return remote.remote(*arguments)

    try:
        address, port = ray.get(on_node(0, leader_address, num_cpus=0))
        program = [sys.executable, "-m", "harness.sweep.ray.node", path, str(count)]
        shares = {"num_cpus": bundle["CPU"], "num_gpus": bundle["GPU"], "resources": custom}
        nodes = [
            on_node(
                *(rank, run_process, [*program, str(rank), address, str(port)], str(Path.cwd())),
                str(log.with_stem(f"{log.stem}_{rank}")),
                **shares,
            )
            for rank in range(count)
        ]
        status: int = ray.get(nodes[0])
    except RayError as error:
        print(error, flush=True)
        return NODE_LOST
    return status


if __name__ == "__main__":
    sys.exit(main())
