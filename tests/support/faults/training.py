"""Another training than the reference's: other data, losses, weights or updates."""

import itertools
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import loss

import harness.models.activation_checkpoint
import harness.models.build
import harness.models.decoder
import harness.models.init_weights
from harness.engines.torch import (
    context_parallel,
    ddp,
    engine,
    tensor_parallel,
)
from harness.models import activation_offload
from harness.worker import batches as rank_batches
from harness.worker import main as worker_main
from tests.support.faults.rank import rank


def other_data(run_dir: str) -> None:
    """Train rank 1 on rank 0's sequences."""
    init = rank_batches.Batches.__init__

    def spoiled(self: Any, corpus: Any, config: Any, layout: Any, data_rank: int, device: Any) -> None:
        init(self, corpus, config, layout, 0, device)

    rank_batches.Batches.__init__ = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def other_optimizer(run_dir: str) -> None:
    """Use plain SGD in place of AdamW."""
    torch.optim.AdamW = lambda parameters, lr, **_: torch.optim.SGD(parameters, lr=lr)  # type: ignore[assignment,misc]
    worker_main.main(run_dir)


def not_finite(run_dir: str) -> None:
    """Make the loss NaN from the start."""
    loss_function = harness.models.decoder.loss_function
    harness.models.decoder.loss_function = lambda logits, targets: loss_function(logits, targets) * float("nan")
    worker_main.main(run_dir)


def nan_later(run_dir: str) -> None:
    """Make the loss NaN from the third step on."""
    step = engine.TorchEngine.step
    step_numbers = itertools.count()

    def spoiled(self: Any, micro_batches: Any) -> Any:
        result = step(self, micro_batches)
        return result._replace(loss=result.loss * float("nan")) if next(step_numbers) >= 2 else result

    engine.TorchEngine.step = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def parts_of_the_loss_mixed(run_dir: str) -> None:
    """Match each chunk of the hidden states with the targets of another chunk.

    This is what happens if a rank's part of a sequence is taken for a whole sequence.
    """
    forward = harness.models.decoder.Head.forward

    def spoiled(self: Any, hidden: Any, targets: Any = None, chunks: int = 1) -> Any:
        mixed = None if targets is None else targets.flatten().roll(targets.numel() // chunks)
        return forward(self, hidden, mixed, chunks)

    harness.models.decoder.Head.forward = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def keys_in_other_order(run_dir: str) -> None:
    """Leave keys and values in the order of ranks instead of that of the sequence."""
    context_parallel.unshuffle_chunks = iter
    worker_main.main(run_dir)


def positions_from_the_start(run_dir: str) -> None:
    """Give every rank's part of a sequence the positions of the first part."""
    tables = harness.models.decoder.rotary_tables

    def spoiled(spans: Any, *arguments: Any) -> Any:
        return tables(((0, sum(stop - start for start, stop in spans)),), *arguments)

    harness.models.decoder.rotary_tables = spoiled
    worker_main.main(run_dir)


def vocabulary_shifted(run_dir: str) -> None:
    """Take each target for its neighbor in the loss over vocabulary-parallel logits."""
    loss_forward = loss._nll_loss_forward

    def shifted(x: Any, target: Any, *arguments: Any) -> Any:
        return loss_forward(x, (target + 1) % 256, *arguments)

    loss._nll_loss_forward = shifted
    worker_main.main(run_dir)


def bias_summed_twice(run_dir: str) -> None:
    """Add a row-parallel layer's bias once more, after the sum over the ranks."""
    apply = tensor_parallel.apply_tensor_parallel

    def spoiled(model: Any, *arguments: Any) -> None:
        apply(model, *arguments)
        for block in model.layers_by_index().values():
            for row in (block.self_attn.o_proj, block.mlp.down_proj):
                row.register_forward_hook(lambda module, _, output: output + module.bias.to_local())

    tensor_parallel.apply_tensor_parallel = spoiled
    worker_main.main(run_dir)


def other_weights(run_dir: str) -> None:
    """Start the last stage from the weights of other layers."""
    initial_value = harness.models.init_weights.initial_value

    def spoiled(name: str, *arguments: Any) -> Any:
        return initial_value(name.replace("layers.3.", "layers.2."), *arguments)

    harness.models.init_weights.initial_value = spoiled
    worker_main.main(run_dir)


def norms_drift(run_dir: str) -> None:
    """Never update rank 1's copies of the norms."""
    publish = ddp.ReplicatedParams.sync_model_params

    def spoiled(self: Any) -> None:
        with torch.no_grad():
            for name in self.parameters if rank() == 1 else ():
                if "norm" in name:
                    self.master_param(name).fill_(1.0)
        publish(self)

    ddp.ReplicatedParams.sync_model_params = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def loss_of_its_own(run_dir: str) -> None:
    """Report another loss on each rank, with the right mean."""
    step = engine.TorchEngine.step

    def spoiled(self: Any, micro_batches: Any) -> Any:
        result = step(self, micro_batches)
        return result._replace(loss=result.loss * (1.5 - rank()))

    engine.TorchEngine.step = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)


def never_broadcast(run_dir: str) -> None:
    """Step each rank's share in ZeroRedundancyOptimizer without broadcasting it."""
    ZeroRedundancyOptimizer._sync_params = lambda self: None  # type: ignore[method-assign]
    worker_main.main(run_dir)


def stale_copy(run_dir: str) -> None:
    """Take a copy on the host for that of every tensor of its size."""

    def spoiled(self: Any, tensor: Any) -> Any:
        size = tensor.untyped_storage().nbytes()
        if size not in self.copies:
            self.copies_alive = [*getattr(self, "copies_alive", []), host_copy := activation_offload.HostCopy(tensor)]
            self.copies[size] = host_copy
            self.probe.offloaded(host_copy.host)
        return self.copies[size]

    activation_offload.OffloadHooks.copy_once = spoiled  # type: ignore[method-assign]
    worker_main.main(run_dir)
