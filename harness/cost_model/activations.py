"""The tensors that a micro-batch's forward saves for backward on one rank, under each kind of checkpointing. No torch.

The formulas follow Korthikanti et al. (arXiv 2205.05198), derived anew for the blocks that run here: RMSNorm or
LayerNorm, grouped heads, a flash kernel, SwiGLU or GELU. Tensor parallelism divides what lies between the matrices of
attention and MLP; sequence parallelism also divides the norms and the residual stream, but not the norms' outputs: each
is gathered for the projections, which keep it whole.

The paper's GPT layer keeps sbh(34 + 5as/h) bytes in 16 bit with eager attention and dropout. Ours keeps on CUDA
34sbh + 7as²b + 16sb + s²: the softmax is computed and kept in fp32 (4as²b, not 2), and the norms' statistics (a mean
and a reciprocal root in fp32 each) and the causal mask are kept too. On CPU a dropout's mask is as wide as what it
drops, not a byte: 36sbh + 8as²b + 8sb + s². The flash kernel keeps 34sbh + 4asb + 16sb on CUDA; a CPU has none with
dropout: scaled_dot_product_attention runs plain operations in fp32, which keep 42sbh + 12as²b + 8sb.
"""

from collections.abc import Iterator
from functools import lru_cache

from harness.config.schema import CheckpointingConfig
from harness.cost_model.micro_batch_shape import FP32_BYTES, INT64_BYTES, MicroBatchShape
from harness.layout.layer_spec import layer_matrices

ROUTING = "routing"  # the output of a router: weights and indices, which routing_tensors() has

# The tensors between query, key, value and output: those of plain operations, a fused kernel and context parallelism.
ATTENTION_CORE = tuple(f"attention.{name}" for name in ("future_mask", "weights", "dropped", "logsumexp", "result"))


