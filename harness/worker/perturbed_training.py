"""The second training of a reference, which differs from its first in rounding only, and so shows what rounding does.

Nothing else can tell which deviations are honest: how far apart two trainings of the same model come grows with its
width and depth, the learning rate and the number of steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config.schema import RunConfig
from harness.engines.base import Batch, Engine
from harness.measure.gradient_fingerprint import Fingerprinter, GradientFingerprints
from harness.measure.memory import DeviceMemory
from harness.models.float8 import is_scaled
from harness.probe import Probe
from harness.records.rank_report import TrainingReport
from harness.worker.train_loop import FirstUpdate, StepResults

aten = torch.ops.aten

PLAIN = (Tensor, torch.nn.Parameter)  # neither a DTensor nor a fake tensor


class DividedSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which the sums that a layout may divide are divided: in products of matrices and over tokens.

    Tensor parallelism divides the sums in the outputs of row-parallel layers and in the input gradients of
    column-parallel ones, and every division of the tokens those in the gradients of weights: partial results are
    rounded to the dtype of the compute and then summed. So are the sums over tokens in the gradients of a LayerNorm and
    of an embedding, which have kernels of their own.
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator, divided if it sums over a dimension of plain tensors that a layout may divide.

        A product of float8 matrices is that of the values that they stand for.
        """
        if func is aten.mm.default and all(map(is_scaled, args)):
            return product_of_halves(*(each.to_original_precision().to(each.dtype) for each in args))
        if kwargs or not all(type(value) in PLAIN for value in args if isinstance(value, Tensor)):
            return func(*args, **(kwargs or {}))
        if func is aten.mm.default and args[0].shape[1] > 1:
            return product_of_halves(*args)
        if func is aten.addmm.default and args[1].shape[1] > 1:
            return product_of_halves(args[1], args[2]) + args[0]
        if func is aten.native_layer_norm_backward.default:
            return divided_layer_norm_backward(*args)
        if func is aten.embedding_dense_backward.default and args[1].numel() > 1:
            return divided_embedding_backward(*args)
        return func(*args)


def product_of_halves(left: Tensor, right: Tensor) -> Tensor:
    """Return left (m, k) times right (k, n) as the sum of the products of their halves along k."""
    middle = left.shape[1] // 2
    product = torch.mm(left[:, :middle], right[:middle])
    return product.add_(torch.mm(left[:, middle:], right[middle:]))


def divided_layer_norm_backward(
    gradient: Tensor, values: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, *others: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a LayerNorm's input, weight and bias as the sums of those of two halves of the tokens."""
    backward = aten.native_layer_norm_backward.default
    of_tokens = (gradient.reshape(-1, *shape), values.reshape(-1, *shape), mean.reshape(-1, 1), rstd.reshape(-1, 1))
    pairs = [value.tensor_split(2) for value in of_tokens]
    halves = [backward(g, v, shape, m, r, *others) for g, v, m, r in zip(*pairs, strict=True)]
    inputs, weights, biases = zip(*halves, strict=True)
    whole = None if inputs[0] is None else torch.cat(inputs).view_as(values)
    return whole, *(None if first is None else first + second for first, second in (weights, biases))


def divided_embedding_backward(gradient: Tensor, indices: Tensor, *others: Any) -> Tensor:
    """Return the gradient of an embedding (tokens, hidden) as the sum of those of two halves of the tokens."""
    backward = aten.embedding_dense_backward.default
    halves = zip(gradient.flatten(0, -2).tensor_split(2), indices.flatten().tensor_split(2), strict=True)
    first, second = (backward(*half, *others) for half in halves)
    return first.add_(second)  # type: ignore[no-any-return]


def divide_blocks(engine: Engine) -> None:
    """Let the states of few bits that share a scale do so in blocks half as long.

    A layout's shards draw blocks elsewhere, and are too small for some.
    """
    for optimizer in getattr(engine, "optimizers", ()):
        if block := getattr(optimizer, "block_size", 0):
            optimizer.block_size = block // 2


def train_perturbed(
    engine: Engine,
    probe: Probe,
    batches: Callable[[int], Sequence[Batch]],
    config: RunConfig,
    memory: DeviceMemory,
    progress: Callable[[str, int], None],
) -> TrainingReport:
    """Train as many steps as the first training did, without measuring anything, and return the evidence of it.

    The micro-batches come in reversed order, so that their gradients are summed in another order, and every product
    and sum over tokens is divided. `engine` is a new one with the initial weights.
    """
    train = config.train
    divide_blocks(engine)
    fingerprinter = Fingerprinter(config.model, train.seed, memory.device)
    first_update = FirstUpdate(engine, probe, fingerprinter, memory, config)
    last = GradientFingerprints(fingerprinter)
    results = StepResults(train.total_steps, memory.device)
    for index in range(train.total_steps):
        progress("perturbed", index)
        watch = probe.listen(last) if index == train.profiled_step else first_update.watch(index)
        with watch, DividedSums():  # type: ignore[no-untyped-call]
            results.keep(index, engine.step([*reversed(batches(index))]))
    return TrainingReport(
        **results.report(),
        skipped_steps=engine.skipped_steps,
        **first_update.report(),
        last_gradients=last.fingerprints,
    )
