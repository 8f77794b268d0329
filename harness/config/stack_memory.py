"""What an implementation of training allocates, as data: the memory side of a stack. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from harness.config.validation import require, require_one_of

# Which engine's memory a stack has: `harness` is this project's own, which the exact model predicts from the widths and
# the layout, `replicated` keeps weights whole beside sharded or whole optimizer state, and `flat_units` is FSDP1, whose
# flat parameter of each layer is sharded at rest and gathered for use.
MemoryKind = Literal["harness", "replicated", "flat_units"]
# How layers are spread over pipeline stages: evenly, by their parameters as this project does, or by their products'
# FLOPs with the head's, as nanotron does.
StageBalance = Literal["layers", "parameters", "products"]


@dataclass(frozen=True)
class StackMemory:
    """The tensors that an implementation allocates where implementations differ."""

    kind: MemoryKind = "replicated"  # The engine's kind: harness, replicated or flat_units.
    # The ZeRO stages that the implementation has, and whether it divides matrices, layers or sequences too.
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    has_model_parallelism: bool = True
    # State. The width of weights, and of masters where they are kept apart, follows from the precision.
    # Whether a buffer of all parameters' gradients, as wide as they are accumulated, lives from step to step.
    keeps_main_gradients: bool = True
    # Whether the gradients of a backward, in the width of compute, exist for all parameters before they are added to
    # that buffer; otherwise each is added when it is computed.
    holds_backward_gradients: bool = False
    # The bytes per parameter of the buckets in which replicas without a sharded optimizer reduce gradients.
    reduce_bucket_bytes: int = 0
    # Whether gradients stay allocated after the optimizer's step, where nothing accumulates them from step to step.
    keeps_gradients_at_rest: bool = False
    # The copies of the parameters, in the optimizer's width, that its step makes; foreach operators make one.
    optimizer_copies: int = 0
    vocabulary_multiple: int = 1  # The vocabulary is padded to a multiple of this times tp; 1 means it is not.
    balance: StageBalance = "layers"  # How layers are spread over pipeline stages: layers, parameters or products.
    # Activations that a layer keeps for backward.
    # Whether sequence parallelism keeps the inputs of matrices as shards and gathers them again in backward.
    gathers_inputs_again: bool = True
    # The tensors of intermediate_size that a gated MLP keeps: gate, up, product, and the activation unless it is fused.
    gated_mlp_tensors: int = 4
    plain_mlp_tensors: int = 2  # The tensors of intermediate_size that an MLP without a gate keeps.
    # The tensors as wide as its input that an RMSNorm of plain operations keeps beside its input and its output.
    rms_norm_copies: int = 0
    # The tensors as wide as queries that attention keeps beside queries, keys, values and its result.
    attention_copies: int = 0
    scores_bytes: int = 2  # The bytes per element of the softmax that eager attention keeps.
    # Head and loss.
    # The copies of the logits in the width of compute, and in fp32, at the worst moment of the loss.
    narrow_logits: int = 1
    fp32_logits: int = 1
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
    # The share of activations and temporaries by which torch's allocator holds more than is allocated. It is fitted.
    fragmentation: float = 0.0
    # The range of measured over predicted peak bytes in published measurements of this stack, 94 of 100 rows inside;
    # null means that there are none.
    measured_over_predicted: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        require_one_of("stack.memory.kind", self.kind, ("harness", "replicated", "flat_units"))
        require_one_of("stack.memory.balance", self.balance, ("layers", "parameters", "products"))
        for key in (
            "reduce_bucket_bytes",
            "optimizer_copies",
            "attention_copies",
            "fp32_logits",
        ):
            value = getattr(self, key)
            require(value >= 0, f"stack.memory.{key}", value, "is negative: choose 0 or more")
        rule = "is not a positive number: choose 1 or more"
        require(self.vocabulary_multiple >= 1, "stack.memory.vocabulary_multiple", self.vocabulary_multiple, rule)
