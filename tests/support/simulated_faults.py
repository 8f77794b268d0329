"""The simulator's process with a fault planted in the code of an engine for CUDA.

`python -m tests.support.simulated_faults FAULT` reads requests as `python -m tests.support.simulated_steps` does. A
fault is planted before the engine is built.
"""

import functools
import os
import sys
from typing import Any

from tests.support.plant import plant
from tests.support.simulated_steps import main

TORCH, FSDP2 = "harness.engines.torch", "torch.distributed.fsdp._fully_shard"

OFFLOAD = "harness.models.activation_offload"
STAGE_3 = "deepspeed.runtime.zero.partitioned_param_coordinator"


def tensor_on_the_host(batches: Any, self: Any, step: int) -> Any:
    """Leave the targets of every micro-batch in the host's memory."""
    return [batch._replace(targets=batch.targets.cpu()) for batch in batches(self, step)]


def collective_on_the_wrong_group(_: Any, whole: Any) -> Any:
    """Average the gradients of replicas over the tensor-parallel ranks, of which there is one."""
    return whole["tp"].get_group()


def forgotten_free(apply: Any, model: Any, mesh: Any, policy: Any, reshard_after_forward: bool, *others: Any) -> None:
    """Keep the gathered parameters of every layer after its forward, without telling the configuration."""
    apply(model, mesh, policy, False, *others)


alive: list[Any] = []


def kept_reference(forward: Any, *arguments: Any, **keywords: Any) -> Any:
    """Keep every layer's output alive until the process ends."""
    alive.append(forward(*arguments, **keywords))
    return alive[-1]


def gather_never_freed(free: Any, parameter: Any) -> None:
    """Keep what DeepSpeed's stage 3 gathers when it frees a parameter."""
    alive.append(parameter.data)
    free(parameter)


def last_layer_not_offloaded(wrap: Any, hooks: Any, block: Any, forward: Any, *arguments: Any) -> Any:
    """Leave on the device what the last of four layers saves for backward."""
    hooks.calls = getattr(hooks, "calls", 0) + 1
    return forward(*arguments) if hooks.calls % 4 == 0 else wrap(hooks, block, forward, *arguments)


def offloaded_never_freed(release: Any, host_copy: Any) -> None:
    """Keep on the device what has been copied to the host."""
    alive.append(host_copy.leaving)
    release(host_copy)


def unquantized_gathers(build: Any, *arguments: Any, **keywords: Any) -> None:
    """Gather parameters in the width of compute, without telling the configuration."""
    build(*arguments, **keywords | {"zero_quantized_weights": False})


def unexchanged_gradients(groups: Any) -> None:
    """Reduce gradients as they are, as DeepSpeed does without groups for their exchange."""


def forgotten_wait(copy_out: Any, result: Any, *arguments: Any, **keywords: Any) -> Any:
    """Let FSDP2 use gathered parameters without waiting for the stream that gathers them."""
    return copy_out(result._replace(all_gather_event=None), *arguments, **keywords)


@functools.cache
def every_other_rank(size: int) -> Any:
    """Return a new group of so many ranks, as far apart in the world as they can be."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return dist.new_group(range(0, dist.get_world_size(), dist.get_world_size() // size))


def wrong_group(gather: Any, *arguments: Any, group: Any, **keywords: Any) -> Any:
    """Let FSDP2 gather parameters among every other rank of the world instead of those of a node."""
    return gather(*arguments, group=every_other_rank(group.size()), **keywords)


operators = [0, 0]  # how many ran so far: others, and views


def always_asked(add_operator: Any, recorder: Any, name: str, started: int, is_view: bool) -> bool:
    """Have gradients sampled after every operator, as no fault but what is slow; fail where a view allocates."""
    operators[is_view] += 1
    if is_view and recorder.position() != started:
        raise AssertionError(f"{name} is no view: it allocated or freed memory")
    if sum(operators) == 600 and operators[1] < 0.4 * 600:
        raise AssertionError(f"{operators[1]} of 600 operators are views, so that most may allocate")
    add_operator(recorder, name, started, False)
    return True


FAULTS = {
    "always_asked": (always_asked, "harness.measure.memory_ownership.OwnershipRecorder.add_operator"),
    "tensor_on_the_host": (tensor_on_the_host, "harness.worker.batches.Batches.__call__"),
    "collective_on_the_wrong_group": (collective_on_the_wrong_group, f"{TORCH}.mesh.replica_group"),
    "forgotten_free": (forgotten_free, f"{TORCH}.fsdp.apply_fully_shard"),
    "kept_reference": (kept_reference, "harness.models.decoder.Block.forward"),
    "gather_never_freed": (gather_never_freed, "deepspeed.runtime.zero.partition_parameters.free_param"),
    "last_layer_not_offloaded": (last_layer_not_offloaded, f"{OFFLOAD}.OffloadHooks.wrap_forward"),
    "offloaded_never_freed": (offloaded_never_freed, f"{OFFLOAD}.HostCopy.release"),
    "unquantized_gathers": (unquantized_gathers, f"{STAGE_3}.PartitionedParameterCoordinator.__init__"),
    "unexchanged_gradients": (unexchanged_gradients, "deepspeed.utils.groups._get_local_all_to_all_group"),
    "forgotten_wait": (forgotten_wait, f"{FSDP2}._fsdp_param_group.foreach_all_gather_copy_out"),
    "wrong_group": (wrong_group, f"{FSDP2}._fsdp_collectives.DefaultAllGather.__call__"),
}


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cuda"  # for a fault in DeepSpeed, which is imported to plant it
    main(functools.partial(plant, *FAULTS[sys.argv[1]]))
