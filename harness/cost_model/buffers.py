"""The memory that a rank needs to communicate, beside model state and activations. Imports no torch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import Stage, local_numel
from harness.layout.state_widths import StateWidths


def fsdp_groups(model: ModelConfig, layout: Layout, stages: Iterable[Stage]) -> dict[str, float]:
    """Return the elements of each group of parameters that sharding gathers together, by the group's name.

    Tensor parallelism has divided them already. Every layer is a group, and so are the embedding and the head, which
    are one group where they are tied.
    """
    groups: dict[str, float] = defaultdict(float)
    for stage in stages:
        for name, elements in local_numel(model, layout, stage).items():
            groups[fsdp_group_name(name, model)] += elements
    return groups


def fsdp_group_name(parameter: str, model: ModelConfig) -> str:
    """Return the name of a parameter's group: `layers.` and the index of its layer, `embedding` or `head`."""
    profile = model_profile(model)
    layer = profile.layer_index(parameter)
    if layer is not None:
        return f"layers.{layer}"
    return "embedding" if parameter in profile.embedding_shapes and not model.tie_word_embeddings else "head"


def buffer_tensors(config: RunConfig, layout: Layout, widths: StateWidths, stages: Sequence[Stage]) -> dict[str, int]:
    """Return the bytes of the buffers that a rank with these stages needs to communicate, by name."""
    groups = fsdp_groups(config.model, layout, stages)
    total = sum(groups.values())
    buffers: dict[str, int] = {"engine": widths.buffer_bytes}
    if layout.data_parallel == "ddp":
        # DDP's buckets are as large as the model in its own width. As bucket views fp32 gradients lie in them; in mixed
        # precision the buckets exist beside the fp32 gradients.
        copies = int(config.precision.is_mixed) + int(not config.strategy.gradient_as_bucket_view)
        buffers["ddp_buckets"] = round(copies * total * config.precision.compute_bytes)
    if layout.data_parallel == "fsdp" and layout.zero_stage < 3:  # parameters are whole until backward ends
        is_gathered = layout.shard_count("parameters") > 1
        packed = max(groups.values()) if is_gathered else 0  # the all-gather's result, before it is laid out
        buffers["gathered"] = round((total + packed) * widths.gathered)
    elif layout.zero_stage == 3:
        buffers["gathered"] = round(gathered_parameter_count(config.model, groups) * widths.gathered)
    return buffers


def gathered_parameter_count(model: ModelConfig, groups: Mapping[str, float]) -> float:
    """Return the most sharded parameters that are whole at once: a group in use, and the gather buffer of one group.

    A tied embedding is used first and last, so that fully_shard keeps it gathered all the way; DeepSpeed needs less.
    """
    if not model.tie_word_embeddings:
        return sum(sorted(groups.values())[-2:])
    root, layer = groups["head"], max(size for name, size in groups.items() if name != "head")
    return root + max(root, 2 * layer)


def unsharded_grad_bytes(config: RunConfig, layout: Layout, stages: Sequence[Stage]) -> int:
    """Return the bytes of the largest group's whole gradient and its flat copy on the wire.

    The result is 0 where gradients are not sharded.
    """
    if layout.shard_count("gradients") == 1:
        return 0
    widths = config.precision.compute_bytes + config.precision.reduce_bytes
    return round(max(fsdp_groups(config.model, layout, stages).values()) * widths)


def keeps_grad_buffers(config: RunConfig, layout: Layout) -> bool:
    """Return whether the memory of gradients is still allocated when a step begins."""
    if layout.data_parallel == "ddp":
        return config.strategy.gradient_as_bucket_view and not config.precision.is_mixed
    return layout.data_parallel != "fsdp" and layout.dp_enabled
