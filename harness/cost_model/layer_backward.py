"""The backward of one decoder layer, operator by operator: what is alive when each has made its results. No torch.

Autograd runs the operators in the opposite order of forward. One frees the tensors that it took when it ends, so its
results are alive beside them. The gradients of one tensor by several operators are summed out of place.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from harness.config.model import Branch, Operator
from harness.cost_model.activations import (
    ROUTING,
    attention_backward_operators,
    eager_score_tensors,
    exchanged_copies_bytes,
    forward_copies_bytes,
    routing_tensors,
)
from harness.cost_model.float8 import backward_temporaries
from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape
from harness.cost_model.quantized import whole_in_forward_bytes, whole_matrix_bytes
from harness.layout.layer_spec import Matrix, last_product, layer_matrices

# What a layer makes before its attention has scores, by the beginnings of the tensors' names.
BEFORE_SCORES = (
    *("input_layernorm", "adapter.q_proj", "adapter.k_proj", "adapter.v_proj"),
    *(f"attention.{name}" for name in ("query", "key", "value", "future_mask")),
)

# What its core makes of them.
BEHIND_SCORES = ("attention.weights", "attention.dropped")

Tensors = dict[str, int]  # their bytes by name

# Moments of a layer's backward: a second forward has computed its experts, and their own backward begins or has ended.
ExpertsMoment = Literal["recomputed", "entered", "left"]


@dataclass(frozen=True)
class LayerMoment:
    """What is alive of one layer when an operator of its backward has made its results and freed nothing."""

    saved: int  # bytes of the tensors that the layer saved or recomputed
    temporaries: int  # bytes of gradients of intermediates, and of copies of them
    arrived: int = 0  # bytes of them that are the gradient of the layer's output, until it is summed
    freed: int = 0  # bytes of saved tensors, freed until now, which a backward for inputs alone keeps
    deferred: int = 0  # bytes of gradients, freed until now, which it leaves to the weights' half
    weights: int = 0  # elements of the layer's weights whose gradients are complete
    computed: int = 0  # elements of the weight whose gradient this operator computes
    is_accumulation: bool = False  # whether that gradient is now added to the parameter's own, or becomes it
    is_followed_by_matrix: bool = True  # whether the gradient after it is that of another matrix of the same branch
    experts: ExpertsMoment | None = None  # what it is to the experts, as a module of their own


class LayerBackward:
    """The backward of a layer that keeps these tensors; `moments` are those so far."""

    def __init__(self, shape: MicroBatchShape, saved: Tensors, recomputed: Tensors, consumed: Tensors) -> None:
        self.shape, self.saved = shape, dict(saved)
        self.recomputed, self.consumed = recomputed, consumed
        self.temporaries = {"residual.grad": shape.hidden_bytes}
        self.arrived = shape.hidden_bytes
        self.weights = self.freed = self.deferred = 0
        self.moments: list[LayerMoment] = []

    def run(
        self,
        results: Tensors,
        frees: Iterable[str] = (),
        weight: int = 0,
        is_accumulation: bool = False,
        is_followed_by_matrix: bool = True,
        experts: ExpertsMoment | None = None,
    ) -> None:
        """Run an operator that makes these results and, if it is a matrix's, the gradient of so many elements.

        The residual stream's gradient is never freed: what is added to it takes its place.
        """
        self.temporaries |= results
        sizes = (sum(self.saved.values()), sum(self.temporaries.values()), self.arrived, self.freed, self.deferred)
        place = (is_accumulation, is_followed_by_matrix, experts)
        self.moments.append(LayerMoment(*sizes, self.weights, weight, *place))
        self.weights += weight * is_accumulation
        for name in {*frees} - {"residual.grad"}:
            self.freed += self.saved.pop(name, 0) * (name not in self.recomputed)
            self.temporaries.pop(name, None)

    def recompute(self, before: Tensors, copies: Tensors) -> None:
        """Run a second forward, which has some of its results when attention's scores exist, with their copies."""
        scores = eager_score_tensors(self.shape) | copies
        self.saved |= before
        self.run(scores, scores)
        self.saved |= self.recomputed

    def free(self, *prefixes: str) -> None:
        """Free all kept tensors whose names begin so."""
        for name in [name for name in self.saved if name.startswith(prefixes)]:
            self.freed += self.saved.pop(name) * (name not in self.recomputed)


