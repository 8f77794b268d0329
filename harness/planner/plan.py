"""A plan: from the composed values of a command line to predictions of one layout, or of the best. Imports no torch."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.from_dict import from_dict
from harness.config.schema import ClusterConfig, RunConfig
from harness.config.stack import StackConfig
from harness.config.values import ConfigValues
from harness.cost_model.remedies import Choices, Variant, remedies
from harness.layout.layout import Layout, resolve_layout
from harness.planner.cluster import PlannedCluster, plan_problems, planned_cluster
from harness.planner.hf_config import decoder_values
from harness.planner.predict import Prediction
from harness.planner.search import SearchResult, search
from harness.planner.space import Restrictions
from harness.runner.machine_defaults import AUTO, resolve_auto
from harness.runner.resolve import load_precision_preset, load_strategy_preset, resolve_run_config
from harness.util.errors import UserError

SEARCH = "search"  # the strategy that stands for all of them


@dataclass(frozen=True)
class Plan:
    """The predictions for one combination of settings."""

    predictions: Sequence[Prediction]  # of the layout, or the best of a search
    result: SearchResult | None = None  # of a search


def make_plan(values: ConfigValues, stack: StackConfig, fixed_keys: Mapping[str, Any]) -> Plan:
    """Return the plan of composed values; `fixed_keys` are the settings of the command line by their dotted keys.

    Raises UserError for what cannot be planned.
    """
    cluster = planned_cluster(from_dict(ClusterConfig, values["cluster"], "cluster"))
    world_size = values.get("world_size") or cluster.world_size
    if values["model"].get("family") == "hf":
        decoder = decoder_values(values["model"])
        if decoder is None:
            raise UserError(
                f"model.path={values['model']['path']} is of an architecture whose memory and time have no formulas"
                " here: choose a config.json of Llama, Mistral or GPT-2"
            )
        train = dict(values["train"])
        train["seq_len"] = train.get("seq_len") or decoder["context_length"]
        values = values | {"model": decoder, "train": train}
    is_search = values["strategy"].get("name") == SEARCH
    if values["train"].get("global_batch") == AUTO and cluster.device == "cuda" and world_size > 48:
        values = values | {"train": values["train"] | {"global_batch": world_size}}  # a sequence for every device
    if is_search:
        values = values | {"strategy": values["strategy"] | {"name": "single"}}
    config = resolve_run_config(resolve_auto(values, cluster.device))
    if is_search:
        return search_plan(config, cluster, stack, world_size, restrictions_of(config, fixed_keys))
    layout = resolve_layout(config.strategy, world_size)
    for problem in plan_problems(config, layout, cluster, stack):
        raise UserError(problem)
    return Plan([Prediction(config, layout, cluster, stack)])


def search_plan(
    config: RunConfig, cluster: PlannedCluster, stack: StackConfig, world_size: int, restrictions: Restrictions
) -> Plan:
    """Return the best layouts. Raises UserError if no layout of the world is possible."""
    result = search(config, cluster, stack, world_size, restrictions)
    if not result.valid:
        most = max(result.problems, key=lambda problem: result.problems[problem], default="")
        batch = f"train.global_batch={config.train.global_batch}"
        reason = most or f"no degrees that make up world_size={world_size} divide {batch} and model={config.model.name}"
        raise UserError(f"strategy=search has no layout for world_size={world_size}: {reason}")
    return Plan(result.best, result)


def restrictions_of(config: RunConfig, fixed_keys: Mapping[str, Any]) -> Restrictions:
    """Return what the command line fixes of a search."""
    prefix = "strategy."
    names = [key.removeprefix(prefix) for key in fixed_keys if key.startswith(prefix)]
    has_checkpointing = any(key.partition(".")[0] == "checkpointing" for key in fixed_keys)
    return Restrictions(
        {name: getattr(config.strategy, name) for name in names if name != "options"},
        config.checkpointing if has_checkpointing else None,
        config.train.micro_batch if "train.micro_batch" in fixed_keys else None,
    )


def offers(prediction: Prediction) -> Iterator[str]:
    """Yield what would make a prediction that does not fit one that does, each as what to type."""
    config, layout, cluster, stack = prediction.config, prediction.layout, prediction.cluster, prediction.stack

    def plan_variant(changed: RunConfig, world_size: int | None) -> Variant | None:
        """Return the changed configuration as the cluster, or more nodes of it, would run it."""
        ranks = world_size or layout.world_size
        try:
            strategy = changed.strategy
            other = wider_layout(layout, ranks) if strategy == config.strategy else resolve_layout(strategy, ranks)
            if other is None or any(plan_problems(changed, other, cluster.with_ranks(ranks), stack)):
                return None
        except UserError:
            return None
        return Variant(changed, other, Prediction(changed, other, cluster, stack).widths)

    def rank_bytes_if_fitting(variant: Variant) -> int | None:
        """Return the bytes of a rank of a changed configuration, or None if it does not fit."""
        changed = Prediction(variant.config, variant.layout, cluster.with_ranks(variant.layout.world_size), stack)
        return changed.needed_bytes if changed.fits else None

    choices = Choices(
        plan_variant,
        sharded=(load_strategy_preset("fsdp_full_shard"),),
        precisions=tuple(map(load_precision_preset, ("bf16_mixed", "bf16"))),
        offloads=cluster.device == "cuda",
    )
    yield from remedies(config, layout, choices, rank_bytes_if_fitting)


def wider_layout(layout: Layout, ranks: int) -> Layout | None:
    """Return the same layout over more data-parallel ranks; None if they do not divide evenly."""
    factor, rest = divmod(ranks, layout.world_size)
    if rest:
        return None
    axis = "dp_shard" if layout.dp_shard > 1 or layout.data_parallel != "ddp" else "dp_replicate"
    return dataclasses.replace(layout, **{axis: getattr(layout, axis) * factor})
