"""The proof that model state has the data types that its precision has in this engine."""

from collections import Counter
from collections.abc import Iterator, Sequence

from harness.config.schema import PrecisionConfig, RunConfig
from harness.cost_model.memory import estimate_memory
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.proof.layout import box_numel, reported_shards
from harness.records.rank_report import RankReport
from harness.tensors.shard import GATHERED

MASTER_BYTES = 4  # per parameter element, in fp32


def width_problems(
    config: RunConfig, layout: Layout, widths: StateWidths, ranks: Sequence[RankReport]
) -> Iterator[str]:
    """Yield where parameters, masters, moments or gradient accumulation are missing or of another width.

    The widths are those that the precision has in this engine. With matrices in 4 bits a rank's parameters must have
    the plan's bytes.
    """
    precision = config.precision
    adapter = config.model.adapter
    packed = {("", "uint8")} if adapter.is_quantized else set()
    expected = {
        "parameters": values_in(widths.parameters, precision),
        "frozen parameters": values_in(widths.frozen, precision) | packed if adapter.is_enabled else set(),
        "optimizer": {("master", precision.master)} if widths.masters else set(),
    }
    expected["optimizer"] |= state_dtypes(config, layout, ranks)
    for kind, allowed in expected.items():
        shards = (
            shard
            for rank in ranks
            for shard in reported_shards(rank, kind.removeprefix("frozen "))
            if kind == "optimizer" or adapter.trains(shard.name) is (kind == "parameters")
        )
        reported = {(shard.state_name, shard.dtype) for shard in shards}
        needed = {pair for pair in allowed if pair[0] != GATHERED}
        for name, dtype in sorted((reported - allowed) | (needed - reported)):
            verb = "are held but are no part of" if (name, dtype) in reported else "are not held but are part of"
            yield f"{kind}: {name or 'values'} in {dtype} {verb} precision={precision.name} in this engine"
    size = estimate_memory(config, layout, widths).parameter_bytes if packed else 0
    for rank in ranks if packed else ():
        if rank.parameter_bytes != size:
            yield f"parameters: rank {rank.rank} holds {rank.parameter_bytes} bytes, and 4 bits with scales make {size}"
    summed = {dtype for rank in ranks for dtype in rank.profiled.gradient_dtypes}
    for dtype in sorted(summed - {precision.accumulate}):
        yield (
            f"gradients: they are accumulated in {dtype}, and precision={precision.name} accumulates in"
            f" {precision.accumulate}"
        )


def values_in(width: int, precision: PrecisionConfig) -> set[tuple[str, str]]:
    """Return the dtype of parameters of this width, whole or not."""
    dtype = precision.compute if width < MASTER_BYTES else precision.master
    return {("", dtype), (GATHERED, dtype)}


def state_dtypes(config: RunConfig, layout: Layout, ranks: Sequence[RankReport]) -> set[tuple[str, str]]:
    """Return the optimizer's states with the dtypes that they must have for the tensors of these ranks.

    DeepSpeed's optimizer has one tensor of all that a rank holds.
    """
    states, master, expected = config.optimizer.spec.states, config.precision.master, set[tuple[str, str]]()
    for rank in ranks:
        own = [shard for shard in rank.optimizer_shards if shard.state_name in states]
        total = Counter[str]()
        for shard in own:
            total[shard.state_name] += box_numel(shard.box)
        for shard in own:
            elements = total[shard.state_name] if layout.uses_deepspeed_zero else box_numel(shard.box)
            expected.add((shard.state_name, states[shard.state_name].dtype_of(elements, master)))
    missing = states.keys() - {name for name, _ in expected}
    return expected | {(name, states[name].dtype or master) for name in missing}
