"""Another training than the reference's, and steps of other operations, kernels or schedules than configured."""

import itertools
from collections import Counter
from typing import Any

import torch

from harness.config.schema import CheckpointingConfig
from harness.engines.torch import pipeline_parallel
from harness.models.activation_offload import HostCopy
from harness.worker import main as worker_main
from tests.support.plant import changed, rank, replaces

TORCH, DECODER, BUILD = "harness.engines.torch", "harness.models.decoder", "harness.models.build"

# --- data, losses, weights and updates


@replaces("harness.worker.batches.Batches.__init__")
def other_data(ordinary: Any, self: Any, corpus: Any, config: Any, layout: Any, data_rank: int, device: Any) -> None:
    """Train rank 1 on rank 0's sequences."""
    ordinary(self, corpus, config, layout, 0, device)


@replaces("torch.optim.AdamW")
def other_optimizer(_: Any, parameters: Any, lr: float, **__: Any) -> Any:
    """Use plain SGD in place of AdamW."""
    return torch.optim.SGD(parameters, lr=lr)


@replaces("torch.optim.AdamW")
def without_decay(ordinary: Any, parameters: Any, **settings: Any) -> Any:
    """Leave weight decay out of the optimizer."""
    return ordinary(parameters, **settings | {"weight_decay": 0.0})


@replaces("torch.optim.AdamW")
def vectors_learn_faster(ordinary: Any, groups: Any, **settings: Any) -> Any:
    """Give vectors, which are the last parameters of the first group, a rate of their own."""
    optimizer = ordinary(groups, **settings)
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 2 * settings["lr"]})
    return optimizer


@replaces("torch.optim.AdamW")
def rate_doubled_later(ordinary: Any, parameters: Any, **settings: Any) -> Any:
    """Double the learning rate before the third step."""
    optimizer, steps = ordinary(parameters, **settings), itertools.count()

    def double(*_: Any) -> None:
        if next(steps) == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 2

    optimizer.register_step_pre_hook(double)
    return optimizer


@replaces("torch.optim.AdamW")
def decay_undone(ordinary: Any, parameters: Any, **settings: Any) -> Any:
    """Undo the weight decay after each step of an optimizer that has it among its settings."""
    optimizer = ordinary(parameters, **settings)

    @torch.no_grad()
    def undo(*_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 + settings["lr"] * settings["weight_decay"])

    optimizer.register_step_post_hook(undo)
    return optimizer


@replaces("torch.optim.AdamW", of_rank=1)
def matrix_left_out_once(ordinary: Any, parameters: Any, **settings: Any) -> Any:
    """Leave rank 1's first parameter out of the third step."""
    optimizer, steps = ordinary(parameters, **settings), itertools.count()

    def leave_out(*_: Any) -> None:
        if next(steps) == 2:
            optimizer.param_groups[0]["params"][0].grad = None

    optimizer.register_step_pre_hook(leave_out)
    return optimizer


FORWARDS: Counter[int] = Counter()  # of this rank's linear layers


@replaces("torch.nn.Linear.forward", of_rank=1)
def gradient_left_out_once(ordinary: Any, self: Any, values: Any) -> Any:
    """Leave rank 1's part of the gradients of the first layer's seven matrices out of the fifth micro-batch."""
    FORWARDS[id(self)] += 1
    if FORWARDS[id(self)] != 5 or id(self) not in itertools.islice(FORWARDS, 7):
        return ordinary(self, values)
    weight = self.weight.view_as(self.weight)
    weight.register_hook(torch.zeros_like)
    return torch.nn.functional.linear(values, weight, self.bias)


@replaces(f"{DECODER}.loss_function")
def not_finite(ordinary: Any, *arguments: Any) -> Any:
    """Make the loss NaN from the start."""
    return ordinary(*arguments) * float("nan")


