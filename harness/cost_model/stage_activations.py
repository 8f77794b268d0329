"""The bytes that a pass through a pipeline stage keeps for backward, and when. Imports no torch."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from harness.config.model import TRACED_SEQUENCES, TracedLayer
from harness.config.schema import CheckpointingConfig
from harness.cost_model.activations import (
    adapted_sum_bytes,
    block_tensors,
    eager_score_tensors,
    forward_copies_bytes,
    layer_activations,
    norm_tensors,
)
from harness.cost_model.layer_backward import BEFORE_SCORES, LayerMoment, layer_backward
from harness.cost_model.micro_batch_shape import FP32_BYTES, INT64_BYTES, MicroBatchShape
from harness.layout.layer_spec import last_product
from harness.layout.partition import Stage


@dataclass(frozen=True)
class LayerActivations:
    """The bytes that one layer keeps for backward, whatever the stage that has it."""

    saved: int  # when its forward has ended
    at_scores: int  # when its forward computes its attention
    scores: int  # of that moment alone
    moments: tuple[LayerMoment, ...]  # of its backward
    deferred: int = 0  # gradients that a backward for inputs alone leaves to the weights' half
    for_weights: int = 0  # kept or recomputed for its weights' gradients, and freed after them
    left: int = 0  # of what it keeps and recomputes when its weights have their gradients
    sums: int = 0  # of the moment alone at which its forward sums outputs of experts, or of an adapter

    @property
    def most(self) -> int:
        """The most bytes of its backward."""
        return max(moment.saved + moment.temporaries for moment in self.moments)

    def with_excess(self, traced: "LayerActivations", whole: "LayerActivations") -> "LayerActivations":
        """Return it with what the trace of a whole layer has beyond the formulas, which every rank may have whole.

        Such tensors are of further norms and projections, and copies of fused matrices' outputs.
        """
        excess = traced.most - whole.most
        moments = (replace(moment, saved=max(0, moment.saved + excess)) for moment in self.moments)
        saved = max(0, self.saved + traced.saved - whole.saved)
        return replace(self, saved=saved, at_scores=self.at_scores + saved - self.saved, moments=tuple(moments))


@lru_cache(maxsize=4096)
def one_layer_activations(
    shape: MicroBatchShape, checkpointing: CheckpointingConfig, is_recomputed: bool
) -> LayerActivations:
    """Return what a layer keeps; layers differ by whether they are recomputed."""
    saved, block = layer_activations(shape, checkpointing, is_recomputed), block_tensors(shape)
    recomputed = {name: size for name, size in block.items() if name not in saved}
    if is_recomputed and (shape.width == FP32_BYTES or not shape.norm_is_decomposed):
        del recomputed["input_layernorm.input"]  # the layer's input, which a decomposed norm copies to fp32
    until_scores = {name: size for name, size in block.items() if name.startswith(BEFORE_SCORES)}
    if is_recomputed:  # it keeps its input, and selectively the product that makes the scores
        until_scores = {name: size for name, size in until_scores.items() if not name.startswith("input_layernorm")}
        # The norm's output, which attention has as its argument, and saved products beside the rotated ones; with
        # gathered keys the plan of that moment is 0.2 % too high without these.
        rotated = set() if shape.model.architecture.learned_positions else {"q_proj", "k_proj"}
        names = {"input", "scores"} | ({"input_layernorm.output"} | rotated if shape.key_ranks == 1 else set())
        until_scores |= {name: size for name, size in (block | saved).items() if name in names}
    # A selective second forward takes and frees saved results, and stops before the last product.
    stays = {*block, "input", last_product(shape.model)}
    is_selective = checkpointing.name == "selective"
    consumed = {name: size for name, size in saved.items() if is_selective and name not in stays}
    backward = layer_backward(shape, saved, recomputed, consumed, is_recomputed)
    for_weights = weight_pass_bytes(recomputed if is_recomputed else block, shape)
    again = sum(recomputed.values()) - sum(consumed.values()) if is_recomputed else 0
    return LayerActivations(
        saved=sum(saved.values()),
        at_scores=sum(until_scores.values()),
        scores=sum(eager_score_tensors(shape).values()) + forward_copies_bytes(shape),
        moments=tuple(backward.moments),
        deferred=backward.deferred,
        for_weights=for_weights,
        left=sum(saved.values()) + again - for_weights,
        sums=max(shape.expert_sum_bytes, adapted_sum_bytes(shape, saved) * (is_recomputed and is_selective)),
    )


@lru_cache(maxsize=1024)
def traced_activations(traced: TracedLayer, scale: float) -> LayerActivations:
    """Return what a layer of a library's model keeps, of so many times the sequences of its trace."""
    moments = (
        LayerMoment(round(saved * scale), round(others * scale), weights=done, computed=own, is_accumulation=adds > 0)
        for saved, others, done, own, adds in traced.moments
    )
    return LayerActivations(round(traced.saved_bytes * scale), round(traced.forward_bytes * scale), 0, tuple(moments))


