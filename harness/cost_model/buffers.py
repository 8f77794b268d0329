"""What a rank holds beside model state and activations to communicate. Imports no torch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.config.schema import ModelConfig, RunConfig
from harness.cost_model.activations import WIDTH_BYTES
from harness.layout.layout import Layout
from harness.layout.parameters import embedding_shapes
from harness.layout.partition import Stage, local_numel
from harness.layout.state_widths import StateWidths


def fsdp_groups(model: ModelConfig, layout: Layout, held: Iterable[Stage]) -> dict[str, float]:
    """Parameters of the groups that sharding gathers whole, as large as tensor parallelism leaves them, by name.

    Every layer is one, the embedding and the head; tied they are one.
    """
    found: dict[str, float] = defaultdict(float)
    for stage in held:
        for name, elements in local_numel(model, layout, stage).items():
            found[group_of(name, model)] += elements
    return found


def group_of(parameter: str, model: ModelConfig) -> str:
    """The path of its layer, embedding or head."""
    paths = model.asked.layers if model.asked else (".".join(parameter.split(".")[:2]),)
    layer = next((path for path in paths if parameter.startswith(f"{path}.")), None)
    if layer is not None and (model.asked or layer.startswith("layers.")):
        return layer
    return "embedding" if parameter in embedding_shapes(model) and not model.tie_word_embeddings else "head"


def buffer_tensors(config: RunConfig, layout: Layout, widths: StateWidths, held: Sequence[Stage]) -> dict[str, int]:
    """Bytes of what a rank that holds these stages needs to communicate, by name."""
    groups = fsdp_groups(config.model, layout, held)
    total = sum(groups.values())
    compute = WIDTH_BYTES[config.precision.compute]
    buffers: dict[str, int] = {"engine": widths.buffer_bytes}
    if layout.data_parallel == "ddp":
        # DDP's buckets are as large as the model in its own width. With views fp32 gradients lie in them; in mixed
        # precision they are there beside the fp32 gradients.
        copies = int(config.precision.is_mixed) + int(not bucket_views(config))
        buffers["ddp_buckets"] = round(copies * total * compute)
    if layout.data_parallel == "fsdp" and layout.zero_stage < 3:  # whole from forward to the end of backward
        packed = (
            max(groups.values()) if layout.shard_count("parameters") > 1 else 0
        )  # what arrives, before it is laid out
        buffers["gathered"] = round((total + packed) * widths.gathered)
    elif layout.zero_stage == 3:
        buffers["gathered"] = round(gathered_parameters(config.model, groups) * widths.gathered)
    return buffers


def gathered_parameters(model: ModelConfig, groups: Mapping[str, float]) -> float:
    """Parameters whole at once when they are sharded: a group in use beside the gather buffer of one group.

    A tied embedding serves first and last, so fully_shard keeps it gathered all the way; DeepSpeed needs less.
    """
    if not model.tie_word_embeddings:
        return sum(sorted(groups.values())[-2:])
    root, layer = groups["head"], max(size for name, size in groups.items() if name != "head")
    return root + max(root, 2 * layer)


def unsharded_grad_bytes(config: RunConfig, layout: Layout, held: Sequence[Stage]) -> int:
    """Where gradients are sharded: the largest group's whole gradient and its flat copy on the wire."""
    if layout.shard_count("gradients") == 1:
        return 0
    widths = WIDTH_BYTES[config.precision.compute] + WIDTH_BYTES[config.precision.reduce]
    return round(max(fsdp_groups(config.model, layout, held).values()) * widths)


def bucket_views(config: RunConfig) -> bool:
    """Whether DistributedDataParallel's gradients lie in its buckets, held once; torch's own default is false."""
    return bool(config.strategy.options.get("gradient_as_bucket_view", True))


def ddp_options(config: RunConfig) -> dict[str, Any]:
    """DistributedDataParallel's own arguments."""
    return config.strategy.options | {"gradient_as_bucket_view": bucket_views(config)}


def keeps_grad_buffers(config: RunConfig, layout: Layout) -> bool:
    """Whether memory of gradients is held when a step begins."""
    if layout.data_parallel == "ddp":
        return bucket_views(config) and not config.precision.is_mixed
    return layout.data_parallel != "fsdp" and layout.dp > 1