def norm_tensors(name: str, shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes that one norm keeps for backward, and its output, which the projections behind it keep.

    On CPU torch computes RMSNorm by plain operations in fp32, which keep two fp32 copies. On CUDA, and for LayerNorm
    everywhere, one kernel keeps its input. The statistics are fp32, but a CPU's LayerNorm has them as wide as its
    input.
    """
    decomposed = shape.norm_is_decomposed
    statistic_width = shape.width if shape.device == "cpu" and not decomposed else FP32_BYTES
    size = shape.residual_tokens * shape.model.hidden_size
    tensors = {
        f"{name}.input": size * (FP32_BYTES if decomposed else shape.width),
        f"{name}.rstd": shape.residual_tokens * statistic_width,
    }
    if shape.model.architecture.norm == "layer":
        tensors[f"{name}.mean"] = shape.residual_tokens * statistic_width
    if decomposed and shape.model.adapter.trains(name):  # for the gradient of its weight
        tensors[f"{name}.normalized"] = size * FP32_BYTES
    return tensors | {f"{name}.output": shape.tokens * shape.model.hidden_size * shape.width}


@lru_cache(maxsize=4096)
def block_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes of every tensor that one decoder layer keeps for backward, by name."""
    ranks = {matrix.name: matrix.rank for matrix in layer_matrices(shape.model) if matrix.rank}
    tensors = {f"adapter.{name}": shape.tokens * rank * shape.width for name, rank in ranks.items()}
    for branch in shape.model.architecture.branches:
        tensors |= norm_tensors(branch.norm, shape)
        for operator in branch.operators:
            if operator.kind == "attention":
                tensors |= {f"{branch.name}.{name}": size for name, size in attention_tensors(shape).items()}
            elif operator.kind == "router":
                tensors |= {f"{branch.name}.{name}": size for name, size in routing_tensors(shape).items()}
            elif operator.kind == "dispatch":
                tensors[f"{branch.name}.{operator.output}"] = shape.tensor_bytes(operator.output)
            elif operator.kind == "function":
                inputs = (name for name in operator.inputs if name != ROUTING)
                tensors |= {f"{branch.name}.{name}": shape.tensor_bytes(name) for name in inputs}
            elif operator.kind == "row" and (
                ranks.get(operator.matrix) or shape.saves_all_inputs or not shape.model.adapter.is_enabled
            ):
                tensors.setdefault(f"{branch.name}.{operator.inputs[0]}", shape.tensor_bytes(operator.inputs[0]))
        if shape.model.dropout:
            tensors[f"{branch.name}.mask"] = shape.dropout_mask_bytes
    return tensors


def adapted_sum_bytes(shape: MicroBatchShape, saved: dict[str, int]) -> int:
    """Return the bytes that a forward has beside its saved products when it adds an adapter to the widest matrix.

    They are the result, the adapter's scaled part and the matrix's own, which peft copies if it is quantized, the
    gate's activation, and the layer's hidden states and their norm. What the last matrix saves is not there yet.
    """
    *_, matrix, last = layer_matrices(shape.model)
    if not matrix.rank:
        return 0
    tensors = 2 + (shape.model.family == "llama") + (shape.model.adapter.is_quantized or matrix.name not in saved)
    later = sum(saved.get(name, 0) for name in last.products())
    return max(0, tensors * shape.inner_bytes + shape.whole_hidden_bytes + shape.hidden_bytes - later)


def routing_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes that a router keeps for backward, by tensor.

    They are probabilities in fp32, those of the experts that were chosen and their sums, what divides by these, and
    indices: of experts, of tokens in the order of experts, of their rows, and of each token's rows. Ranks that divide
    the experts keep two more indices of the rows that they received.
    """
    model, rows = shape.model, shape.routed_rows
    sums = (rows + shape.tokens) * FP32_BYTES * model.norm_topk_prob
    indices = (4 + 2 * (shape.ep > 1)) * rows * INT64_BYTES
    return {
        "probabilities": shape.scores_of_experts_bytes,
        "sums": sums,
        "indices": indices,
        "weights": rows * shape.width,
        "slopes": shape.sequences * model.num_experts * FP32_BYTES * (model.router_aux_loss_coef > 0),
    }


def attention_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes that attention keeps for backward, by tensor; its output is the input of o_proj.

    Under context parallelism a rank has two chunks of every sequence and gathers all keys and values; the chunks see
    (2 cp + 1) / (4 cp) of the scores together. The fused kernel then keeps the chunks' outputs beside what o_proj
    takes; on a CPU it takes a mask as wide as the scores of one head and sequence. Where ranks exchange heads it keeps
    its own output too.
    """
    model, size, cp = shape.model, shape.query_bytes, shape.key_ranks
    scores, gathered, repeated, mask = visible_scores(shape), shape.core_key_bytes, size, shape.seq_len**2
    if cp > 1:
        visible_chunks, chunk = 2 * cp + 1, shape.seq_len // (2 * cp)  # of keys that both chunks of queries see
        repeated, mask = size * visible_chunks // 2, visible_chunks * chunk**2
    if shape.attention_is_decomposed:
        width = FP32_BYTES // shape.width
        value = gathered if cp > 1 else repeated
        tensors = {"query": size * width, "key": repeated * width, "value": value * width, "output": size}
        return tensors | dict.fromkeys(("weights_fp32", "weights_mask", "dropped"), scores * FP32_BYTES)
    if model.attention == "flash":  # arXiv 2205.14135: the scores are never stored
        keys = repeated if shape.repeats_grouped_heads else gathered
        tensors = {
            "query": size,
            "key": keys,
            "value": keys,
            "output": size,
            "logsumexp": score_rows(shape) * FP32_BYTES,
        }
        mask_bytes = mask * shape.width if shape.device == "cpu" and cp > 1 else 0
        return tensors | ({"result": size, "future_mask": mask_bytes} if shape.cp > 1 else {})
    # Heads that need no repeating are views of what was gathered.
    keys = repeated if model.num_key_value_heads < model.num_attention_heads else gathered
    tensors = {"query": size, "key": keys, "value": keys, "output": size, "future_mask": mask}
    tensors["weights_fp32"] = scores * FP32_BYTES
    if model.dropout:
        return tensors | {"weights_mask": scores * shape.mask_width(shape.width), "dropped": scores * shape.width}
    return tensors if shape.width == FP32_BYTES else tensors | {"weights": scores * shape.width}


def recomputed_attention_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes of the tensors that a layer keeps and that a second forward of attention's core computes.

    The second forward takes the layer's other tensors as its inputs.
    """
    block, model = block_tensors(shape), shape.model
    is_eager, is_grouped = model.attention == "eager", model.num_key_value_heads < model.num_attention_heads
    # Eager products copy heads and sequences into one dimension, plain operations into fp32.
    is_copied = shape.attention_is_decomposed or (is_eager and shape.sequences > 1)
    is_repeated = shape.repeats_grouped_heads or (is_eager and is_grouped)
    is_gathered = shape.key_ranks > 1  # from all ranks
    names = [name for name in block if name.startswith(ATTENTION_CORE)]
    names += ["attention.query"] * (shape.exchanges_heads or (is_copied and not is_gathered))
    names += ["attention.key", "attention.value"] * (is_copied or is_repeated or shape.cp > 1)
    return {name: block[name] for name in names}


def selectively_saved_tensors(shape: MicroBatchShape, checkpointing: CheckpointingConfig) -> dict[str, int]:
    """Return the bytes of the results of matrix products and of attention that selective checkpointing keeps.

    A tensor that a layer keeps without checkpointing too has its name in block_tensors. A row-parallel product is this
    rank's summand, of full size.
    """
    block, model, size, grouped = block_tensors(shape), shape.model, shape.query_bytes, shape.key_bytes
    operators = [(branch.name, operator) for branch in model.architecture.branches for operator in branch.operators]
    products = {
        operator.matrix: f"{name}.{operator.output}" for name, operator in operators if operator.kind == "column"
    }
    saved = {
        each.matrix: shape.routed_bytes if each.is_grouped else shape.whole_hidden_bytes
        for _, each in operators
        if each.kind == "row"
    }
    saved |= {each.matrix: shape.scores_of_experts_bytes for _, each in operators if each.kind == "router"}
    saved |= {"q_proj": size, "k_proj": grouped}
    shared = [product for product in products.values() if not product.startswith("attention.")]
    if shape.score_width:
        saved |= {"scores": visible_scores(shape) * shape.score_width, "mixed": size * shape.score_width // shape.width}
    else:
        shared += ["attention.result" if shape.cp > 1 else "attention.output", "attention.logsumexp"]
    if shape.score_width or shape.cp > 1 or shape.repeats_grouped_heads:  # values are gathered or repeated again
        saved["v_proj"] = grouped
    else:
        shared.append(products["v_proj"])
    adapted = [matrix for matrix in layer_matrices(model) if matrix.rank]
    sums = [products.get(matrix.name) for matrix in adapted]  # of two products, which are computed again
    saved |= {name: block[name] for name in shared if name not in sums}
    for name, (outputs, _) in (product for matrix in adapted for product in matrix.products(shape.tp).items()):
        saved[name] = round(shape.tokens * outputs * shape.width)
    recomputed = checkpointing.recomputed_products(name for each in layer_matrices(model) for name in each.products())
    not_saved = {*recomputed, *(products.get(name) for name in recomputed)}
    return {name: size for name, size in saved.items() if name not in not_saved}


def layer_activations(
    shape: MicroBatchShape, checkpointing: CheckpointingConfig, is_recomputed: bool
) -> dict[str, int]:
    """Return the bytes that a layer keeps before its backward, by tensor."""
    block = block_tensors(shape)
    if checkpointing.name == "attention":
        recomputed = recomputed_attention_tensors(shape)
        saved = {name: size for name, size in block.items() if name not in recomputed}
        inputs = {f"attention.{name}": shape.tensor_bytes(name) for name in ("query", "key", "value")}
        return saved | {f"{name}.input": size for name, size in inputs.items() if name in recomputed}
    if not is_recomputed:
        return block
    saved = selectively_saved_tensors(shape, checkpointing) if checkpointing.name == "selective" else {}
    return {"input": shape.hidden_bytes} | saved


def eager_score_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes of eager attention's scores in its softmax, the worst moment of its forward; none for flash."""
    if not shape.score_width:
        return {}
    elements, size = score_elements(shape), score_elements(shape) * shape.score_width
    scores = {"scaled": size, "masked": size, "softmax": elements * FP32_BYTES}
    if widens_scores(shape):
        scores["widened"] = elements * FP32_BYTES
    if not shape.model.dropout:
        return scores
    narrowed = size if shape.score_width < FP32_BYTES else 0
    mask = elements * shape.mask_width(shape.score_width)
    in_dropout = {"scaled": size, "softmax": elements * FP32_BYTES, "narrowed": narrowed, "mask": mask, "dropped": size}
    return max(scores, in_dropout, key=lambda tensors: sum(tensors.values()))


def forward_copies_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes that live as long as eager attention's forward, beside what it keeps, when it has most scores.

    Products copy heads and sequences into one dimension, and grouped heads are repeated before. With context
    parallelism they are keys and values before they are stacked, gathered and put in order, and the weights of the
    first chunk, which sees the fewest keys, or else all heads before they are exchanged.
    """
    query, keys = shape.query_bytes, shape.key_bytes
    if shape.model.attention != "eager":
        return 0
    if shape.exchanges_heads:
        return query + 2 * keys + exchanged_copies_bytes(shape)
    if shape.key_ranks > 1:
        return 2 * keys * (2 + shape.cp) + score_elements(shape) * FP32_BYTES // (2 * shape.cp)
    return 2 * query * (shape.sequences > 1) + 2 * keys * (keys < query)


def exchanged_copies_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes of exchanged keys and values that eager attention repeats, and of grouped heads sent repeated.

    They live as long as its forward; none where ranks exchange no heads.
    """
    sent = 2 * shape.core_key_bytes * (shape.exchanges_heads and shape.model.attention == "eager")
    return sent * ((shape.core_key_bytes < shape.query_bytes) + (shape.core_key_bytes > shape.key_bytes))


def attention_backward_operators(shape: MicroBatchShape) -> Iterator[tuple[dict[str, int], tuple[str, ...]]]:
    """Yield the results of each operator of the backward of attention's core, and the names of what it frees.

    It begins with `output.grad` and ends with the gradients of `query`, `key` and `value`. Those of keys and values
    that were repeated for every head, or gathered from all ranks, exist whole before.
    """
    query, keys = shape.query_bytes, shape.key_bytes
    is_repeated = shape.score_width or shape.repeats_grouped_heads
    whole = query * shape.key_ranks if is_repeated else shape.core_key_bytes
    scores_grad = "output.grad"
    for number, (size, frees) in enumerate(score_gradients(shape) if shape.score_width else ()):
        values = {} if number else {"whole_value.grad": whole}
        yield {f"scores_{number}.grad": size} | values, (scores_grad, *frees)
        scores_grad = f"scores_{number}.grad"
    saved = ("query", "key", "value", "output", "logsumexp", "result", "future_mask")
    results = {"whole_key.grad": whole, "whole_value.grad": whole, "query.grad": query}  # that of values exists by now
    yield results, (scores_grad, *(f"attention.{name}" for name in saved))
    yield {"key.grad": keys, "value.grad": keys}, ("whole_key.grad", "whole_value.grad")


def score_gradients(shape: MicroBatchShape) -> list[tuple[int, tuple[str, ...]]]:
    """Return the bytes of each gradient of scores in memory, from the weights' to the scaled products', in order.

    With each are the names of the kept tensors that its operator frees.
    """
    fp32 = score_elements(shape) * FP32_BYTES
    width = score_elements(shape) * shape.score_width
    in_softmax = fp32 if widens_scores(shape) else width
    return [
        (width, ("attention.value", "attention.dropped", "attention.weights")),
        *([(width, ("attention.weights_mask",))] if shape.model.dropout else []),
        *([(fp32, ())] if width < fp32 else []),
        (in_softmax, ("attention.weights_fp32",)),
        *([(width, ())] if in_softmax > width else []),
        *([] if shape.attention_is_decomposed else [(width, ("attention.future_mask",)), (width, ())]),
    ]


def widens_scores(shape: MicroBatchShape) -> bool:
    """Return whether eager attention's scores are copied to fp32 before the softmax, as in 16 bit they are.

    For fp16 on CUDA alone torch's softmax widens them as it reads (ATen's SoftMax.cpp, at::softmax).
    """
    return shape.width < FP32_BYTES and (shape.device == "cpu" or shape.compute_dtype != "float16")


def score_elements(shape: MicroBatchShape) -> int:
    """Return the elements of the scores that a rank has at once; with context parallelism those of one chunk of two."""
    elements = score_rows(shape) * shape.seq_len
    return elements // 2 if shape.key_ranks > 1 and not shape.attention_is_decomposed else elements


def visible_scores(shape: MicroBatchShape) -> int:
    """Return the elements of a rank's scores; with context parallelism those of keys that its two chunks see."""
    elements = score_rows(shape) * shape.seq_len
    return elements * (2 * shape.cp + 1) // (4 * shape.cp) if shape.key_ranks > 1 else elements


def score_rows(shape: MicroBatchShape) -> int:
    """Return the rows of a rank's scores, one of each query's head."""
    return shape.tokens * shape.model.num_attention_heads // shape.heads_tp
