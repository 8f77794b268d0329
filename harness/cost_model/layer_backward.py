"""The backward of one decoder layer, operator by operator: what is alive when each has made its results. No torch.

Autograd runs the operators in the opposite order of forward. One frees the tensors that it took when it ends, so its
results are alive beside them. The gradients of one tensor by several operators are summed out of place.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from harness.cost_model.activations import dropout_masks, norm_backward_bytes, recompute_allreduce_bytes
from harness.cost_model.attention_activations import (
    attention_backward_operators,
    eager_score_tensors,
    forward_copies_bytes,
    heads_bytes,
)
from harness.cost_model.micro_batch_shape import MicroBatchShape

Tensors = dict[str, int]  # their bytes by name


@dataclass(frozen=True)
class Moment:
    """What is alive of one layer when an operator of its backward has made its results and freed nothing."""

    saved: int  # bytes of the tensors that the layer saved or recomputed
    temporaries: int  # bytes of gradients of intermediates, and of copies of them
    weights: int = 0  # elements of the layer's weights whose gradients are complete
    computed: int = 0  # elements of the weight whose gradient this operator computes
    is_accumulation: bool = False  # whether that gradient is now added to the parameter's own, or becomes it
    is_followed_by_matrix: bool = True  # whether the gradient after it is that of another matrix of the same branch


class LayerBackward:
    """The backward of a layer that keeps these tensors; `moments` are those so far."""

    def __init__(self, shape: MicroBatchShape, saved: Tensors) -> None:
        self.shape = shape
        self.saved = dict(saved)
        self.temporaries = {"residual.grad": shape.hidden_bytes}
        self.weights = 0
        self.moments: list[Moment] = []

    def run(self, results: Tensors, frees: Iterable[str] = (), weight: int = 0) -> None:
        """Run an operator that makes these results and, if it is a matrix's, the gradient of so many elements."""
        self.temporaries |= results
        self._record(weight)
        for name in frees:
            self.saved.pop(name, None)
            self.temporaries.pop(name, None)

    def accumulate(self, weight: int, is_followed_by_matrix: bool = True) -> None:
        """Add a weight's gradient to the parameter's."""
        self._record(weight, is_accumulation=True, is_followed_by_matrix=is_followed_by_matrix)
        self.weights += weight

    def _record(self, weight: int, is_accumulation: bool = False, is_followed_by_matrix: bool = True) -> None:
        saved, temporaries = sum(self.saved.values()), sum(self.temporaries.values())
        self.moments.append(Moment(saved, temporaries, self.weights, weight, is_accumulation, is_followed_by_matrix))

    def free(self, *prefixes: str) -> None:
        """Free all kept tensors whose names begin so."""
        self.saved = {name: size for name, size in self.saved.items() if not name.startswith(prefixes)}


@dataclass(frozen=True)
class Recomputation:
    """The second forward of a layer, or of its attention's core, which runs when backward needs its first result."""

    results: Tensors  # the tensors that it adds to those that are kept
    consumed: Tensors  # the saved results that it takes and frees
    whole_layer: bool


NO_RECOMPUTATION = Recomputation({}, {}, whole_layer=False)


def layer_backward_moments(shape: MicroBatchShape, saved: Tensors, recomputation: Recomputation) -> list[Moment]:
    """Return the moments of the backward of a layer that saved these tensors."""
    backward = LayerBackward(shape, saved)
    run_mlp(backward, recomputation)
    run_norm(backward, "post_attention_layernorm")
    run_attention(backward, NO_RECOMPUTATION if recomputation.whole_layer else recomputation)
    run_norm(backward, "input_layernorm")
    return backward.moments


