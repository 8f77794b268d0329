"""The only module of the harness that exported scripts import; its names are stable.

A script that `harness export` wrote trains the run's own model on the run's own data until its user replaces both. For
that it needs these names; each is documented where it is defined:

- read_run_spec(run_folder): the run's configuration, layout and corpus.
- Batches(corpus, config, layout, rank, device): called with a step, the rank's micro-batches of that step.
- build_model(model_config, stage=None): the model, or one pipeline stage of it, on the meta device.
- base_model(model_config): the model without the adapters that its configuration has, on the meta device.
- stages_of_rank(model_config, layout, rank): the pipeline stages of a rank.
- materialize(model, model_config, seed, device, dtype, storage_device=None, trained_dtype=None): fills the model with
  its initial values, and leaves parameters that are filled already.
- materialize_partitioned(model, config, deepspeed_config, device, dtype): the same for DeepSpeed's stage 3, where each
  parameter is partitioned before the next is computed.
- initial_value(name, shape, model_config, seed, device): the initial value of one whole parameter, in fp32.
- loss_function(logits, targets): the mean cross-entropy over the tokens.

And for what is this project's own and no call of a library:

- ReplicatedParams(parts, config, device, wrap=None): has fp32 masters with the values of parts of a model, which it
  narrows to 16 bit and fills unless they are. Into the masters gradients are summed and reduced. Its modules are the
  parts as `wrap` returns them. sync_context(last, part) is entered around backward, master_param(name) is what the
  optimizer updates, sync_model_params() follows the update, and collect_grads(part) the second half of a backward in
  two halves.
- apply_context_parallel(model, group, sequence_chunks): attention over the keys and values of all ranks of a group.
- exchange_heads(model, group): attention over whole sequences, of which each rank of a group computes some heads.
- VocabularyParallelEmbedding(output): the parallel style of an embedding whose gradient is sharded as its table is.
- SequenceParallelPositions(): the parallel style of a table of learned positions under sequence parallelism.
- VocabularyParallelHead(input_layouts, use_local_output): the parallel style of a head that may return the loss itself.
- shard_experts(model, mesh): each rank has a part of the experts along the axis ep, and of each expert along tp.
- PartialExperts(output): the parallel style of a mixture of experts of which each rank has a part of every expert.
- exchange_tokens(model, group): experts compute the tokens of all ranks of a group, of which each has some experts.
- hsdp_mesh(mesh, layout): the mesh for fully_shard of the ranks that share state.
- replica_group(mesh): the ranks that have copies.
- DividedExperts(copies, ranks): how ReplicatedParams.reduce_experts() averages the gradients of divided experts.
- average_over(experts, ranks, is_sharded): the same for experts that are sharded by fully_shard.
- offload_activations(model): what decoder layers save for backward lies in the host's memory.
- selective_contexts(checkpointing): the contexts of checkpoint() for selective checkpointing under DeepSpeed's stage 3.
- reduce_gradients(part): reduces the gradients of a sharded part that a backward for weights alone has left.

Scripts that were exported before continue to work when other modules of the harness change.
"""

from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig
from harness.engines.deepspeed.initialize import materialize_partitioned
from harness.engines.torch.context_parallel import apply_context_parallel
from harness.engines.torch.ddp import DividedExperts, ReplicatedParams
from harness.engines.torch.expert_parallel import exchange_tokens, shard_experts
from harness.engines.torch.fsdp import FSDPParams, average_over
from harness.engines.torch.mesh import hsdp_mesh, replica_group
from harness.engines.torch.tensor_parallel import (
    PartialExperts,
    SequenceParallelPositions,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)
from harness.engines.torch.ulysses import exchange_heads
from harness.layout.partition import stages_of_rank, whole_model
from harness.models import activation_offload
from harness.models.activation_checkpoint import SAVED_OPS, SavedOperatorsMode
from harness.models.build import build_model
from harness.models.decoder import Decoder, loss_function
from harness.models.init_weights import initial_value, materialize
from harness.probe import Probe
from harness.records.run_folder import read_run_spec
from harness.worker.batches import Batches

__all__ = [
    "Batches",
    "DividedExperts",
    "PartialExperts",
    "ReplicatedParams",
    "SequenceParallelPositions",
    "VocabularyParallelEmbedding",
    "VocabularyParallelHead",
    "apply_context_parallel",
    "average_over",
    "base_model",
    "build_model",
    "exchange_heads",
    "exchange_tokens",
    "hsdp_mesh",
    "initial_value",
    "loss_function",
    "materialize",
    "materialize_partitioned",
    "offload_activations",
    "read_run_spec",
    "reduce_gradients",
    "replica_group",
    "selective_contexts",
    "shard_experts",
    "stages_of_rank",
]


def base_model(model: ModelConfig) -> Decoder:
    """Return the model on the meta device without the adapters of its configuration, which scripts add by peft."""
    with torch.device("meta"):
        return Decoder(model, whole_model(model))


def offload_activations(model: Decoder) -> None:
    """Move what decoder layers save for backward to the host, in place; see harness.models.activation_offload."""
    activation_offload.offload_activations(model, Probe())


def selective_contexts(checkpointing: CheckpointingConfig) -> tuple[Any, ...]:
    """Return the contexts of a layer's two forwards of which torch counts only operators whose results are saved."""
    contexts = create_selective_checkpoint_contexts(list(SAVED_OPS))  # type: ignore[no-untyped-call]
    return tuple(SavedOperatorsMode(context, checkpointing) for context in contexts)


def reduce_gradients(part: Decoder) -> None:
    """Reduce the gradients of a backward for weights alone, in which fully_shard's hooks on inputs do not run."""
    FSDPParams([part], zero_stage=0).collect_grads()
