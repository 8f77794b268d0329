"""Fingerprints of tensors and sums of squares: shards of any form add up to the whole, whatever the size of a chunk."""

import math
import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config.model import ModelConfig
from harness.measure import gradient_fingerprint
from harness.measure.gradient_fingerprint import Fingerprinter
from harness.models.init_weights import initial_value
from harness.records.rank_report import Box
from harness.tensors.fp32_sums import PIECE, sums_of_squares
from harness.tensors.shard import Shard
from tests.support.commands import compose_config

CPU = torch.device("cpu")

NAME = "layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return compose_config().model


@pytest.fixture
def fingerprinter(model: ModelConfig) -> Fingerprinter:
    return Fingerprinter(model, 0, CPU)


def shard_of(whole: Tensor, box: Box | None = None) -> Shard:
    """Return the shard of a tensor that a box describes: of its dimensions, of the flattened tensor, or all."""
    box = box or tuple((0, size) for size in whole.shape)
    flat = len(box) < whole.dim()
    view = whole.reshape(-1) if flat else whole
    return Shard(NAME, view[tuple(slice(*pair) for pair in box)], tuple(view.shape), box)


def cuts(size: int, count: int, chance: random.Random) -> list[tuple[int, int]]:
    edges = [0, *sorted(chance.choices(range(size + 1), k=count - 1)), size]
    return list(pairwise(edges))


def layouts(shape: tuple[int, ...]) -> Iterator[list[Box]]:
    """Yield partitions of a tensor: by one dimension, by two, and of the flattened tensor; some shards are empty."""
    chance = random.Random(0)
    whole = tuple((0, size) for size in shape)
    for dim, size in enumerate(shape):
        yield [(*whole[:dim], cut, *whole[dim + 1 :]) for cut in cuts(size, 3, chance)]
    if len(shape) > 1:
        yield [
            (first, second, *whole[2:]) for first in cuts(shape[0], 2, chance) for second in cuts(shape[1], 2, chance)
        ]
    numel = int(np.prod(shape))
    yield from [[(cut,) for cut in cuts(numel, count, chance)] for count in (2, 5, 40)]


@pytest.mark.parametrize("shape", [(96, 64), (7, 1), (1, 9), (50,), (4, 6, 8)], ids=str)
def test_shards_of_every_layout_add_up_to_the_whole(fingerprinter: Fingerprinter, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    whole = fingerprinter.fingerprint(shard_of(tensor), shape)
    assert whole.square == pytest.approx(float(tensor.double().square().sum()), rel=1e-12)
    for boxes in layouts(shape):
        shards = [fingerprinter.fingerprint(shard_of(tensor, box), shape) for box in boxes]
        square, projection = (sum(getattr(shard, name) or 0 for shard in shards) for name in ("square", "projection"))
        assert square == pytest.approx(whole.square, rel=1e-12)
        assert projection == pytest.approx(whole.projection, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("chunk", [1, 100, 2**12, 2**24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_do_not_depend_on_the_chunk(
    fingerprinter: Fingerprinter, monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: torch.dtype
) -> None:
    tensor = torch.randn(120, 70, dtype=dtype)
    shards = [shard_of(tensor, ((0, 120), (3, 60))), shard_of(tensor, ((11, 8000),))]
    before = tensor.clone()
    expected = [fingerprinter.fingerprint(shard, (120, 70)) for shard in shards]
    monkeypatch.setattr(gradient_fingerprint, "CHUNK_ELEMENTS", {"cpu": chunk})
    for shard, (*_, square, projection) in zip(shards, expected, strict=True):
        chunked = fingerprinter.fingerprint(shard, (120, 70))
        assert chunked.square == pytest.approx(square, rel=1e-14)
        assert chunked.projection == pytest.approx(projection, rel=1e-12)
    assert torch.equal(tensor, before)  # computed on copies


def test_projections_have_the_variance_of_the_norm_and_see_every_change(model: ModelConfig) -> None:
    """Over many seeds the mean square of the projection is the squared norm; no seed misses two swapped rows."""
    tensor = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    swapped = tensor[[1, 0, *range(2, 40)]]
    squares, changes = [], []
    for seed in range(600):
        projections = [
            Fingerprinter(model, seed, CPU).fingerprint(shard_of(values), (40, 30)).projection or 0
            for values in (tensor, swapped)
        ]
        squares.append(projections[0] ** 2)
        changes.append(abs(projections[0] - projections[1]) / float((tensor - swapped).norm()))
    assert np.mean(squares) == pytest.approx(float(tensor.square().sum()), rel=0.25)
    assert min(changes) > 1e-6 and np.median(changes) > 0.3


def test_names_and_seeds_have_numbers_of_their_own(model: ModelConfig) -> None:
    shard = shard_of(torch.ones(20, 10))
    other = shard._replace(name="another")
    results = {
        Fingerprinter(model, seed, CPU).fingerprint(each, (20, 10)) for seed in (0, 1) for each in (shard, other)
    }
    assert len({result.projection for result in results}) == 4 and {result.square for result in results} == {200.0}


def test_an_update_is_the_difference_from_the_initial_value(fingerprinter: Fingerprinter, model: ModelConfig) -> None:
    shape = (model.hidden_size, model.hidden_size)
    change = torch.randn(shape)
    updated = initial_value(NAME, torch.Size(shape), model, 0, CPU) + change

    class Engine:
        def local_shards(self, kind: str) -> list[Shard]:
            boxes: list[Box] = [((0, 40), (0, shape[1])), ((40 * shape[1], updated.numel()),)]
            return [shard_of(updated, box) for box in boxes] if kind == "parameters" else []

    expected = fingerprinter.fingerprint(shard_of(change), shape)
    pairs = fingerprinter.changed(Engine())  # type: ignore[arg-type]
    parts = [fingerprinter.fingerprint(shard, shape, initial) for shard, initial in pairs]
    assert sum(part.square or 0 for part in parts) == pytest.approx(expected.square, rel=1e-6)
    assert sum(part.projection or 0 for part in parts) == pytest.approx(expected.projection, rel=1e-5)


TOLERANCE = 5e-6


@pytest.mark.parametrize("numel", [1, PIECE - 1, PIECE, PIECE + 1, 10**6 + 3, 10**7, 10**8])
@pytest.mark.parametrize("values", ["normal", "constant"])
def test_a_norm_is_accurate_at_any_size(numel: int, values: str) -> None:
    tensor = torch.full((numel,), 0.1)
    if values == "normal":
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    exact = math.fsum(float(part.double().square().sum()) for part in tensor.split(10**7))
    assert abs(float(sums_of_squares([tensor])) / exact - 1) < TOLERANCE


def test_the_norm_of_a_gradient_of_any_shape_and_type_counts_every_element_once() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((), (3, 5), (70, 61), (1, 2, 3, 4))]
    tensors += [torch.randn(40, 200, generator=generator).T, torch.randn(5000, generator=generator).bfloat16()]
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert abs(float(sums_of_squares(tensors).sum()) / exact - 1) < TOLERANCE
