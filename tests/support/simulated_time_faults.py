"""The time of a simulated step with a fault planted in what it waits for or in which group it communicates.

`python -m tests.support.simulated_time_faults` reads requests as `python -m harness.simulator` does, and prints the
simulated times of all ranks without a fault, and of the first one with each of FAULTS. Ranks of one layout are timed
together.
"""

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

from harness.simulator.process import load_device_guard


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
    values = json.load(sys.stdin)
    load_device_guard(values["guard"])
    from harness.config.from_dict import from_dict
    from harness.simulator.layout_ranks import simulate_ranks_of_layout
    from harness.simulator.process import StepRequest

    requests = [from_dict(StepRequest, request) for request in values["requests"]]
    times: dict[str, list[Any]] = {}
    for name, fault in FAULTS.items():
        times[name] = []
        planted_in = requests if name == "none" else requests[:1]
        for _, group in itertools.groupby(planted_in, key=lambda request: (request.config, request.layout)):
            with fault():
                reports = simulate_ranks_of_layout(list(group))
            times[name] += [report.to_json().get("simulated_time") or report.traceback for report in reports]
    print(json.dumps(times))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
