"""The world of a simulated rank, whose other ranks do not exist."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined]
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.layout.layout import Layout


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Play one rank of a world by torch's fake process group: its collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def decide_inference_mode(schedule: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
    """Give every stage the mode that it votes for, as _PipelineSchedule._warmup_p2p does if all ranks vote alike."""
    for stage in stages:
        needs_dynamic = InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        stage._inference_mode = InferenceMode.DYNAMIC if needs_dynamic else InferenceMode.STATIC


@contextmanager
def pipeline_stages() -> Iterator[None]:
    """Return a context in which stages do not ask the other ranks for their votes, which no rank would send."""
    with mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", decide_inference_mode):
        yield


@contextmanager
def accelerate_process(layout: Layout, rank: int) -> Iterator[None]:
    """Return a context in which Accelerate finds one rank of the world, as the environment of a launched rank says.

    Accelerate keeps its state for the life of a process, in classes and in variables of the environment. This does
    nothing for a layout of another engine.
    """
    if layout.engine != "accelerate":
        yield
        return
    from accelerate.state import AcceleratorState, GradientState

    ranks = {"RANK": str(rank), "WORLD_SIZE": str(layout.world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with (
        mock.patch.dict("os.environ", ranks),
        mock.patch.object(distributed, "_verify_param_shape_across_processes", lambda group, parameters: None),
    ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
