"""Fingerprints of gradients and updates that tell two trainings apart even where losses agree.

The loss alone proves little: AdamW hides the scale of gradients, so that doubled gradients do not change it. Every
parameter's gradient is reduced to its squared norm and its dot product with a random tensor that follows from the seed
and the parameter's name. Both are sums over elements, so the ranks' shards add up to the whole in any layout.

The random tensor is the outer product of two vectors of normal numbers, one over rows and one over columns. Its dot
product with a matrix M has the variance |M|^2, as that with independent numbers has, and no rank needs to draw more
numbers than a matrix has rows and columns.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.config.model import ModelConfig
from harness.layout.model_profile import model_profile
from harness.layout.state_widths import StateKind
from harness.models.init_weights import initial_value
from harness.models.quantized import as_stored
from harness.probe import Listener, ShardSource
from harness.records.rank_report import TensorFingerprint
from harness.tensors.shard import Shard
from harness.tensors.storage import plain_values

# The most elements that are in memory as fp64 at a time. A CPU's cache has room for its number, which makes it four
# times as fast as with the other; a GPU needs few launches.
CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}


@dataclass(frozen=True)
class Fingerprinter:
    """The way in which all fingerprints of a run are computed: in fp64, on the run's device wherever a shard lies."""

    model: ModelConfig
    seed: int
    device: torch.device

    def state(
        self, engine: ShardSource, kind: StateKind, state_names: Collection[str] | None = None
    ) -> list[TensorFingerprint]:
        """Return the fingerprints of this rank's shards of one kind of state, or of those of some optimizer states."""
        shards = (
            shard for shard in engine.local_shards(kind) if state_names is None or shard.state_name in state_names
        )
        return [self.fingerprint(shard, self.shape(shard)) for shard in shards]

    def shape(self, shard: Shard) -> tuple[int, ...]:
        """Return the shape of the parameter that a shard belongs to."""
        return model_profile(self.model).parameter_shapes.get(shard.name, shard.shape)

    def changed(self, engine: ShardSource) -> Iterator[tuple[Shard, Tensor]]:
        """Yield this rank's shards of what the optimizer updates, each with its initial values.

        These are masters where there are any, because parameters of 16 bits lose most of a small update. Frozen
        parameters have none. One initial value as large as a whole parameter is in memory at a time.
        """
        masters = [shard for shard in engine.local_shards("optimizer") if shard.state_name == "master"]
        parameters = (shard for shard in engine.local_shards("parameters") if not shard.state_name)
        for shard in masters + [each for each in parameters if not (masters and self.model.adapter.trains(each.name))]:
            shape = torch.Size(self.shape(shard))
            initial = initial_value(shard.name, shape, self.model, self.seed, self.device).view(shard.shape)
            part = initial[tuple(slice(start, stop) for start, stop in shard.box)]
            yield shard, as_stored(part, shard.local, self.model.adapter.double_quant)

    @torch.no_grad()
    def fingerprint(self, shard: Shard, shape: tuple[int, ...], subtracted: Tensor | None = None) -> TensorFingerprint:
        """Return the fingerprint of a shard of a parameter of this shape, or of its difference from another tensor.

        No more than a chunk of it is in memory as fp64 at a time.
        """
        random = self._random_factors(shard.name, shape)
        parts = list(_matrices(plain_values(shard.local).detach(), shard, shape, random))
        others = parts if subtracted is None else list(_matrices(subtracted, shard, shape, random))
        square = projection = 0.0
        for part, other in zip(parts, others, strict=True):
            part_square, part_projection = self._sums(part, None if subtracted is None else other.values)
            square, projection = square + part_square, projection + part_projection
        return TensorFingerprint(shard.name, tuple(shard.shape), shard.box, square, projection)

    def _random_factors(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the numbers of all rows, in the shape of all dimensions but the last, and those of the columns.

        They are drawn on the host, so that all devices have the same, and are no tensors of torch's allocator there. A
        vector is one row, whose number is 1.
        """
        digest = hashlib.sha256(f"{self.seed}/projection/{name}".encode()).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        columns = generator.standard_normal(shape[-1])
        rows = generator.standard_normal(shape[:-1]) if len(shape) > 1 else np.ones(())
        return torch.from_numpy(rows).to(self.device), torch.from_numpy(columns).to(self.device)

    def _sums(self, part: "_MatrixPart", subtracted: Tensor | None) -> tuple[float, float]:
        """Return the sum of squares of a matrix, and the sum of its elements times the numbers of row and column."""
        rows, columns = part.values.shape
        step = min(rows, max(1, CHUNK_ELEMENTS[self.device.type] // columns))
        buffer = torch.empty(step, columns, dtype=torch.float64, device=self.device)
        squares, products = torch.empty(2, rows, dtype=torch.float64, device=self.device)
        for start in range(0, rows, step):
            chunk = slice(start, start + step)
            values = buffer[: len(part.values[chunk])].copy_(part.values[chunk])
            if subtracted is not None:
                values -= subtracted[chunk]
            torch.mv(values, part.column_factors, out=products[chunk])
            torch.sum(values.square_(), dim=1, out=squares[chunk])
        return float(squares.sum()), float(products.dot(part.row_factors))


class _MatrixPart(NamedTuple):
    """A part of a shard as a matrix, and the random numbers of its rows and columns."""

    values: Tensor
    row_factors: Tensor
    column_factors: Tensor


def _matrices(
    local: Tensor, shard: Shard, shape: tuple[int, ...], random: tuple[Tensor, Tensor]
) -> Iterator[_MatrixPart]:
    """Yield the values of a shard as matrices, none if it is empty.

    A part of the flattened tensor begins and ends within a row, so that it is up to three matrices.
    """
    row_factors, column_factors = random
    if not local.numel():
        return
    if len(shard.box) == len(shape):
        sizes = [stop - start for start, stop in shard.box]
        *leading, last = (slice(start, stop) for start, stop in shard.box)
        values = local.reshape(sizes).reshape(-1, sizes[-1])
        yield _MatrixPart(values, row_factors[tuple(leading)].reshape(-1), column_factors[last])
        return
    (first, stop), width = shard.box[0], shape[-1]
    start, values = first, local.reshape(-1)
    while start < stop:
        row, column = divmod(start, width)
        rows = 1 if column or stop - start < width else (stop - start) // width
        end = min(stop, (row + rows) * width)
        matrix = values[start - first : end - first].view(rows, -1)
        factors = row_factors.reshape(-1)[row : row + rows]
        yield _MatrixPart(matrix, factors, column_factors[column : column + matrix.shape[1]])
        start = end


class GradientFingerprints(Listener):
    """A listener that takes fingerprints when gradients are ready.

    `uncounted` is entered meanwhile, because the memory that they need is not the step's.
    """

    def __init__(
        self, fingerprinter: Fingerprinter, uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.fingerprinter = fingerprinter
        self.uncounted = uncounted
        self.fingerprints: list[TensorFingerprint] = []

    def gradients_ready(self, engine: ShardSource) -> None:
        """Take the fingerprints of this rank's gradients."""
        with self.uncounted():
            self.fingerprints = self.fingerprinter.state(engine, "gradients")
