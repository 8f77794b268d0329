"""The configuration of a stack: what differs between implementations that train the same layout. Imports no torch.

Only the planner reads it, and it is no part of a run's identity.
"""

from dataclasses import dataclass
from typing import Literal

import yaml

from harness.config.from_dict import AtLeastOne, Natural, NotNegative, from_dict, one_of
from harness.config.locations import files_in
from harness.config.optimizer import ADAMW


@dataclass(frozen=True)
class StackMemory:
    """The tensors that an implementation allocates where implementations differ."""

    # Which engine's memory: harness is this project's own, which the exact model predicts from the widths and the
    # layout, replicated keeps weights whole beside sharded or whole optimizer state, and flat_units is FSDP1, whose
    # flat parameter of each layer is sharded at rest and gathered for use.
    kind: Literal["harness", "replicated", "flat_units"] = "replicated"
    # The ZeRO stages that the implementation has, and whether it divides matrices, layers or sequences too.
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    has_model_parallelism: bool = True
    # Whether a search also offers context parallelism by exchanging heads (Ulysses); all others gather keys.
    exchanges_heads: bool = False
    # State. The width of weights, and of masters where they are kept apart, follows from the precision.
    # Whether a buffer of all parameters' gradients, as wide as they are accumulated, lives from step to step.
    keeps_main_gradients: bool = True
    # Whether the gradients of a backward, in the width of compute, exist for all parameters before they are added to
    # that buffer; otherwise each is added when it is computed.
    holds_backward_gradients: bool = False
    # The bytes per parameter of the buckets in which replicas without a sharded optimizer reduce gradients.
    reduce_bucket_bytes: Natural = 0
    # Whether gradients stay allocated after the optimizer's step, where nothing accumulates them from step to step.
    keeps_gradients_at_rest: bool = False
    # The copies of the parameters, in the optimizer's width, that its step makes; foreach operators make one.
    optimizer_copies: Natural = 0
    # The vocabulary is padded to a multiple of this times tp; 1 means it is not.
    vocabulary_multiple: AtLeastOne = 1
    # How layers are spread over pipeline stages: evenly, by their parameters as this project does, or by their
    # products' FLOPs with the head's, as nanotron does.
    balance: Literal["layers", "parameters", "products"] = "layers"
    # Activations that a layer keeps for backward.
    # Whether sequence parallelism keeps the inputs of matrices as shards and gathers them again in backward.
    gathers_inputs_again: bool = True
    # The tensors of intermediate_size that a gated MLP keeps: gate, up, product, and the activation unless it is fused.
    gated_mlp_tensors: int = 4
    plain_mlp_tensors: int = 2  # The tensors of intermediate_size that an MLP without a gate keeps.
    # The tensors as wide as its input that an RMSNorm of plain operations keeps beside its input and its output.
    rms_norm_copies: int = 0
    # The tensors as wide as queries that attention keeps beside queries, keys, values and its result.
    attention_copies: Natural = 0
    scores_bytes: int = 2  # The bytes per element of the softmax that eager attention keeps.
    # Head and loss.
    # The copies of the logits in the width of compute, and in fp32, at the worst moment of the loss.
    narrow_logits: int = 1
    fp32_logits: Natural = 1
    loss_chunk_tokens: int = 0  # The tokens that head and loss compute at once; 0 means all of a micro-batch.
    # Buffers.
    # The tensors of the residual stream, of each pipeline stage of a rank, that live from step to step: what the last
    # micro-batch received, and its gradient.
    pipeline_tensors_at_rest: int = 0
    tp_gather_buffers: int = 0  # The persistent buffers for gathered inputs and gradients of sequence parallelism.
    prefetched_units: int = 1  # The flat parameters that are gathered ahead of the one in use.
    cublas_handles: int = 2  # The threads that multiply matrices, each with a workspace: of forward and of backward.
    cublas_workspace_bytes: int | None = None  # The bytes of one such workspace; null means torch's default.
    # The bytes of a workspace of the layers' own library, before and from compute capability 9.
    library_workspace_bytes: tuple[int, int] = (0, 0)
    # The tensors of the whole residual stream, in each layer of a forward with sequence parallelism, that collectives
    # read and that the allocator cannot use again before the host has seen their end.
    collective_tensors: int = 0
    # The share of activations and temporaries by which torch's allocator holds more than is allocated; for the stack
    # harness, of all that does not rest between steps. It is fitted.
    fragmentation: float = 0.0
    # The same for the stack harness where ZeRO's stage 3 gathers each layer for its use; the factor by which either is
    # rarely exceeded; and the share that the allocator at most cannot give back to a device that is full.
    gathering_fragmentation: float = 0.0
    most_over_usual: float = 1.0
    lasting_fragmentation: float = 0.0
    # The range of measured over predicted peak bytes in published measurements of this stack, 94 of 100 rows inside;
    # null means that there are none.
    measured_over_predicted: tuple[float, float] | None = None
    # The same of mixtures of experts, whose peaks depend on where routers send tokens.
    mixtures_over_predicted: tuple[float, float] | None = None