def layer_backward(
    shape: MicroBatchShape, saved: Tensors, recomputed: Tensors, consumed: Tensors, is_recomputed: bool
) -> LayerBackward:
    """Return the backward of a layer that saved these tensors.

    A second forward of the layer, or else of its attention's core, runs when backward needs its first result. It adds
    the tensors `recomputed` to those that are kept, and takes and frees the saved results `consumed`.
    """
    backward = LayerBackward(shape, saved, recomputed, consumed)
    for number, branch in enumerate(reversed(shape.model.architecture.branches)):
        is_first = is_recomputed and number == 0
        if is_first and shape.model.dropout:
            recompute_layer(backward)
        gradient = run_residual(backward, branch.name)
        if is_first and not shape.model.dropout:
            recompute_layer(backward)
        for operator in reversed(branch.operators):
            if operator.kind == "attention" and recomputed and not is_recomputed:
                before = {name: size for name, size in recomputed.items() if not name.startswith(BEHIND_SCORES)}
                backward.recompute(before, {"copies": exchanged_copies_bytes(shape)})
            run_operator(backward, branch, operator, gradient)
        run_norm(backward, branch.norm)
        backward.deferred += shape.norm_gradient_bytes + shape.whole_hidden_bytes  # of the norm, and of the last matrix
    return backward


def recompute_layer(backward: LayerBackward) -> None:
    """Run a layer's second forward: its attention's scores, and its end, where ranks may sum and drop out.

    It keeps no saved result beyond its end: that of the last product is freed before backward takes its inputs. Where
    ranks sum and drop out, the pending gradient exists there, the summand and three copies of the tensor-parallel
    ranks' sum, as DTensor passes it on; the dropout's mask does not exist yet.
    """
    shape, results = backward.shape, backward.recomputed
    before = {name: size for name, size in results.items() if name.startswith(BEFORE_SCORES)}
    taken_before = ("q_proj", "k_proj", "v_proj", "scores")
    saved = backward.saved.items()
    backward.saved = {name: size for name, size in saved if not name.startswith(taken_before)}
    backward.recompute(before, {"copies": forward_copies_bytes(shape)})
    backward.saved = {name: size for name, size in backward.saved.items() if name not in backward.consumed}
    run_last_product(backward, layer_matrices(shape.model)[-1])
    summed = shape.whole_hidden_bytes + 3 * shape.hidden_bytes - shape.dropout_mask_bytes  # beside the gradient
    backward.run(
        {"sum": max(0, summed) * (shape.tp > 1 and shape.model.dropout > 0)}, ("sum", last_product(shape.model))
    )
    if shape.routed_rows:
        backward.run({"sums_of_experts": shape.expert_sum_bytes}, ("sums_of_experts",), experts="recomputed")


def run_last_product(backward: LayerBackward, matrix: Matrix) -> None:
    """Run a second forward's product of the last matrix, if its adapter's backward needs that forward.

    The scaled gradient exists already, and the hidden states of which a norm keeps an fp32 copy. A quantized matrix is
    whole beside the product, of which peft makes a copy.
    """
    shape, result = backward.shape, backward.shape.whole_hidden_bytes
    if matrix.rank and matrix.name not in backward.consumed:
        whole = whole_in_forward_bytes(shape, matrix.elements)
        states = shape.hidden_bytes * (shape.width < FP32_BYTES and shape.norm_is_decomposed)
        results = {"product": result, "scaled.grad": result * (shape.model.dropout == 0), "states": states}
        results["beside"] = max(result, whole) * (whole > 0)
        backward.run(results, results)