@dataclass(frozen=True, eq=False)
class StageActivations:
    """The bytes that a pass through one of a rank's stages keeps, sends and computes.

    Activation offload moves what layers keep to the host. Copies run beside the computing: when backward begins the
    last layer's part is still leaving, and in its backward that of the layer before comes back.
    """

    shape: MicroBatchShape
    stage: Stage
    checkpointing: CheckpointingConfig

    @cached_property
    def layers(self) -> list[LayerActivations]:
        """What each layer of the stage keeps, by the number of those that follow it."""
        recomputed = map(self.checkpointing.recomputes_layer, reversed(self.stage.layer_indices))
        return [self.of_layer(is_recomputed) for is_recomputed in recomputed]

    def kept_by(self, first: int) -> int:
        """Return the bytes that so many first layers keep, what they share, and what the embedding keeps."""
        saved = sum(layer.saved for layer in self.layers[self.stage.layers - first :])
        return self.embedding_bytes + self.table_bytes + saved

    @cached_property
    def embedding_bytes(self) -> int:
        """The bytes of token ids, a mask of those that other ranks look up, positions, and the dropout's mask."""
        shape = self.shape
        positions = shape.seq_len // shape.cp * INT64_BYTES if shape.model.architecture.learned_positions else 0
        tokens = shape.tokens * (INT64_BYTES + (shape.vocabulary_tp > 1))
        return (tokens + positions + shape.dropout_mask_bytes) * self.stage.holds_embedding

    @cached_property
    def table_bytes(self) -> int:
        """The bytes of the cosines and sines by which all layers rotate queries and keys."""
        shape = self.shape
        rotates = not shape.model.architecture.learned_positions
        return 2 * (shape.seq_len // shape.cp) * shape.model.head_size * shape.width * rotates

    @cached_property
    def loss_bytes(self) -> int:
        """The bytes at the worst moment of logits and cross-entropy, in fp32; 0 in a stage without the head.

        That is the backward of the log-softmax: the log-probabilities and two gradients. torch's loss over logits that
        are cut along the vocabulary runs it by plain operations, with the probabilities beside them.
        """
        return (3 + (self.shape.logits_tp > 1)) * self.logits_bytes

    @cached_property
    def forward_loss_bytes(self) -> int:
        """The bytes at the worst moment of a loss's forward: one fp32 tensor fewer, and the narrow logits before it."""
        narrow = self.logits_grad_bytes * (self.shape.width < FP32_BYTES)
        return self.loss_bytes - self.logits_bytes + narrow

    def of_layer(self, is_recomputed: bool) -> LayerActivations:
        """Return what a layer keeps that is recomputed, or one that is not."""
        kind = "none" if not is_recomputed else "selective" if self.checkpointing.name == "selective" else "full"
        shape, traced = self.shape, self.shape.traced_layer(kind)
        if traced is None:
            return one_layer_activations(shape, self.checkpointing, is_recomputed)
        of_trace = traced_activations(traced, shape.sequences / TRACED_SEQUENCES)
        if shape.tp == 1:
            return of_trace
        whole = one_layer_activations(shape.without_tp, self.checkpointing, is_recomputed)
        return one_layer_activations(shape, self.checkpointing, is_recomputed).with_excess(of_trace, whole)

    def outside(self, following: int) -> int:
        """Return the bytes on the device in the backward of this layer, without those of the layer itself."""
        before = self.stage.layers - following - 1
        away = self.kept_by(max(0, before - 1)) - self.kept_by(0) if self.moved_layer_bytes else 0
        return self.kept_by(before) - away

    @cached_property
    def norm(self) -> dict[str, int]:
        """The bytes that the final norm keeps, by tensor; none in a stage without the head."""
        return norm_tensors("norm", self.shape) if self.stage.holds_head else {}

    @cached_property
    def offloaded_bytes(self) -> int:
        """The bytes that activation offload moves: the layers', as the embedding's stay on the device."""
        if not self.checkpointing.offload_activations:
            return 0
        return self.kept_by(self.stage.layers) - self.embedding_bytes

    @cached_property
    def moved_layer_bytes(self) -> int:
        """The bytes of one layer that leave the device; none on a CPU, where the host's memory is the device's."""
        return 0 if self.shape.device == "cpu" else self.offloaded_bytes // max(1, self.stage.layers)

    @cached_property
    def moved_bytes(self) -> int:
        """The bytes that have left the device when backward begins."""
        return 0 if self.shape.device == "cpu" else self.offloaded_bytes - self.moved_layer_bytes

    @cached_property
    def before_backward(self) -> int:
        """The bytes on the device that a pass keeps for its backward, without the logits."""
        return self.kept_by(self.stage.layers) + sum(self.norm.values()) - self.moved_bytes

    @cached_property
    def in_final_norm(self) -> int:
        """The bytes in the final norm's backward, without what that freed."""
        away = (self.stage.layers - min(2, self.stage.layers)) * self.moved_layer_bytes
        all_saved = self.before_backward + self.moved_bytes
        freed = sum(self.norm.get(f"norm.{name}", 0) for name in ("output", "normalized"))
        return max(0, all_saved - freed - away)

    @cached_property
    def in_weights_pass(self) -> tuple[int, int]:
        """The bytes kept when a backward for weights alone reaches the last layer, and when it reaches its end.

        It goes through the layers from first to last, and ends with the last matrix. It frees the tensors from which it
        computes gradients at once and all others at its end; where layers are recomputed, these include every tensor of
        a second forward.
        """
        left = self.embedding_bytes + self.table_bytes + sum(layer.left for layer in self.layers) - self.moved_bytes
        head, used_by_last_matrix = sum(self.norm.values()), block_tensors(self.shape)["mlp.product"]
        if self.norm:
            used_by_last_matrix = head - weight_pass_bytes(self.norm, self.shape) + self.norm["norm.output"]
        return left + self.layers[0].for_weights + head, max(0, left + used_by_last_matrix)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes that a pass receives, and sends back as their gradient."""
        return 0 if self.stage.holds_embedding else self.shape.hidden_bytes

    @cached_property
    def output_bytes(self) -> int:
        """Bytes that a pass sends, and receives back as their gradient."""
        return 0 if self.stage.holds_head else self.shape.hidden_bytes

    @cached_property
    def received_input_bytes(self) -> int:
        """Bytes of the kept activations that lie in the buffer that received them: a norm may keep an fp32 copy."""
        norm_keeps_input = self.shape.width == FP32_BYTES or not self.shape.norm_is_decomposed
        is_kept = norm_keeps_input or self.checkpointing.recomputes_layer(self.stage.first_layer)
        return self.input_bytes if is_kept else 0

    @cached_property
    def log_probability_bytes(self) -> int:
        """Bytes of log-probabilities kept for backward; 0 where the loss goes through its tokens in parts."""
        return self.logits_bytes * (self.shape.loss_chunks == 1)

    @cached_property
    def logits_bytes(self) -> int:
        """Bytes of the fp32 logits that go through the loss at once; 0 in a stage without the head."""
        return self.shape.logits_bytes * self.stage.holds_head

    @cached_property
    def logits_grad_bytes(self) -> int:
        """Bytes of the gradient of the logits, in the width of compute."""
        return self.logits_bytes * self.shape.width // FP32_BYTES

    @cached_property
    def deferred_grad_bytes(self) -> int:
        """Bytes of gradients that a backward for inputs alone, which frees nothing, leaves for the weights' half."""
        layers = sum(layer.deferred for layer in self.layers)
        return layers + self.logits_grad_bytes + self.stage.holds_head * self.shape.norm_gradient_bytes


stage_activations = lru_cache(maxsize=4096)(StageActivations)


def weight_pass_bytes(tensors: dict[str, int], shape: MicroBatchShape) -> int:
    """Return the bytes that weights' gradients need: inputs of matrices, and what a norm scales.

    LayerNorm's one kernel reads all of its tensors again for the gradients of weight and bias.
    """
    suffixes = ["norm.output", "norm.normalized", "mlp.product"]
    if shape.model.attention == "eager":
        suffixes.append("attention.output")  # the flash kernel keeps it too
    if shape.model.architecture.norm == "layer":
        suffixes += ["norm.input", "norm.mean", "norm.rstd"]
    return sum(size for name, size in tensors.items() if name.endswith(tuple(suffixes)))
