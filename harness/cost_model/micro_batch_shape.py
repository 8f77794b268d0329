"""The shape of one micro-batch on one rank, and how torch computes the operators that it goes through."""

from dataclasses import dataclass

from harness.config.model import ModelConfig
from harness.config.precision import DTYPE_BYTES
from harness.config.schema import Device, RunConfig
from harness.layout.layout import Layout

FP32_BYTES = 4

INT64_BYTES = 8


@dataclass(frozen=True)
class MicroBatchShape:
    """One micro-batch on its way through decoder layers, and how tensor and context parallelism divide its tensors."""

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

    @property
    def vocabulary_tp(self) -> int:
        """The number of parts into which embedding and head are cut."""
        return self.tp if self.vocabulary_parallel else 1

    @property
    def width(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def tokens(self) -> int:
        """Tokens of this rank's part of the sequences."""
        return self.sequences * self.seq_len // self.cp

    @property
    def residual_tokens(self) -> int:
        """Tokens whose norms and residual stream this rank computes."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def hidden_bytes(self) -> int:
        """Bytes of this rank's part of the residual stream."""
        return self.residual_tokens * self.model.hidden_size * self.width

    @property
    def norm_is_decomposed(self) -> bool:
        """Whether torch computes the norm by plain operations in fp32, without a kernel of its own."""
        return self.device == "cpu" and self.model.architecture.norm == "rms"

    @property
    def attention_is_decomposed(self) -> bool:
        """Whether scaled_dot_product_attention runs plain operations in fp32: a CPU's fused kernel takes no dropout."""
        return self.model.attention == "flash" and self.device == "cpu" and self.model.dropout > 0

    @property
    def repeats_grouped_heads(self) -> bool:
        """Whether keys and values are repeated for every head: CUDA has no fused kernel for grouped heads in fp32."""
        is_grouped = self.model.num_key_value_heads < self.model.num_attention_heads
        return is_grouped and self.model.attention == "flash" and self.device == "cuda" and self.width == FP32_BYTES

    @property
    def dropout_mask_width(self) -> int:
        """Bytes per element of a dropout's mask: a CPU multiplies by it in the width of compute."""
        return self.width if self.device == "cpu" else 1


def micro_batch_shape(config: RunConfig, layout: Layout, device: Device) -> MicroBatchShape:
    """Return the shape of a run's micro-batches on one rank; device is cpu or cuda."""
    return MicroBatchShape(
        config.model,
        config.train.micro_batch,
        config.train.seq_len,
        config.precision.compute,
        device,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        cp=layout.cp,
        loss_chunks=config.train.loss_chunks,
        vocabulary_parallel=layout.vocabulary_parallel,
    )