@replaces(f"{DECODER}.Head.forward")
def parts_of_the_loss_mixed(ordinary: Any, self: Any, hidden: Any, targets: Any = None, chunks: int = 1) -> Any:
    """Match each chunk of the hidden states with the targets of another chunk.

    This is what happens if a rank's part of a sequence is taken for a whole sequence.
    """
    mixed = None if targets is None else targets.flatten().roll(targets.numel() // chunks)
    return ordinary(self, hidden, mixed, chunks)


@replaces(f"{TORCH}.context_parallel.unshuffle_chunks")
def keys_in_other_order(_: Any, gathered: Any) -> Any:
    """Leave keys and values in the order of ranks instead of that of the sequence."""
    return iter(gathered)


@replaces(f"{TORCH}.ulysses.gather_heads")
def heads_in_other_order(ordinary: Any, heads: Any, group: Any) -> Any:
    """Put the heads of the second rank in the place of the first rank's, and so on."""
    return ordinary(heads, group).roll(heads.shape[1], dims=1)


@replaces(f"{DECODER}.rotary_tables")
def positions_from_the_start(ordinary: Any, spans: Any, *arguments: Any) -> Any:
    """Give every rank's part of a sequence the positions of the first part."""
    return ordinary(((0, sum(stop - start for start, stop in spans)),), *arguments)


@replaces("torch.distributed.tensor.parallel.loss._nll_loss_forward")
def vocabulary_shifted(ordinary: Any, logits: Any, target: Any, *arguments: Any) -> Any:
    """Take each target for its neighbor in the loss over vocabulary-parallel logits."""
    return ordinary(logits, (target + 1) % 256, *arguments)


@replaces(f"{TORCH}.tensor_parallel.apply_tensor_parallel")
def bias_summed_twice(ordinary: Any, model: Any, *arguments: Any) -> None:
    """Add a row-parallel layer's bias once more, after the sum over the ranks."""
    ordinary(model, *arguments)
    for block in model.layers_by_index().values():
        for row in (block.self_attn.o_proj, block.mlp.down_proj):
            row.register_forward_hook(lambda module, _, output: output + module.bias.to_local())


@replaces("harness.models.init_weights.initial_value")
def other_weights(ordinary: Any, name: str, *arguments: Any) -> Any:
    """Start the last stage from the weights of other layers."""
    return ordinary(name.replace("layers.3.", "layers.2."), *arguments)


@replaces(f"{TORCH}.ddp.ReplicatedParams.sync_model_params", of_rank=1)
def norms_drift(ordinary: Any, self: Any) -> None:
    """Never update rank 1's copies of the norms."""
    with torch.no_grad():
        for name in (name for name in self.parameters if "norm" in name):
            self.master_param(name).fill_(1.0)
    ordinary(self)


@replaces(f"{TORCH}.engine.TorchEngine.step")
def loss_of_its_own(ordinary: Any, *arguments: Any) -> Any:
    """Report another loss on each rank, with the right mean."""
    result = ordinary(*arguments)
    return result._replace(loss=result.loss * (1.5 - rank()))


@replaces("torch.distributed.optim.ZeroRedundancyOptimizer._sync_params")
def never_broadcast(*_: Any) -> None:
    """Step each rank's share in ZeroRedundancyOptimizer without broadcasting it."""


@replaces("harness.models.activation_offload.OffloadHooks.copy_once")
def stale_copy(_: Any, self: Any, tensor: Any) -> Any:
    """Take a copy on the host for that of every tensor of its size."""
    size = tensor.untyped_storage().nbytes()
    if size not in self.copies:
        host_copy = HostCopy(tensor, None, self.layer, self.before)
        self.copies_alive = [*getattr(self, "copies_alive", []), host_copy]
        self.copies[size] = host_copy
        self.probe.offloaded(host_copy.host)
    return self.copies[size]


# --- operations, kernels, schedules and the log of memory


@replaces(f"{BUILD}.apply_checkpointing")
def never_recomputed(*_: Any) -> None:
    """Leave out checkpointing."""


@replaces(f"{BUILD}.apply_checkpointing")
def every_layer_recomputed(ordinary: Any, model: Any, checkpointing: Any, probe: Any) -> None:
    """Checkpoint every layer, whatever is configured."""
    ordinary(model, CheckpointingConfig("full"), probe)


@replaces("harness.config.schema.CheckpointingConfig.saves_product")
def products_not_kept(*_: Any) -> bool:
    """Make selective checkpointing keep attention alone, so that every projection runs again."""
    return False


@replaces("harness.config.schema.CheckpointingConfig.saves_product")
def every_product_kept(*_: Any) -> bool:
    """Make selective checkpointing keep the products that are to run again."""
    return True


@replaces(f"{BUILD}.apply_loss_chunks")
def parts_of_the_loss_kept(ordinary: Any, model: Any, *arguments: Any) -> None:
    """Keep every chunk's logits while the loss goes through its tokens in chunks."""
    ordinary(model, *arguments)
    del model.lm_head.chunk_loss


@replaces("harness.models.decoder.Attention.__init__", of_rank=1)
def eager_on_one_rank(ordinary: Any, self: Any, *arguments: Any) -> None:
    """Compose rank 1's attention of plain operators."""
    ordinary(self, *arguments)
    self.eager = True


@replaces("harness.models.decoder.Attention.__init__")
def fused_attention(ordinary: Any, self: Any, *arguments: Any) -> None:
    """Compute attention by the fused kernel, whatever is configured."""
    ordinary(self, *arguments)
    self.eager = False


@replaces("torch.optim.AdamW")
def other_kernel_of_the_optimizer(ordinary: Any, parameters: Any, **keywords: Any) -> Any:
    """Use the fused optimizer, whatever is configured."""
    return ordinary(parameters, **(keywords | {"fused": True, "foreach": False}))


@replaces(f"{BUILD}.apply_compile")
def never_compiled(*_: Any) -> None:
    """Leave the layers uncompiled."""


@replaces("harness.records.heartbeat.HeartbeatWriter.__call__")
def compiled_again(ordinary: Any, self: Any, phase: str, *arguments: Any) -> None:
    """Throw away the compiled code in the first timed step."""
    ordinary(self, phase, *arguments)
    if phase == "timed":
        torch.compiler.reset()


def other_schedule(run_dir: str) -> None:
    """Run GPipe in place of 1F1B, which trains the same but keeps every micro-batch."""
    pipeline_parallel.SCHEDULES["1f1b"] = pipeline_parallel.ScheduleGPipe
    worker_main.main(run_dir)


STAGE = f"{TORCH}.pipeline_parallel.PipelineStage"


@replaces(f"{STAGE}.backward_one_chunk", f"{STAGE}.backward_weight_one_chunk")
def weights_not_put_off(ordinary: Any, self: Any, chunk: int, *others: Any) -> None:
    """Compute the weights' gradients in zero bubble's backward for inputs as well."""
    if ordinary.__name__ == "backward_one_chunk":
        loss, _, last_backward = others
        ordinary(self, chunk, loss, True, last_backward)


@replaces(f"{STAGE}.set_local_fwd_input")
def halved_at_the_turn(ordinary: Any, self: Any, output: Any, chunk: int) -> None:
    """Pass on half of the hidden states where two stages of a rank are neighbors."""
    ordinary(self, output * 0.5, chunk)


@replaces("harness.models.decoder.Block.forward")
def layer_twice(ordinary: Any, *arguments: Any, **keywords: Any) -> Any:
    """Run every layer a second time in forward for nothing; losses and gradients are right."""
    return twice(ordinary, *arguments, **keywords)


@replaces("harness.models.hf_library.build_hf_model")
def layer_of_library_twice(ordinary: Any, *arguments: Any) -> Any:
    """Run every layer of a library's model a second time in forward, for nothing."""
    built = ordinary(*arguments)
    for block in built.layers_by_index().values():
        block.forward = changed(twice, block.forward)
    return built


def twice(forward: Any, *arguments: Any, **keywords: Any) -> Any:
    with torch.no_grad():
        forward(*arguments, **keywords)
    return forward(*arguments, **keywords)


@replaces("harness.measure.allocation_logger.CpuAllocationLog.end")
def block_unlogged(ordinary: Any, self: Any) -> Any:
    """Leave one of the blocks alive at the peak out of the memory log."""
    log = ordinary(self)
    log.bytes[int(log.bytes[: self.initial_count].argmax())] = 1
    return log
