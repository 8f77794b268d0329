"""The simulator's process with torchtitan's policy of selective checkpointing, which saves every second product.

torchtitan (torchtitan/parallelisms/parallelize_llama.py, _apply_ac_to_transformer_block, December 2024) counts the
matrix products of a layer's forward, saves those with odd numbers and attention's results, and recomputes the rest.
`python -m tests.support.torchtitan_checkpointing` reads requests from standard input.
"""

import os
import sys
from collections import Counter
from typing import Any

from harness.simulator.__main__ import simulate_requests


def save_every_second_product() -> None:
    """Replace the policy of selective checkpointing."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    from harness.models import activation_checkpoint

    def contexts(_: Any) -> Any:
        counts: Counter[bool] = Counter()  # of products, by whether forward is recomputed

        def policy(context: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
            is_product = operator == torch.ops.aten.mm.default
            counts[context.is_recompute] += is_product
            is_saved = operator in activation_checkpoint.SAVED_OPS
            if is_saved and not (is_product and counts[context.is_recompute] % 2 == 0):
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    activation_checkpoint.create_selective_checkpoint_contexts = contexts


if __name__ == "__main__":
    simulate_requests(save_every_second_product)
    sys.stdout.flush()
    os._exit(0)
