"""Dropout masks that agree or differ between the wrong ranks."""

from typing import Any

from harness.engines.torch import (
    tensor_parallel,
)
from harness.worker import main as worker_main


def masks_of_their_own(run_dir: str) -> None:
    """Drop different parts of the residual stream that tensor-parallel ranks share."""
    worker_main.dropout_seed = lambda seed, layout, number: seed + number
    worker_main.main(run_dir)


def heads_drop_alike(run_dir: str) -> None:
    """Drop the same elements of attention on tensor-parallel ranks, which have different heads."""
    apply = tensor_parallel.apply_tensor_parallel

    def spoiled(model: Any, *arguments: Any) -> None:
        apply(model, *arguments)
        for block in model.layers_by_index().values():
            block.self_attn.dropout_rng_rank = None

    tensor_parallel.apply_tensor_parallel = spoiled
    worker_main.main(run_dir)


def masks_alike(run_dir: str) -> None:
    """Use the same dropout masks on ranks with different data."""
    worker_main.dropout_seed = lambda seed, layout, number: seed
    worker_main.main(run_dir)
