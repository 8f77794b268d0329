"""Stand-ins for what DeepSpeed does with the values of other ranks, which a virtual rank does not have.

Its checks that compare a rank with others run before the timed steps. A broadcast leaves a virtual rank what it had,
which they would take for a difference. The padding of a parameter's last parts, which is left as it was in memory, is
where a virtual rank's copies of its own part are gathered.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from harness.engines.deepspeed.initialize import import_deepspeed
from harness.layout.layout import Layout


@contextmanager
def agreeing_ranks(layout: Layout, device: torch.device) -> Iterator[None]:
    """Return a context in which DeepSpeed takes other ranks to have the same lists, batches and parts as this one.

    It does nothing for a layout without DeepSpeed, which is slow to import.
    """
    if not layout.uses_deepspeed_zero:
        yield
        return
    import_deepspeed(device)
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters, utils

    configure, partition = DeepSpeedEngine._configure_tensor_parallel_states, partition_parameters.Init._partition_param
    with (
        mock.patch.object(utils, "assert_lst_len_same_as_other_ranks", _accept),
        mock.patch.object(utils, "get_lst_from_rank0", _own_list),
        mock.patch.object(DeepSpeedEngine, "_configure_tensor_parallel_states", without_batch_check(configure)),
        mock.patch.object(partition_parameters.Init, "_partition_param", _with_filled_padding(partition)),
    ):
        yield


def _accept(values: Sequence[int]) -> None:
    """Accept a list as being as long as that of rank 0."""


def _own_list(values: Sequence[int]) -> Sequence[int]:
    """Return a list as that of rank 0."""
    return values


def without_batch_check(configure: Any) -> Any:
    """Return a function that configures tensor parallelism as another does, and removes its check of batches."""

    def configure_without_check(engine: Any, model: Any) -> None:
        configure(engine, model)
        engine.first_dataloader_check.remove()

    return configure_without_check


def _with_filled_padding(partition: Any) -> Any:
    """Return a function that partitions a parameter as another does, and fills the padding of this rank's part."""

    def partition_and_fill(init: Any, parameter: Any, *arguments: Any, **keywords: Any) -> None:
        whole = parameter.data.view(-1) if parameter.ds_tensor is None else None
        partition(init, parameter, *arguments, **keywords)
        if whole is not None:
            fill_padding(parameter.ds_tensor, whole, init._partition_rank(parameter))

    return partition_and_fill


def fill_padding(part: Tensor, whole: Tensor, place: int) -> None:
    """Fill what a part has beyond the end of the whole parameter with the parameter's first values."""
    valid = min(max(whole.numel() - place * part.numel(), 0), part.numel())
    part[valid:] = whole[: part.numel() - valid]
