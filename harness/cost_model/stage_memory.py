"""What fills a rank's memory during a backward: its pass through a stage, and all that is kept meanwhile.

Imports no torch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.config.schema import ModelConfig, RunConfig
from harness.cost_model.activations import (
    FP32_BYTES,
    MicroBatchShape,
    block_backward_bytes,
    deferred_weight_grad_inputs,
    eager_score_tensors,
    logits_bytes,
    loss_tensors,
    micro_batch_shape,
    norm_backward_bytes,
    norm_gradient_bytes,
    norm_is_decomposed,
    recompute_allreduce_bytes,
)
from harness.cost_model.buffers import unsharded_grad_bytes
from harness.cost_model.pipeline import BackwardStart, PassKind
from harness.cost_model.stage_activations import (
    Activations,
    activations,
    offloaded_bytes,
    weight_grad_only_bytes,
    without_offloaded_activations,
)
from harness.layout.layout import Layout
from harness.layout.parameters import parameter_shapes
from harness.layout.partition import Stage, is_vocab_sharded, tp_shard_dim

Bytes = dict[str, int]  # by what fills them


def held_parameter_count(model: ModelConfig, stage: Stage, tp: int, vocabulary_tp: int | None = None) -> int:
    """Parameters of a stage on the rank that holds most: matrices are cut as the plan says, the norms are not.

    vocabulary_tp is into how many parts embedding and head are cut; by default as many as the others.
    """
    ends = tp if vocabulary_tp is None else vocabulary_tp
    held = 0
    for name, shape in parameter_shapes(model).items():
        if stage.holds(name):
            parts = ends if is_vocab_sharded(name, model) else tp
            cut = tp_shard_dim(name, model)
            held += math.prod(math.ceil(size / parts) if axis == cut else size for axis, size in enumerate(shape))
    return held


def vocabulary_parameter_count(model: ModelConfig, tp: int) -> int:
    """Parameters of embedding or head on the rank that holds most."""
    return math.ceil(model.vocab_size / tp) * model.hidden_size


@dataclass(frozen=True)
class StageCost:
    """One of a rank's stages, and what a pass through it keeps and needs."""

    one: MicroBatchShape
    stage: Stage
    kept: Activations
    kept_for_weights: tuple[int, int]  # bytes in a backward for weights alone, at the last layer and the last matrix
    keeps_input: bool  # where it was received
    parameters: int
    narrow: bool  # whether gradients are made in 16 bit, and summed in fp32
    unreduced: int  # bytes of gradients on their way to their shards
    offloaded: int  # bytes of what a pass keeps that activation offload moves to the host

    @property
    def arriving(self) -> int:
        """Bytes that a pass receives; as many go back."""
        return 0 if self.stage.holds_embedding else self.one.hidden_bytes

    @property
    def leaving(self) -> int:
        """Bytes that a pass sends; as many come back."""
        return 0 if self.stage.holds_head else self.one.hidden_bytes

    @property
    def received(self) -> int:
        """Bytes of what is kept that lie where they were received."""
        return self.arriving if self.keeps_input else 0

    @property
    def log_probabilities(self) -> int:
        """Bytes kept for backward beside the activations; none where the loss goes through its tokens in parts."""
        return logits_bytes(self.one) if self.stage.holds_head and self.one.loss_chunks == 1 else 0

    @property
    def remade_log_probabilities(self) -> int:
        """Bytes of them that a second forward of a part of the loss keeps."""
        return logits_bytes(self.one) if self.stage.holds_head and self.one.loss_chunks > 1 else 0

    @property
    def logits_gradient(self) -> int:
        return (self.log_probabilities + self.remade_log_probabilities) * self.one.width // FP32_BYTES

    @property
    def deferred(self) -> int:
        """Bytes of gradients that a backward for inputs alone, which frees nothing, leaves for the weights."""
        layers = self.stage.layers * sum(deferred_weight_grad_inputs(self.one).values())
        return layers + self.logits_gradient + self.stage.holds_head * norm_gradient_bytes(self.one)

    @property
    def made_for_weights(self) -> tuple[int, int]:
        """Bytes of weights' gradients at the last layer of a backward for weights alone, and at its last matrix.

        In 16 bit all that it made so far, added to the sums in the end; in fp32 one at a time.
        """
        matrix = self.matrix_gradient if self.stage.holds_head else 0
        if self.narrow:
            layers = self.parameters * self.one.width - matrix
            return layers - layers // self.stage.layers, layers + matrix
        inner = self.one.model.hidden_size * self.one.model.intermediate_size * self.one.width // self.one.tp
        return inner, matrix or inner

    @property
    def matrix_gradient(self) -> int:
        """Bytes of the gradient of embedding or head, the largest matrices, as backward makes it."""
        return vocabulary_parameter_count(self.one.model, self.one.vocabulary_tp) * self.one.width

    @property
    def summand(self) -> int:
        """Bytes of it while it is added to what is there; a CPU widens it first."""
        widened = self.matrix_gradient * FP32_BYTES // self.one.width
        return self.matrix_gradient + (widened if self.narrow and self.one.device == "cpu" else 0)


