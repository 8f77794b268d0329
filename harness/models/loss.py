"""The loss of every model: mean cross-entropy over the tokens."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the tokens, in fp32; logits (batch, seq, vocab), targets (batch, seq)."""
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_of(module: nn.Module, inputs: Tensor, targets: Tensor, chunks: int) -> Tensor:
    """Return a wrapped or plain model's mean loss over a micro-batch; with `chunks` the model computes it in parts."""
    loss: Tensor = module(inputs, targets) if chunks > 1 else loss_function(module(inputs), targets)
    return loss
