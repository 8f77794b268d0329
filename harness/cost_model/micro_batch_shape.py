"""The shape of one micro-batch on one rank, the bytes of its tensors, and how torch computes its operators."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from harness.config.model import ModelConfig, TracedLayer
from harness.config.optimizer import DTYPE_BYTES
from harness.config.schema import Device, RunConfig
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile

FP32_BYTES, INT64_BYTES = 4, 8


@dataclass(frozen=True, eq=False)
class MicroBatchShape:
    """One micro-batch on its way through decoder layers, and how tensor and context parallelism divide its tensors.

    micro_batch_shape() returns one object for all equal shapes, so that caches find it by its identity.
    """

    model: ModelConfig
    sequences: int
    seq_len: int
    compute_dtype: str  # torch's name of it
    device: Device = "cpu"
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    loss_chunks: int = 1
    vocabulary_parallel: bool = True
    accumulate_bytes: int = FP32_BYTES  # of an element of the gradients' sum over micro-batches
    ep: int = 1
    saves_all_inputs: bool = (
        False  # whether a frozen matrix keeps its input too, as DeepSpeed's own linear function does
    )
    exchanges_heads: bool = False  # whether context parallelism divides attention by heads
    recipe: str = "none"  # by which projections multiply fewer than 16 bits
    is_compiled: bool = False  # whether a compiler fuses the casts to them
    casts_weights: bool = True  # where they are multiplied, and not where they are gathered

    @property
    def key_ranks(self) -> int:
        """The number of ranks whose keys and values each attention gathers."""
        return 1 if self.exchanges_heads else self.cp

    @property
    def vocabulary_tp(self) -> int:
        """The number of parts into which embedding and head are cut."""
        return self.tp if self.vocabulary_parallel else 1

    @cached_property
    def heads_tp(self) -> int:
        """The number of parts into which attention's heads are divided; 1 where every rank has all of them."""
        return self.tp if "heads" in model_profile(self.model).cut_tensors else 1

    @cached_property
    def inner_tp(self) -> int:
        """The number of parts into which the MLP's inner size is divided."""
        return self.tp if "inner" in model_profile(self.model).cut_tensors else 1

    @cached_property
    def logits_tp(self) -> int:
        """The number of parts into which the logits that a loss takes are divided; 1 where they are gathered."""
        return self.vocabulary_tp if "logits" in model_profile(self.model).cut_tensors else 1

    @cached_property
    def width(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.compute_dtype]

    @cached_property
    def tokens(self) -> int:
        """Tokens of this rank's part of the sequences."""
        return self.sequences * self.seq_len // self.cp

    @cached_property
    def residual_tokens(self) -> int:
        """Tokens whose norms and residual stream this rank computes."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes of this rank's part of the residual stream."""
        return self.residual_tokens * self.model.hidden_size * self.width

    @cached_property
    def whole_hidden_bytes(self) -> int:
        """Bytes of the hidden states of all of the rank's tokens, gathered if they are divided."""
        return self.tokens * self.model.hidden_size * self.width

    @cached_property
    def query_bytes(self) -> int:
        """Bytes of the queries' heads."""
        return self.tokens * self.model.attention_width * self.width // self.heads_tp

    @cached_property
    def key_bytes(self) -> int:
        """Bytes of the keys' heads before any are repeated or gathered."""
        return self.query_bytes * self.model.num_key_value_heads // self.model.num_attention_heads

    @cached_property
    def core_key_bytes(self) -> int:
        """Bytes of the keys' heads that attention takes: of all ranks, or of so many heads that ranks divide them."""
        heads = self.model.num_key_value_heads // self.heads_tp
        return self.key_bytes * math.lcm(heads, self.cp) // heads if self.exchanges_heads else self.key_bytes * self.cp

    @cached_property
    def inner_bytes(self) -> int:
        """Bytes of one tensor of the MLP's inner size, of all of its experts if it has some."""
        return (self.routed_rows or self.tokens) * self.model.intermediate_size * self.width // self.inner_tp

    @cached_property
    def shared_inner_bytes(self) -> int:
        """Bytes of one tensor of the inner size of the MLP that computes every token beside its experts."""
        return self.tokens * self.model.shared_expert_intermediate_size * self.width // self.inner_tp

    @cached_property
    def routed_rows(self) -> int:
        """Rows of this rank's tokens that experts compute: one for each expert of a token; 0 without experts."""
        return self.tokens * self.model.num_experts_per_tok

    @cached_property
    def routed_bytes(self) -> int:
        """Bytes of the hidden states of these rows."""
        return self.routed_rows * self.model.hidden_size * self.width

    @cached_property
    def expert_sum_bytes(self) -> int:
        """Bytes of the experts' outputs, of their copy in another order, and of their sums, when forward has these.

        Those of experts that compute every token exist by then.
        Ranks that divide the experts sum single rows, to send them back, and still have the rows that they sent and
        received.
        """
        sums = 3 * self.routed_bytes if self.ep > 1 else self.whole_hidden_bytes
        shared = self.whole_hidden_bytes * (self.model.shared_expert_intermediate_size > 0)
        return (2 * self.routed_bytes + sums + shared) * (self.routed_rows > 0)

    @cached_property
    def scores_of_experts_bytes(self) -> int:
        """Bytes of a router's scores of all experts for every token, in fp32."""
        return self.tokens * self.model.num_experts * FP32_BYTES

    def tensor_bytes(self, name: str) -> int:
        """Return the bytes of a tensor of a branch, by its name in the family's table of operators."""
        sizes = {"query": self.query_bytes, "output": self.query_bytes, "key": self.key_bytes, "value": self.key_bytes}
        sizes |= {"routed": self.routed_bytes, "outputs": self.routed_bytes}
        return sizes.get(name, self.shared_inner_bytes if name.startswith("shared_") else self.inner_bytes)

    @cached_property
    def logits_bytes(self) -> int:
        """Bytes of this rank's part of the fp32 logits of those tokens that go through the loss at once."""
        vocabulary = math.ceil(self.model.vocab_size / self.logits_tp)
        return self.tokens // self.loss_chunks * vocabulary * FP32_BYTES

    @cached_property
    def norm_is_decomposed(self) -> bool:
        """Whether the norm is plain operations in fp32, as torch's is on a CPU and a library's own everywhere."""
        return (self.device == "cpu" or self.model.hf_info is not None) and self.model.architecture.norm == "rms"

    @cached_property
    def norm_gradient_bytes(self) -> int:
        """Bytes of the gradient of a norm's output, as wide as the norm computes."""
        width = FP32_BYTES if self.norm_is_decomposed else self.width
        return self.residual_tokens * self.model.hidden_size * width

    @cached_property
    def norm_backward_bytes(self) -> int:
        """Bytes of gradients at the worst moment of a norm's backward.

        They are the gradients of its output and its input and, where the norm is decomposed, of three operations
        between.
        """
        return (5 if self.norm_is_decomposed else 2) * self.norm_gradient_bytes

    @cached_property
    def input_grad_reduction_bytes(self) -> int:
        """Bytes of a matrix's input's gradient while tensor-parallel ranks sum it, its sum included.

        With sequence parallelism its parts are copied one after another along the first dimension, and scattered.
        """
        parts = self.whole_hidden_bytes * (1 + self.sequence_parallel)
        return parts + self.hidden_bytes if self.tp > 1 else parts

    @cached_property
    def attention_is_decomposed(self) -> bool:
        """Whether scaled_dot_product_attention runs plain operations in fp32: a CPU's fused kernel takes no dropout."""
        return self.model.attention == "flash" and self.device == "cpu" and self.model.dropout > 0

    @cached_property
    def score_width(self) -> int:
        """Bytes per element of attention's scores as products make them; 0 for a fused kernel, which stores none."""
        return FP32_BYTES if self.attention_is_decomposed else self.width * (self.model.attention == "eager")

    @cached_property
    def repeats_grouped_heads(self) -> bool:
        """Whether keys and values are repeated for every head: CUDA has no fused kernel for grouped heads in fp32."""
        is_grouped = self.model.num_key_value_heads < self.model.num_attention_heads
        return is_grouped and self.model.attention == "flash" and self.device == "cuda" and self.width == FP32_BYTES

    def traced_layer(self, checkpointing: str) -> TracedLayer | None:
        """Return a layer's memory by the trace of a library's model; None where it has none of such a layer.

        It is a whole layer's, without other ranks, of a CPU, which has no fused kernel with dropout.
        """
        if self.model.hf_info is None or (self.device != "cpu" and self.model.dropout > 0):
            return None
        return self.model.hf_info.traced_layers.get(f"{self.width} {checkpointing}")

    @cached_property
    def without_tp(self) -> "MicroBatchShape":
        """The same micro-batch on a rank that has all of every tensor."""
        return replace(self, tp=1)

    def mask_width(self, width: int) -> int:
        """Return the bytes per element of a dropout's mask: a CPU multiplies by it in the width of what it drops."""
        return width if self.device == "cpu" else 1

    @cached_property
    def dropout_mask_bytes(self) -> int:
        """Bytes of a dropout's mask of the residual stream; 0 without dropout."""
        size = self.residual_tokens * self.model.hidden_size * self.mask_width(self.width)
        return size if self.model.dropout else 0


_shape = lru_cache(maxsize=8192)(MicroBatchShape)


def micro_batch_shape(config: RunConfig, layout: Layout, device: Device) -> MicroBatchShape:
    """Return the shape of a run's micro-batches on one rank; device is cpu or cuda."""
    return _shape(
        config.model,
        config.train.micro_batch,
        config.train.seq_len,
        config.precision.compute,
        device,
        layout.tp,
        layout.sequence_parallel and layout.tp_enabled,
        layout.cp,
        config.train.loss_chunks,
        layout.vocabulary_parallel,
        config.precision.accumulate_bytes,
        layout.ep,
        config.model.adapter.is_enabled and replaces_linear_function(config, layout),
        layout.exchanges_heads,
        config.precision.recipe,
        config.precision.has_recipe and config.train.compile,
        not config.precision.float8_all_gather,
    )


def replaces_linear_function(config: RunConfig, layout: Layout) -> bool:
    """Return whether DeepSpeed replaces torch's linear function, for the whole process."""
    is_stage_3 = layout.uses_deepspeed_zero and layout.zero_stage == 3
    return is_stage_3 and bool(config.strategy.options.get("memory_efficient_linear", True))
