"""The tensors that attention keeps for backward, its scores, and its backward, on one rank. Imports no torch."""

from collections.abc import Iterator

from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape


def attention_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes that attention keeps for backward, by tensor, its four projections included.

    The output is the input of o_proj.
    """
    model = shape.model
    size = shape.tokens * model.hidden_size * shape.width // shape.tp
    rows = shape.tokens * model.num_attention_heads // shape.tp
    if shape.cp > 1:
        return context_parallel_attention_tensors(shape, size, rows)
    if shape.attention_is_decomposed:
        fp32_size = size * FP32_BYTES // shape.width
        scores = dict.fromkeys(("weights_fp32", "weights_mask", "dropped"), rows * shape.seq_len * FP32_BYTES)
        return {"query": fp32_size, "key": fp32_size, "value": fp32_size, "output": size} | scores
    if model.attention == "flash":  # arXiv 2205.14135: the scores are never stored
        keys = size if shape.repeats_grouped_heads else size * model.num_key_value_heads // model.num_attention_heads
        return {"query": size, "key": keys, "value": keys, "output": size, "logsumexp": rows * FP32_BYTES}
    tensors = {"query": size, "key": size, "value": size, "output": size}  # keys and values repeated to every head
    tensors |= {"future_mask": shape.seq_len**2, "weights_fp32": rows * shape.seq_len * FP32_BYTES}
    if model.dropout:
        return tensors | {
            "weights_mask": rows * shape.seq_len * shape.dropout_mask_width,
            "dropped": rows * shape.seq_len * shape.width,
        }
    return tensors if shape.width == FP32_BYTES else tensors | {"weights": rows * shape.seq_len * shape.width}


def context_parallel_attention_tensors(shape: MicroBatchShape, size: int, rows: int) -> dict[str, int]:
    """Return the bytes that attention keeps for backward under context parallelism, by tensor.

    A rank has two chunks of every sequence and gathers all keys and values; the chunks see (2 cp + 1) / (4 cp) of the
    scores together. `size` is the bytes of the rank's queries, `rows` the number of its rows of scores. The fused
    kernel keeps the chunks' outputs beside what o_proj takes; on a CPU it takes a mask as wide as the scores of one
    head and sequence.
    """
    model, visible_chunks = shape.model, 2 * shape.cp + 1  # chunks of keys that both chunks of queries see
    gathered = size * shape.cp * model.num_key_value_heads // model.num_attention_heads
    chunk = shape.seq_len // (2 * shape.cp)
    has_grouped_heads = model.num_key_value_heads < model.num_attention_heads
    repeated = size * visible_chunks // 2  # keys of every visible chunk, for every head
    scores = rows * visible_chunks * chunk // 2
    if shape.attention_is_decomposed:
        width = FP32_BYTES // shape.width
        tensors = {"query": size * width, "key": repeated * width, "value": gathered * width, "output": size}
        return tensors | dict.fromkeys(("weights_fp32", "weights_mask", "dropped"), scores * FP32_BYTES)
    if model.attention == "flash":
        keys = repeated if has_grouped_heads and shape.repeats_grouped_heads else gathered
        tensors = {"query": size, "key": keys, "value": keys, "output": size, "chunks": size}
        mask = visible_chunks * chunk**2 * shape.width if shape.device == "cpu" else 0
        return tensors | {"logsumexp": rows * FP32_BYTES, "future_mask": mask}
    keys = repeated if has_grouped_heads else gathered  # heads that need no repeating are views of what was gathered
    tensors = {"query": size, "key": keys, "value": keys, "output": size, "future_mask": visible_chunks * chunk**2}
    tensors["weights_fp32"] = scores * FP32_BYTES
    if model.dropout:
        return tensors | {"weights_mask": scores * shape.dropout_mask_width, "dropped": scores * shape.width}
    return tensors if shape.width == FP32_BYTES else tensors | {"weights": scores * shape.width}


def eager_score_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes of eager attention's scores in its softmax, the worst moment of its forward; none for flash."""
    elements = score_elements(shape)
    if shape.attention_is_decomposed:
        return dict.fromkeys(("scores", "softmax", "mask", "dropped"), elements * FP32_BYTES)
    if shape.model.attention == "flash":
        return {}
    scores = {"scaled": elements * shape.width, "masked": elements * shape.width, "softmax": elements * FP32_BYTES}
    if widens_scores(shape):
        scores["widened"] = elements * FP32_BYTES
    if not shape.model.dropout:
        return scores
    narrowed = elements * shape.width if shape.width < FP32_BYTES else 0
    in_dropout = {"scaled": elements * shape.width, "softmax": elements * FP32_BYTES, "narrowed": narrowed}
    in_dropout |= {"mask": elements * shape.dropout_mask_width, "dropped": elements * shape.width}
    return max(scores, in_dropout, key=lambda tensors: sum(tensors.values()))


