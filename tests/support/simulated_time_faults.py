"""The time of a simulated step with a fault planted in what it waits for or in which group it communicates.

`python -m tests.support.simulated_time_faults` reads requests as tests.support.simulated_steps does, and prints the
simulated times of all ranks without a fault, and of the first one with each of FAULTS.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

from tests.support.simulated_steps import requested_layouts


@contextmanager
def forgotten_wait() -> Iterator[None]:
    """Let FSDP2 use gathered parameters without waiting for the stream that gathers them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

    copy_out: Any = vars(param_group)["foreach_all_gather_copy_out"]

    def copy_out_at_once(result: Any, *arguments: Any, **keywords: Any) -> Any:
        return copy_out(result._replace(all_gather_event=None), *arguments, **keywords)

    with mock.patch.object(param_group, "foreach_all_gather_copy_out", copy_out_at_once):
        yield


@contextmanager
def wrong_group() -> Iterator[None]:
    """Let FSDP2 gather parameters among every other rank of the world instead of those of a node."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    gather: Any = collectives.DefaultAllGather.__call__
    group_of_others = functools.cache(dist.new_group)

    def gather_elsewhere(self: Any, *arguments: Any, group: Any, **keywords: Any) -> Any:
        with unset_fake_temporarily():
            others = group_of_others(range(0, dist.get_world_size(), dist.get_world_size() // group.size()))
        return gather(self, *arguments, group=others, **keywords)

    with mock.patch.object(collectives.DefaultAllGather, "__call__", gather_elsewhere):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "none": nullcontext,
    "forgotten_wait": forgotten_wait,
    "wrong_group": wrong_group,
}


def main() -> None:
    layouts = list(requested_layouts())
    from harness.simulator.rank import simulate_ranks_of_layout

    times: dict[str, list[Any]] = {}
    for name, fault in FAULTS.items():
        times[name] = []
        for layout in layouts if name == "none" else [layouts[0][:1]]:
            with fault():
                reports = simulate_ranks_of_layout(layout)
            times[name] += [report.to_json().get("simulated_time") or report.traceback for report in reports]
    print(json.dumps(times))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