@dataclass(frozen=True)
class StackTiming:
    """The choices of an implementation that decide the time of a step."""

    # Whether gradients are sent while backward still runs, those of the last micro-batch if they are sent once a step.
    overlaps_gradient_reduction: bool = True
    # Whether updated parameters are gathered while the next forward already runs; otherwise before it.
    overlaps_parameter_gather: bool = False
    # Time of the host for each rank's slice of each parameter, where ZeRO gathers into a list of slices and copies one
    # after the other into its parameter; 0 where one flat buffer is gathered.
    shard_slice_seconds: NotNegative = 0.0
    # Whether gathered parameters of the next layer arrive while a layer computes, in ZeRO's stage 3.
    prefetches_parameters: bool = True
    # Whether FSDP gathers the parameters of stage 2, and replicas sum gradients, in every micro-batch; otherwise once a
    # step. In a pipeline such a stack has both once a step, and keeps whole gradients until then.
    repeats_in_micro_batches: bool = False
    # Whether backward gathers the inputs of column-parallel matrices again, with sequence parallelism.
    gathers_inputs_again: bool = False
    # Whether the gradient of a column-parallel matrix's input is summed while that of its weight is computed.
    overlaps_input_gradient: bool = False
    # When attention runs by cuDNN's kernel on devices where that is the faster one: whatever the layout, or not under
    # context parallelism.
    cudnn_attention: Literal["never", "without_cp", "always"] = "never"
    skips_masked_scores: bool = True  # Whether the fused attention kernel skips the half that the causal mask hides.
    # The memory traffic of kernels between matrix products in units of one read and one write for each operator, as
    # torch runs them without a compiler.
    elementwise_traffic: NotNegative = 1.0
    logit_bytes: NotNegative = 28.0  # Bytes read and written by the loss for each logit, in forward and backward.
    # Kernels of a decoder layer, in forward and backward. What else the host does for each, such as views, counts as
    # launches that take as long.
    kernels_per_layer: Natural = 90
    # Time in which a device at least waits for its host in both passes of a layer, and beside the layers in those of a
    # stage for a micro-batch.
    layer_seconds: NotNegative = 0.0
    micro_batch_seconds: NotNegative = 0.0
    # What the host does beside a layer's own kernels, in launches that take as long, on a CPU, where it was measured:
    # to gather or reduce a layer's parameters in stage 3, or a parameter of an engine that gathers them one by one; in
    # a layer that tensor-parallel ranks divide; and in a micro-batch outside its layers.
    layer_gather_launches: Natural = 0
    parameter_gather_launches: Natural = 0
    divided_layer_launches: Natural = 0
    micro_batch_launches: Natural = 0
    # The same to reduce a parameter's gradient in DeepSpeed's stages 1 and 2, on a CPU and on a GPU alike.
    parameter_reduce_launches: Natural = 0
    # Time of the host for one tensor-parallel collective, beside a kernel's.
    collective_launch_seconds: NotNegative = 1.0e-4
    # The same for each rank of the collective, and in a pipeline, where a stage's host waits for its neighbors. Two
    # stacks that were fitted apart have nearly the same.
    collective_seconds_per_rank: NotNegative = 8.0e-6
    pipelined_collective_seconds_per_rank: NotNegative = 0.0
    # Time of one step of a ring between nodes beside the hardware's, such as that of processes that wait for others.
    inter_node_step_seconds: NotNegative = 0.0
    blocking_transfers: bool = False  # Whether a stage waits for its transfers instead of computing meanwhile.
    # Bytes that the update reads and writes for each parameter, masters included.
    optimizer_bytes: NotNegative = ADAMW.update_bytes
    step_seconds: NotNegative = 0.0  # Time of a step beside everything else.
    measured_on: tuple[str, ...] = ()  # The clusters on which published steps of this stack were measured.


@dataclass(frozen=True)
class StackConfig:
    """An implementation of distributed training, described by what its source says it allocates and overlaps."""

    name: str  # The name of the stack.
    source: str  # The repository, version and files that the values are from.
    memory: StackMemory = StackMemory()
    timing: StackTiming = StackTiming()


def load_stack(name: str) -> StackConfig:
    """Return the stack of this name as its file in conf/stack has it. Raises UserError if there is none."""
    files = files_in("stack")
    one_of(*files)(name, "stack")
    return from_dict(StackConfig, yaml.safe_load(files[name].read_text()), "stack")
