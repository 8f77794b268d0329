"""The tensors that attention keeps for backward, and its scores, on one rank. Imports no torch."""

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
    elements = shape.tokens * shape.model.num_attention_heads // shape.tp * shape.seq_len
    if shape.attention_is_decomposed:
        return dict.fromkeys(("scores", "softmax", "mask", "dropped"), elements * FP32_BYTES)
    if shape.model.attention == "flash":
        return {}
    if shape.cp > 1:  # one chunk of two at a time
        elements //= 2
    scores = {"scaled": elements * shape.width, "masked": elements * shape.width, "softmax": elements * FP32_BYTES}
    if shape.width < FP32_BYTES and shape.device == "cpu":  # on CUDA the softmax kernel widens as it reads
        scores["widened"] = elements * FP32_BYTES
    if not shape.model.dropout:
        return scores
    narrowed = elements * shape.width if shape.width < FP32_BYTES else 0
    in_dropout = {"scaled": elements * shape.width, "softmax": elements * FP32_BYTES, "narrowed": narrowed}
    in_dropout |= {"mask": elements * shape.dropout_mask_width, "dropped": elements * shape.width}
    return max(scores, in_dropout, key=lambda tensors: sum(tensors.values()))