def recompute_layer(backward: LayerBackward, recomputation: Recomputation) -> None:
    """Run a layer's second forward: its attention's scores, and its end, where ranks may sum and drop out.

    It keeps no saved result beyond its end: that of the last product is freed before backward takes its inputs.
    """
    if not recomputation.whole_layer:
        return
    shape, results = backward.shape, recomputation.results
    before_scores = ("input_layernorm", "attention.query", "attention.key", "attention.value", "attention.future_mask")
    backward.saved |= {name: size for name, size in results.items() if name.startswith(before_scores)}
    scores = eager_score_tensors(shape) | {"copies": forward_copies_bytes(shape)}
    taken_before = ("q_proj", "k_proj", "v_proj", "scores")
    backward.saved = {name: size for name, size in backward.saved.items() if name not in taken_before}
    backward.run(scores, scores)
    backward.saved |= results
    backward.saved = {name: size for name, size in backward.saved.items() if name not in recomputation.consumed}
    backward.run({"sum": max(0, recompute_allreduce_bytes(shape) - shape.hidden_bytes)}, ("sum", "down_proj"))


def weight_elements(shape: MicroBatchShape) -> dict[str, int]:
    """Return the elements of each of a layer's matrices on one rank."""
    model = shape.model
    square, inner = (model.hidden_size * size // shape.tp for size in (model.hidden_size, model.intermediate_size))
    grouped = square * model.num_key_value_heads // model.num_attention_heads
    attention = {"q_proj": square, "k_proj": grouped, "v_proj": grouped, "o_proj": square}
    return attention | dict.fromkeys((*model.architecture.widening, "down_proj"), inner)


def run_branch(backward: LayerBackward, name: str) -> str:
    """Run what lies between a branch's last matrix and the residual stream; return the name of the gradient."""
    shape, gradient = backward.shape, "residual.grad"
    if dropout_masks(shape, name):
        backward.run({"branch.grad": shape.hidden_bytes}, (f"{name}.mask",))
        gradient = "branch.grad"
    if shape.sequence_parallel:
        whole, own = whole_hidden_bytes(shape), (gradient,) if gradient != "residual.grad" else ()
        if shape.sequences > 1:  # the gathered parts are put together along the second dimension
            backward.run({"gathered_parts.grad": whole}, own)
            own = ("gathered_parts.grad",)
        backward.run({"gathered.grad": whole}, own)
        gradient = "gathered.grad"
    return gradient


def run_row_parallel(backward: LayerBackward, weight: str, branch_grad: str, result: Tensors, frees: str = "") -> None:
    """Run the matrix that ends a branch, whose input's gradient is `result`."""
    elements = weight_elements(backward.shape)[weight]
    backward.run(result, (branch_grad, frees) if branch_grad != "residual.grad" else (frees,), weight=elements)
    backward.accumulate(elements)


def run_column_parallel(backward: LayerBackward, weight: str, output_grad: str, norm_output: str = "") -> None:
    """Run a matrix that begins a branch, and sum its input's gradient and those of the matrices before it.

    `norm_output` is the input, if no other matrix needs it any more.
    """
    elements, whole = weight_elements(backward.shape)[weight], whole_hidden_bytes(backward.shape)
    is_first = "input.grad" not in backward.temporaries
    name = "input.grad" if is_first else "summand.grad"
    backward.run({name: whole}, (output_grad, norm_output), weight=elements)
    if not is_first:
        backward.run({"sum.grad": whole}, ("input.grad", "summand.grad"), weight=elements)
        backward.temporaries["input.grad"] = backward.temporaries.pop("sum.grad")
    backward.accumulate(elements, is_followed_by_matrix=not norm_output)


def run_mlp(backward: LayerBackward, recomputation: Recomputation) -> None:
    """Run the backward of the MLP, SwiGLU's or GELU's; its first saved tensor is a dropout's mask or the product."""
    shape = backward.shape
    inner = shape.tokens * shape.model.intermediate_size * shape.width // shape.tp
    if shape.model.dropout:
        recompute_layer(backward, recomputation)
    branch_grad = run_branch(backward, "mlp")
    if not shape.model.dropout:
        recompute_layer(backward, recomputation)
    run_row_parallel(backward, "down_proj", branch_grad, {"product.grad": inner}, "mlp.product")
    norm_output = "post_attention_layernorm.output"
    if "gate_proj" not in shape.model.architecture.widening:
        backward.run({"up.grad": inner}, ("product.grad", "mlp.up"))
        run_column_parallel(backward, "up_proj", "up.grad", norm_output)
        return
    backward.run({"silu.grad": inner, "up.grad": inner}, ("product.grad", "mlp.silu", "mlp.up"))
    run_column_parallel(backward, "up_proj", "up.grad")
    backward.run({"gate.grad": inner}, ("silu.grad", "mlp.gate"))
    run_column_parallel(backward, "gate_proj", "gate.grad", norm_output)


def run_attention(backward: LayerBackward, recomputation: Recomputation) -> None:
    """Run the backward of attention, of which autograd reaches the projection of the values first."""
    shape = backward.shape
    query, keys = heads_bytes(shape)
    branch_grad = run_branch(backward, "attention")
    frees = "" if shape.model.attention == "flash" else "attention.output"  # the fused kernel keeps it too
    run_row_parallel(backward, "o_proj", branch_grad, {"output.grad": query}, frees)
    if recomputation.results:
        scores, weights = eager_score_tensors(shape), ("attention.weights", "attention.dropped")
        inputs = {name: size for name, size in recomputation.results.items() if not name.startswith(weights)}
        backward.saved |= inputs
        backward.run(scores, scores)
        backward.saved |= recomputation.results
    for results, frees_all in attention_backward_operators(shape):
        backward.run(results, frees_all)
    backward.free("attention")
    if not shape.model.architecture.learned_positions:
        run_rotary(backward, "key.grad", keys)
        run_rotary(backward, "query.grad", query)
    run_column_parallel(backward, "v_proj", "value.grad")
    run_column_parallel(backward, "k_proj", "key.grad")
    run_column_parallel(backward, "q_proj", "query.grad", "input_layernorm.output")


def run_rotary(backward: LayerBackward, gradient: str, size: int) -> None:
    """Run the backward of x * cos + rotate(x) * sin: the products' gradients and their sum, of `size` bytes each."""
    backward.run({"times_sin.grad": size, "halves.grad": size // 2}, ("times_sin.grad",))
    backward.run({"rotated.grad": size}, ("halves.grad",))
    backward.run({"times_cos.grad": size}, (gradient,))
    backward.run({gradient: size}, ("rotated.grad", "times_cos.grad"))


def run_norm(backward: LayerBackward, norm: str) -> None:
    """Run the backward of the norm before a branch, whose input's gradient is added to the residual stream's."""
    shape = backward.shape
    own, output_grad = shape.hidden_bytes, "input.grad"
    if shape.tp > 1:
        summed = input_grad_reduction_bytes(shape) - whole_hidden_bytes(shape) - own
        backward.run({"reduced.grad": own, "summed.grad": summed}, ("input.grad", "summed.grad"))
        output_grad = "reduced.grad"
    backward.saved.pop(f"{norm}.normalized", None)
    rest = norm_backward_bytes(shape) - own
    backward.run({"norm.grad": rest}, ("norm.grad", output_grad))
    backward.free(f"{norm}.")
    backward.run({"norm_input.grad": own, "sum.grad": own}, ("residual.grad", "norm_input.grad"))
    backward.temporaries["residual.grad"] = backward.temporaries.pop("sum.grad")


def whole_hidden_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes of the hidden states of all of the rank's tokens, gathered if they are divided."""
    return shape.tokens * shape.model.hidden_size * shape.width


def input_grad_reduction_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes of a matrix's input's gradient while tensor-parallel ranks sum it, its sum included.

    With sequence parallelism its parts are copied one after another along the first dimension, and scattered.
    """
    parts = whole_hidden_bytes(shape) * (1 + shape.sequence_parallel)
    return parts + shape.hidden_bytes if shape.tp > 1 else parts
