"""TODO harness.models.loss."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens, in fp32; logits (batch, seq, vocab), targets (batch, seq)."""
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_of(module: nn.Module, inputs: Tensor, targets: Tensor, chunks: int) -> Tensor:
    """The mean loss of a model, however wrapped, over a micro-batch; in parts inside the model if there are several."""
    loss: Tensor = module(inputs, targets) if chunks > 1 else loss_function(module(inputs), targets)
    return loss