def stage_costs(config: RunConfig, layout: Layout, device: str, held: Sequence[Stage]) -> list[StageCost]:
    """A rank's stages as parts."""
    one = micro_batch_shape(config, layout, device)
    same = one.width == FP32_BYTES or not norm_is_decomposed(one)  # a norm keeps its input as it is
    away_from_device = device != "cpu"  # on a CPU it is all one memory

    def kept(stage: Stage) -> tuple[Activations, tuple[int, int], int]:
        """On the device, the same in a backward for weights alone, and what was moved to the host."""
        found = activations(one, stage, config.checkpointing)
        first, last = weight_grad_only_bytes(one, stage, config.checkpointing)
        moved = offloaded_bytes(one, stage, config.checkpointing) if config.checkpointing.offload_activations else 0
        if moved and away_from_device:
            others = moved - moved // stage.layers
            return (
                without_offloaded_activations(found, moved, stage.layers),
                (first - others, max(0, last - others)),
                moved,
            )
        return found, (first, last), moved

    return [
        StageCost(
            one,
            stage,
            *kept(stage)[:2],
            keeps_input=same or config.checkpointing.recomputes_layer(stage.first_layer),
            parameters=held_parameter_count(config.model, stage, layout.tp, layout.vocabulary_tp),
            narrow=config.precision.is_mixed,
            unreduced=unsharded_grad_bytes(config, layout, [stage]),
            offloaded=kept(stage)[2],
        )
        for stage in held
    ]


def backward_peaks(part: StageCost, kind: PassKind, new_gradients: int) -> Iterator[Bytes]:
    """What a pass fills at the worst moments of its backward, in their order.

    new_gradients are bytes of sums that it begins; 0 if it adds to those of an earlier pass.
    """
    one, kept, head = part.one, part.kept, part.stage.holds_head
    layer = sum(deferred_weight_grad_inputs(one).values())
    if kind == "weights":
        at_layer, at_matrix = part.kept_for_weights
        left = part.deferred - (part.stage.layers - 1) * layer
        before, made = part.made_for_weights
        yield {"activations": at_layer, "temporaries": left + before}
        yield {"activations": at_matrix, "temporaries": part.logits_gradient + made}
        return
    chunked = one.loss_chunks > 1
    made = part.matrix_gradient + one.hidden_bytes if chunked else 0  # gradients of what parts of the loss share
    if head:
        yield {"activations": kept.before_backward, "loss": sum(loss_tensors(one).values()), "temporaries": made}
    if head and kind == "backward":
        matrix = max((1 + chunked) * part.matrix_gradient + part.logits_gradient, part.summand)
        yield {"activations": kept.before_backward, "temporaries": one.hidden_bytes + matrix}
    yield {"activations": kept.in_last_norm, "temporaries": norm_backward_bytes(one)}
    block = max(block_backward_bytes(one), recompute_allreduce_bytes(one) if kept.second_forward else 0)
    yield {"activations": kept.in_last_block, "temporaries": block, "buffers": part.unreduced}
    yield {"activations": kept.at_last_scores, "temporaries": sum(eager_score_tensors(one).values())}
    if kind == "inputs":
        all_kept = {"activations": kept.before_backward, "loss": part.log_probabilities}
        yield all_kept | {"temporaries": part.deferred - layer + block + kept.second_forward}
        yield all_kept | {"temporaries": part.deferred + norm_backward_bytes(one) - norm_gradient_bytes(one)}
        return
    added = part.summand if not new_gradients else part.narrow * part.matrix_gradient  # the first is widened to the sum
    rest = max(0, part.stage.holds_embedding * added - part.unreduced)
    yield {"gradients": new_gradients, "temporaries": rest, "buffers": part.unreduced}


def step_peaks(
    parts: Sequence[StageCost], gradients: Sequence[int], standing: bool, moment: BackwardStart, piles_up: bool
) -> Iterator[Bytes]:
    """What fills the memory at the worst moments of one of a step's backwards: that pass and all that is kept.

    gradients are the bytes of each part's; standing, whether they are there when a step begins. piles_up: whether what
    was sent is held until the end of the step.
    """
    kept = dict.fromkeys(("gradients", "buffers", "activations", "loss", "temporaries"), 0)
    there = [standing or finished > 0 for finished in moment.finished]
    for index, part in enumerate(parts):
        waiting, halved = moment.waiting[index], moment.halved[index]
        sent, sent_back = moment.forwards[index], halved + moment.finished[index]
        if not piles_up:
            sent, sent_back = waiting, min(1, sent_back)
        if index == moment.own:
            waiting, halved = (waiting, halved - 1) if moment.kind == "weights" else (waiting - 1, halved)
        kept["gradients"] += gradients[index] if there[index] else 0
        kept["activations"] += (waiting + halved) * part.kept.before_backward
        kept["buffers"] += sent * part.leaving + sent_back * part.arriving - (waiting + halved) * part.received
        kept["loss"] += waiting * part.log_probabilities
        kept["temporaries"] += halved * part.deferred
    own = parts[moment.own]
    for fill in backward_peaks(own, moment.kind, 0 if there[moment.own] else gradients[moment.own]):
        fill["buffers"] = fill.get("buffers", 0) - (own.received if "activations" in fill else 0)
        yield {name: size + fill.get(name, 0) for name, size in kept.items()}
