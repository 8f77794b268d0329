"""The bytes that another implementation's passes keep for backward, by the data of its stack. Imports no torch.

The tensors that a layer keeps are those of Korthikanti et al. (arXiv 2205.05198, section 4.1): two norms, four
projections of attention, an MLP and the dropout masks, as harness.cost_model.activations has them for this project's
own layers.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from harness.config.stack import StackMemory
from harness.cost_model.layer_backward import LayerMoment
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape
from harness.cost_model.stage_activations import LayerActivations, StageActivations


@lru_cache(maxsize=4096)
def layer_bytes(shape: MicroBatchShape, memory: StackMemory) -> tuple[int, int, int]:
    """Return the bytes that a layer keeps for backward and, of these, what eager attention keeps of its scores.

    The third number is the gradients of intermediates at the worst moment of backward.
    """
    model = shape.model
    norms, gated = norm_bytes(shape, memory) * 2, model.architecture.has_gate
    rows, is_flash = shape.tokens * model.num_attention_heads // shape.tp, model.attention == "flash"
    heads = (2 + memory.attention_copies) * shape.query_bytes + 2 * shape.key_bytes + rows * FP32_BYTES * is_flash
    # The softmax, and with dropout its mask and result.
    width = memory.scores_bytes + (1 + shape.width if model.dropout else 0)
    scores = rows * shape.seq_len * width * (not is_flash)
    inner = shape.inner_bytes * (memory.gated_mlp_tensors if gated else memory.plain_mlp_tensors)
    masks = 2 * shape.dropout_mask_bytes
    # The gradient of the MLP's output, gathered where it is divided, and of the tensors between its matrices.
    backward = shape.hidden_bytes + shape.inner_bytes * (2 if gated else 1)
    backward += shape.whole_hidden_bytes if shape.sequence_parallel and shape.tp > 1 else 0
    return norms + heads + scores + inner + masks, scores, backward


def norm_bytes(shape: MicroBatchShape, memory: StackMemory) -> int:
    """Return the bytes that one norm keeps: its input, statistics in fp32 and its output, which matrices take."""
    is_rms = shape.model.architecture.norm == "rms"
    inputs = shape.hidden_bytes * (1 + (memory.rms_norm_copies if is_rms else 0))
    statistics = shape.residual_tokens * FP32_BYTES * (1 if is_rms else 2)
    return inputs + statistics + (shape.hidden_bytes if memory.gathers_inputs_again else shape.whole_hidden_bytes)


@dataclass(frozen=True, eq=False)
class StackActivations(StageActivations):
    """The bytes that a pass through a stage keeps, without what is sent and received, which stacks count as data."""

    memory: StackMemory

    input_bytes = output_bytes = 0  # what is sent and received is freed
    logits_bytes = 0  # beside what the loss has
    table_bytes = 0  # all passes share one

    def of_layer(self, is_recomputed: bool) -> LayerActivations:
        """Return what a layer keeps, and the one moment of its backward that counts."""
        whole, scores, backward = layer_bytes(self.shape, self.memory)
        saved = whole
        if self.checkpointing.name == "attention":
            saved = whole - scores
        elif is_recomputed:
            saved = self.shape.hidden_bytes
        return LayerActivations(saved, whole - saved, 0, 0, 0, (LayerMoment(saved, whole - saved + backward),))

    @cached_property
    def norm(self) -> dict[str, int]:
        """The bytes that the final norm keeps."""
        return {"norm": norm_bytes(self.shape, self.memory)} if self.stage.holds_head else {}

    @cached_property
    def loss_bytes(self) -> int:
        """The bytes of logits at the worst moment of the loss."""
        shape, memory = self.shape, self.memory
        tokens = min(shape.tokens, memory.loss_chunk_tokens or shape.tokens)
        elements = tokens * (shape.model.vocab_size // shape.vocabulary_tp) * self.stage.holds_head
        return elements * (memory.fp32_logits * FP32_BYTES + memory.narrow_logits * shape.width)
