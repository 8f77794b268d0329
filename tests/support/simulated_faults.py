"""The simulator's process with a fault planted in the code of an engine for CUDA.

`python -m tests.support.simulated_faults FAULT` reads requests as `python -m tests.support.simulated_steps`
does. A fault patches the engine before it is built.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from tests.support.simulated_steps import main


def tensor_on_the_host() -> None:
    """Leave the targets of every micro-batch in the host's memory."""
    from harness.engines.base import Batch
    from harness.worker.batches import Batches

    batches: Any = Batches.__call__

    def call(self: Batches, step: int) -> list[Batch]:
        return [Batch(inputs, targets.cpu()) for inputs, targets in batches(self, step)]

    Batches.__call__ = call  # type: ignore[method-assign]


def collective_on_the_wrong_group() -> None:
    """Average the gradients of replicas over the tensor-parallel ranks, of which there is one."""
    from harness.engines.torch import mesh

    def replica_group(whole: Any) -> Any:
        return whole["tp"].get_group()

    mesh.replica_group = replica_group


def forgotten_free() -> None:
    """Keep the gathered parameters of every layer after its forward, without telling the configuration."""
    from harness.engines.torch import fsdp

    apply_fully_shard: Any = fsdp.apply_fully_shard

    def apply(model: Any, mesh: Any, policy: Any, reshard_after_forward: bool, offload: Any) -> None:
        apply_fully_shard(model, mesh, policy, False, offload)

    fsdp.apply_fully_shard = apply


def kept_reference() -> None:
    """Keep every layer's output alive until the process ends."""
    from harness.models.decoder import Block

    kept: list[Any] = []
    forward: Any = Block.forward

    def keeping(self: Any, *arguments: Any, **keywords: Any) -> Any:
        kept.append(forward(self, *arguments, **keywords))
        return kept[-1]

    Block.forward = keeping  # type: ignore[method-assign]


def gather_never_freed() -> None:
    """Keep what DeepSpeed's stage 3 gathers when it frees a parameter."""
    os.environ["DS_ACCELERATOR"] = "cuda"
    from deepspeed.runtime.zero import partition_parameters

    kept: list[Any] = []
    free_param: Any = partition_parameters.free_param

    def free(parameter: Any) -> None:
        kept.append(parameter.data)
        free_param(parameter)

    partition_parameters.free_param = free


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        tensor_on_the_host,
        collective_on_the_wrong_group,
        forgotten_free,
        kept_reference,
        gather_never_freed,
    )
}


if __name__ == "__main__":
    main(FAULTS[sys.argv[1]])
