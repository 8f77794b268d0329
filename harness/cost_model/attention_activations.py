"""The tensors that attention keeps for backward, its scores, and its backward, on one rank. Imports no torch."""

from collections.abc import Iterator
from functools import lru_cache

from harness.cost_model.micro_batch_shape import FP32_BYTES, MicroBatchShape


def attention_tensors(shape: MicroBatchShape) -> dict[str, int]:
    """Return the bytes that attention keeps for backward, by tensor; its output is the input of o_proj.

    Under context parallelism a rank has two chunks of every sequence and gathers all keys and values; the chunks see
    (2 cp + 1) / (4 cp) of the scores together. The fused kernel then keeps the chunks' outputs beside what o_proj
    takes; on a CPU it takes a mask as wide as the scores of one head and sequence.
    """
    model, size, cp = shape.model, shape.query_bytes, shape.cp
    rows = shape.tokens * model.num_attention_heads // shape.tp
    gathered, repeated, scores, mask = shape.key_bytes, size, rows * shape.seq_len, shape.seq_len**2
    if cp > 1:
        visible_chunks, chunk = 2 * cp + 1, shape.seq_len // (2 * cp)  # of keys that both chunks of queries see
        gathered, repeated = gathered * cp, size * visible_chunks // 2
        scores, mask = rows * visible_chunks * chunk // 2, visible_chunks * chunk**2
    if shape.attention_is_decomposed:
        width = FP32_BYTES // shape.width
        value = gathered if cp > 1 else repeated
        tensors = {"query": size * width, "key": repeated * width, "value": value * width, "output": size}
        return tensors | dict.fromkeys(("weights_fp32", "weights_mask", "dropped"), scores * FP32_BYTES)
    if model.attention == "flash":  # arXiv 2205.14135: the scores are never stored
        keys = repeated if shape.repeats_grouped_heads else gathered
        tensors = {"query": size, "key": keys, "value": keys, "output": size, "logsumexp": rows * FP32_BYTES}
        mask_bytes = mask * shape.width if shape.device == "cpu" else 0
        return tensors | ({"chunks": size, "future_mask": mask_bytes} if cp > 1 else {})
    # Heads that need no repeating are views of what was gathered.
    keys = repeated if model.num_key_value_heads < model.num_attention_heads else gathered
    tensors = {"query": size, "key": keys, "value": keys, "output": size, "future_mask": mask}
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


def forward_copies_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes that live as long as eager attention's forward, beside what it keeps, when it has most scores.

    Products copy heads and sequences into one dimension, and grouped heads are repeated before. With context
    parallelism they are keys and values before they are stacked, gathered and put in order, and the weights of the
    first chunk, which sees the fewest keys.
    """
    query, keys = shape.query_bytes, shape.key_bytes
    if shape.model.attention != "eager":
        return 0
    if shape.cp > 1:
        return 2 * keys * (2 + shape.cp) + score_elements(shape) * FP32_BYTES // (2 * shape.cp)
    return 2 * query * (shape.sequences > 1) + 2 * keys * (keys < query)


@lru_cache(maxsize=4096)
def scores_bytes(shape: MicroBatchShape) -> int:
    """Return the bytes of attention's forward at its worst moment, with what it copies."""
    return sum(eager_score_tensors(shape).values()) + forward_copies_bytes(shape)


def attention_backward_operators(shape: MicroBatchShape) -> Iterator[tuple[dict[str, int], tuple[str, ...]]]:
    """Yield the results of each operator of the backward of attention's core, and the names of what it frees.

    It begins with `output.grad` and ends with the gradients of `query`, `key` and `value`. Those of keys and values
    that were repeated for every head, or gathered from all ranks, exist whole before.
    """
    query, keys = shape.query_bytes, shape.key_bytes
    has_scores = shape.model.attention == "eager" or shape.attention_is_decomposed
    whole = (query if has_scores or shape.repeats_grouped_heads else keys) * shape.cp
    scores_grad = "output.grad"
    for number, (size, frees) in enumerate(score_gradients(shape) if has_scores else ()):
        values = {} if number else {"whole_value.grad": whole}
        yield {f"scores_{number}.grad": size} | values, (scores_grad, *frees)
        scores_grad = f"scores_{number}.grad"
    saved = ("query", "key", "value", "output", "logsumexp", "chunks", "future_mask")
    results = {"whole_key.grad": whole, "whole_value.grad": whole, "query.grad": query}  # that of values exists by now
    yield results, (scores_grad, *(f"attention.{name}" for name in saved))
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
