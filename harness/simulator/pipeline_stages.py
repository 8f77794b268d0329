"""A stand-in for the one exchange of values with which torch's pipeline stages begin."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined]


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