def heads_bytes(shape: MicroBatchShape) -> tuple[int, int]:
    """Return the bytes of the queries' heads on one rank, and of the keys' before any are repeated or gathered."""
    query = shape.tokens * shape.model.hidden_size * shape.width // shape.tp
    return query, query * shape.model.num_key_value_heads // shape.model.num_attention_heads


def forward_copies_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes that live as long as eager attention's forward, beside what it keeps, when it has most scores.

    Products copy heads and sequences into one dimension, and grouped heads are repeated before. With context
    parallelism they are keys and values before they are stacked, gathered and put in order, and the weights of the
    first chunk, which sees the fewest keys.
    """
    query, keys = heads_bytes(shape)
    if shape.model.attention != "eager":
        return 0
    if shape.cp > 1:
        return 2 * keys * (2 + shape.cp) + score_elements(shape) * FP32_BYTES // (2 * shape.cp)
    return 2 * query * (shape.sequences > 1) + 2 * keys * (keys < query)


def attention_backward_operators(shape: MicroBatchShape) -> Iterator[tuple[dict[str, int], tuple[str, ...]]]:
    """Yield the results of each operator of the backward of attention's core, and the names of what it frees.

    It begins with `output.grad` and ends with the gradients of `query`, `key` and `value`. Those of keys and values
    that were repeated for every head, or gathered from all ranks, exist whole before.
    """
    query, keys = heads_bytes(shape)
    has_scores = shape.model.attention == "eager" or shape.attention_is_decomposed
    whole = (query if has_scores or shape.repeats_grouped_heads else keys) * shape.cp
    scores_grad = "output.grad"
    if has_scores:
        for number, (size, frees) in enumerate(score_gradients(shape)):
            values = {} if number else {"whole_value.grad": whole}
            yield {f"scores_{number}.grad": size} | values, (scores_grad, *frees)
            scores_grad = f"scores_{number}.grad"
        whole_keys = {"whole_key.grad": whole}
    else:
        whole_keys = {"whole_key.grad": whole, "whole_value.grad": whole}
    saved = ("query", "key", "value", "output", "logsumexp", "chunks", "future_mask")
    yield whole_keys | {"query.grad": query}, (scores_grad, *(f"attention.{name}" for name in saved))
    yield {"key.grad": keys, "value.grad": keys}, ("whole_key.grad", "whole_value.grad")


def score_gradients(shape: MicroBatchShape) -> list[tuple[int, tuple[str, ...]]]:
    """Return the bytes of each gradient of scores in memory, from the weights' to the scaled products', in order.

    With each are the names of the kept tensors that its operator frees.
    """
    fp32 = score_elements(shape) * FP32_BYTES
    width = fp32 if shape.attention_is_decomposed else score_elements(shape) * shape.width
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
    elements = shape.tokens * shape.model.num_attention_heads // shape.tp * shape.seq_len
    return elements // 2 if shape.cp > 1 and not shape.attention_is_decomposed else elements
