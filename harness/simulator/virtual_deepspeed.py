"""Stand-ins for the checks of DeepSpeed that compare a rank with others, which a virtual rank does not have.

They run before the timed steps. A broadcast leaves a virtual rank what it had, which they would take for a difference.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from harness.engines.deepspeed.initialize import import_deepspeed
from harness.layout.layout import Layout


@contextmanager
def agreeing_ranks(layout: Layout, device: torch.device) -> Iterator[None]:
    """Return a context in which DeepSpeed takes other ranks to have the same lists and batches as this one.

    It does nothing for a layout without DeepSpeed, which is slow to import.
    """
    if not layout.uses_deepspeed_zero:
        yield
        return
    import_deepspeed(device)
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import utils

    with (
        mock.patch.object(utils, "assert_lst_len_same_as_other_ranks", _accept),
        mock.patch.object(utils, "get_lst_from_rank0", _own_list),
        mock.patch.object(
            DeepSpeedEngine,
            "_configure_tensor_parallel_states",
            _without_batch_check(DeepSpeedEngine._configure_tensor_parallel_states),
        ),
    ):
        yield


def _accept(values: Sequence[int]) -> None:
    """Accept a list as being as long as that of rank 0."""


def _own_list(values: Sequence[int]) -> Sequence[int]:
    """Return a list as that of rank 0."""
    return values


def _without_batch_check(configure: Any) -> Any:
    """Return a function that configures tensor parallelism as another does, and removes its check of batches."""

    def configure_without_check(engine: Any, model: Any) -> None:
        configure(engine, model)
        engine.first_dataloader_check.remove()

    return configure_without_check