def run_residual(backward: LayerBackward, name: str) -> str:
    """Run what lies between a branch's last matrix and the residual stream; return the name of the gradient."""
    shape, gradient = backward.shape, "residual.grad"
    whole = shape.whole_hidden_bytes * shape.sequence_parallel
    gradients = {
        "branch.grad": shape.hidden_bytes * (shape.model.dropout > 0),
        "gathered_parts.grad": whole * (shape.sequences > 1),  # put together along the second dimension
        "gathered.grad": whole,
    }
    for result, size in gradients.items():
        if size:
            backward.run({result: size}, (gradient, f"{name}.mask"))
            gradient = result
    return gradient


def run_operator(backward: LayerBackward, branch: Branch, operator: Operator, branch_grad: str) -> None:
    """Run the backward of an operator, which makes gradients of its inputs and frees what it kept and took.

    `branch_grad` is the gradient of the branch's result.
    """
    shape, kind, gradient = backward.shape, operator.kind, f"{operator.output}.grad"
    gradients = {f"{name}.grad": shape.tensor_bytes(name) for name in operator.inputs}
    inputs = tuple(f"{branch.name}.{name}" for name in operator.inputs)
    matrices = {matrix.name: matrix for matrix in layer_matrices(shape.model)}
    is_shared = branch.operators[0].kind != "router"  # whether others need input and gradient after the experts
    if kind == "row":
        # The fused kernel keeps attention's output too.
        frees = () if branch.name == "attention" and shape.model.attention == "flash" else inputs
        output_grad = gradient if operator.output else branch_grad
        run_matrix(
            backward, matrices[operator.matrix], output_grad, shape.whole_hidden_bytes, operator.inputs[0], frees
        )
    elif kind == "column":
        name, others = operator.inputs[0], [each for each in branch.operators if each.inputs[0] == operator.inputs[0]]
        saved = (f"{branch.norm}.output" if name == "input" else f"{branch.name}.{name}",)
        is_last = operator is others[0]  # no other operator needs the input any more
        size, frees = shape.tensor_bytes(operator.output), saved if is_last else ()
        run_matrix(backward, matrices[operator.matrix], gradient, size, name, frees, is_followed_by_matrix=not is_last)
        backward.deferred += size
    elif kind == "router":
        run_router(backward, matrices[operator.matrix].elements, () if is_shared else (f"{branch.norm}.output",))
    elif kind == "combine":
        backward.run({f"{operator.inputs[0]}.grad": shape.routed_bytes}, () if is_shared else (branch_grad,))
        backward.run({}, experts="entered")
    elif kind == "dispatch":
        by_row = "by_row.grad"  # a copy in the order of tokens, whose rows are summed
        sizes = {by_row: shape.routed_bytes, "input.grad": shape.whole_hidden_bytes}
        backward.run(sizes, (gradient, by_row), experts="left")
    elif kind == "function":
        # The products of the inner activations and a gradient are summed to the weights' gradients.
        backward.run(gradients, (gradient, f"{ROUTING}.grad", *inputs))
    elif kind == "rotary":  # x * cos + rotate(x) * sin: the products' gradients and their sum
        size = shape.tensor_bytes(operator.output)
        backward.run({"times_sin.grad": size, "halves.grad": size // 2}, ("times_sin.grad",))
        backward.run({"rotated.grad": size}, ("halves.grad",))
        backward.run({"times_cos.grad": size}, (gradient,))
        backward.run({gradient: size}, ("rotated.grad", "times_cos.grad"))
    else:
        for results, frees in attention_backward_operators(shape):
            backward.run(results, frees)
        backward.free("attention")


def run_router(backward: LayerBackward, elements: int, frees: tuple[str, ...]) -> None:
    """Run the choice of experts, in fp32, whose input's gradient is added to that of the copies of tokens.

    `frees` is its input, if no other operator needs that any more.
    """
    shape, scores = backward.shape, backward.shape.scores_of_experts_bytes
    balance = scores * (shape.model.router_aux_loss_coef > 0)
    gradients = {"scores.grad": scores, "probabilities.grad": scores, "balance.grad": balance}
    backward.run(gradients, ("probabilities.grad", "balance.grad", "mlp.probabilities"))
    backward.free(*(f"mlp.{name}" for name in routing_tensors(shape)))
    wide = shape.whole_hidden_bytes * FP32_BYTES // shape.width * (shape.width < FP32_BYTES)
    backward.run({"summand.grad": shape.whole_hidden_bytes, "wide.grad": wide}, (), weight=elements)
    backward.run({"sum.grad": shape.whole_hidden_bytes}, ("scores.grad", "wide.grad", *frees), weight=elements)
    is_last = len(frees) > 0
    backward.run(
        {}, ("summand.grad", "sum.grad"), weight=elements, is_accumulation=True, is_followed_by_matrix=not is_last
    )


def run_matrix(
    backward: LayerBackward,
    matrix: Matrix,
    output_grad: str,
    output_bytes: int,
    name: str,
    frees: tuple[str, ...],
    is_followed_by_matrix: bool = True,
) -> None:
    """Run a matrix with the input of this name, and add its input's gradient to those by the matrices before it.

    `frees` are the tensors that were saved for it, if no other operator needs them any more. A frozen matrix has no
    gradient itself. The two of its adapter come before it: the scaled gradient of the output, and that of the rank.
    """
    shape = backward.shape
    if not shape.model.adapter.is_enabled:
        parts = (shape.tp if matrix.style else 1) * (shape.ep if matrix.experts else 1)
        for size in backward_temporaries(shape, *matrix.cut(shape.tp)) if shape.recipe != "none" else ():
            backward.run({"scaled": round(size)}, ("scaled",))
        run_product(backward, name, (output_grad, *frees), matrix.elements // parts, is_followed_by_matrix)
        return
    if matrix.rank:
        _, inner, outer = (round(math.prod(cut)) for cut in matrix.products(shape.tp).values())
        backward.run({"scaled.grad": output_bytes})
        saved = f"adapter.{matrix.name}"
        backward.run({"rank.grad": shape.tokens * matrix.rank * shape.width}, ("scaled.grad", saved), weight=outer)
        backward.run({}, weight=outer, is_accumulation=True)
        run_product(backward, name, ("rank.grad", *frees), inner)
    run_product(backward, name, (output_grad, *frees), 0, whole_bytes=whole_matrix_bytes(shape, matrix.elements))


def run_product(
    backward: LayerBackward,
    name: str,
    frees: tuple[str, ...],
    weight: int,
    is_followed_by_matrix: bool = True,
    whole_bytes: int = 0,
) -> None:
    """Run a product's backward, and sum its input's gradient and those of the products before it.

    It computes the gradient of so many elements of a weight, if that is trained. A quantized weight is whole, in so
    many bytes, until it is multiplied; forward has less beside it.
    """
    whole = backward.shape.whole_hidden_bytes if name == "input" else backward.shape.tensor_bytes(name)
    gradient = f"{name}.grad"
    is_first = gradient not in backward.temporaries
    results = {gradient if is_first else "summand.grad": whole, "whole_weight": whole_bytes}
    backward.run(results, (*frees, "whole_weight"), weight=weight)
    if not is_first:
        backward.run({"sum.grad": whole}, ("summand.grad", "sum.grad"), weight=weight)  # in the input's place
    if weight:
        backward.run({}, weight=weight, is_accumulation=True, is_followed_by_matrix=is_followed_by_matrix)


def run_norm(backward: LayerBackward, norm: str) -> None:
    """Run the backward of the norm before a branch, whose input's gradient is added to the residual stream's."""
    shape = backward.shape
    own, output_grad = shape.hidden_bytes, "input.grad"
    if shape.tp > 1:
        summed = shape.input_grad_reduction_bytes - shape.whole_hidden_bytes - own
        backward.run({"reduced.grad": own, "summed.grad": summed}, ("input.grad", "summed.grad"))
        output_grad = "reduced.grad"
    backward.free(f"{norm}.normalized")
    rest = shape.norm_backward_bytes - own
    backward.run({"norm.grad": rest}, ("norm.grad", output_grad))
    backward.free(f"{norm}.")
    backward.run({"norm_input.grad": own, "sum.grad": own}, ("norm_input.grad", "sum.grad"))
    backward.arrived = 0
