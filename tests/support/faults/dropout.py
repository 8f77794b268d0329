"""Dropout whose masks are missing, have other zeros than configured, or are alike or apart where they must not be."""

import itertools
from typing import Any

import torch

from tests.support.plant import rank, replaces

TORCH = "harness.engines.torch"


@replaces("torch.nn.functional.dropout")
def too_much_dropped(ordinary: Any, values: Any, probability: float, *others: Any) -> Any:
    """Drop a tenth more than configured."""
    return ordinary(values, 1.1 * probability, *others)


BRANCHES = itertools.count()  # of this rank's layers, in the order of their forwards


@replaces("harness.models.decoder.Block.dropout_residual")
def outputs_of_mlps_not_dropped(ordinary: Any, self: Any, branch: Any) -> Any:
    """Leave dropout out behind the MLP, which is a layer's second branch."""
    return branch if next(BRANCHES) % 2 else ordinary(self, branch)


@replaces("harness.models.decoder.Decoder.embed")
def embeddings_dropped_apart(ordinary: Any, *arguments: Any) -> Any:
    """Drop other elements of the embedding on each rank, and the same ones of all that follows."""
    following = torch.get_rng_state()
    torch.manual_seed(rank())
    hidden = ordinary(*arguments)
    torch.set_rng_state(following)
    return hidden


@replaces("harness.worker.main.dropout_seed")
def masks_of_their_own(_: Any, seed: int, layout: Any, number: int) -> int:
    """Drop different parts of the residual stream that tensor-parallel ranks share."""
    return seed + number


@replaces(f"{TORCH}.tensor_parallel.apply_tensor_parallel")
def heads_drop_alike(ordinary: Any, model: Any, *arguments: Any) -> None:
    """Drop the same elements of attention on tensor-parallel ranks, which have different heads."""
    ordinary(model, *arguments)
    for block in model.layers_by_index().values():
        block.self_attn.dropout_rng_rank = None


@replaces("harness.worker.main.dropout_seed")
def masks_alike(_: Any, seed: int, *__: Any) -> int:
    """Use the same dropout masks on ranks with different data."""
    return seed


@replaces("harness.worker.main.train")
def evaluated(ordinary: Any, report: Any, engine: Any, *arguments: Any) -> Any:
    """Train the model in the mode in which dropout does nothing."""
    engine.model.eval()
    return ordinary(report, engine, *arguments)


@replaces("harness.models.activation_checkpoint.checkpoint")
def other_masks_recomputed(ordinary: Any, *arguments: Any, **settings: Any) -> Any:
    """Draw new masks in second forwards."""
    return ordinary(*arguments, **settings | {"preserve_rng_state": False})
