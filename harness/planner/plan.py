"""A plan: from the composed values of a command line to predictions of one layout, or of the best. Imports no torch."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from harness.config.arguments import normalize_arguments
from harness.config.from_dict import ConfigValues, from_dict
from harness.config.hydra import compose_values, sweeper_params
from harness.config.schema import ClusterConfig, RunConfig
from harness.config.stack import StackConfig
from harness.cost_model.prediction import Prediction
from harness.hardware.described_cluster import DescribedCluster, described_cluster
from harness.layout.layout import resolve_layout
from harness.planner.hf_config import hf_values
from harness.planner.problems import plan_problems, predict
from harness.planner.run_overrides import SEARCH
from harness.planner.search import SearchResult, search
from harness.planner.sentences import say
from harness.planner.space import Restrictions
from harness.runner.resolve import AUTO, TRAIN_DEFAULTS, resolve_auto, resolve_run_config
from harness.util.errors import UserError


@dataclass(frozen=True)
class Combination:
    """The overrides of one configuration, and their values by the dotted key."""

    overrides: Sequence[str]
    values: Mapping[str, str]
    swept: str  # the settings that differ between combinations, as they are typed; empty where there is one alone


@dataclass(frozen=True)
class LayoutPlan:
    """The predictions for one combination of settings."""

    predictions: Sequence[Prediction]  # of the layout, or the best of a search
    result: SearchResult | None = None  # of a search
    notes: Sequence[str] = ()  # what was chosen where the command line left a choice
    swept: str = ""  # the settings in which it differs from the other plans of a sweep
    overrides: Sequence[str] = ()  # that were planned


@dataclass(frozen=True)
class Refusal:
    """A combination of a sweep that cannot be planned, with the reason."""

    combination: Combination
    reason: str


def plans(arguments: Sequence[str]) -> list[LayoutPlan | Refusal]:
    """Return the plan of every combination of a command line, or why there is none.

    Raises UserError where that is the only combination, or no combination has a plan.
    """
    entries: list[LayoutPlan | Refusal] = []
    for combination in combinations(arguments):
        try:
            values = dict(compose_values(*combination.overrides, primary="plan"))
            stack = from_dict(StackConfig, values.pop("stack"), "stack")
            plan = plan_layouts(values, stack, combination.values)  # type: ignore[arg-type]
            entries.append(dataclasses.replace(plan, swept=combination.swept, overrides=combination.overrides))
        except UserError as error:
            entries.append(Refusal(combination, str(error)))
    first = entries[0]
    if isinstance(first, Refusal) and all(isinstance(entry, Refusal) for entry in entries):
        others = f", and none of the other {len(entries) - 1} combinations has a plan" if len(entries) > 1 else ""
        raise UserError(f"{first.reason}{others}")
    return entries


def plan_layouts(values: ConfigValues, stack: StackConfig, fixed_keys: Mapping[str, Any]) -> LayoutPlan:
    """Return the plan of composed values; `fixed_keys` are the settings of the command line by their dotted keys.

    Raises UserError for what cannot be planned.
    """
    cluster = described_cluster(from_dict(ClusterConfig, values["cluster"], "cluster"))
    world_size = values.get("world_size") or cluster.world_size
    if values["model"].get("family") == "hf":
        train = dict(values["train"])
        model = hf_values(values["model"], train.get("seq_len"), Path(values["data"]["cache"]).expanduser())
        train["seq_len"] = train.get("seq_len") or model["context_length"]
        values = values | {"model": model, "train": train}
    is_search = values["strategy"].get("name") == SEARCH
    values, notes = with_global_batch(values, cluster, world_size)
    if is_search:
        values = values | {"strategy": values["strategy"] | {"name": "single"}}
    config = resolve_run_config(resolve_auto(values, cluster.device))
    if is_search:
        return search_plan(config, cluster, stack, world_size, restrictions_of(config, fixed_keys), notes)
    layout = resolve_layout(config.strategy, world_size)
    for problem in plan_problems(config, layout, cluster, stack):
        raise UserError(problem)
    return LayoutPlan([predict(config, layout, cluster, stack)], notes=notes)


def with_global_batch(
    values: ConfigValues, cluster: DescribedCluster, world_size: int
) -> tuple[ConfigValues, Sequence[str]]:
    """Return the values with train.global_batch as a number, and a sentence on what `auto` became.

    It is that of a run, unless there are more devices than so many sequences; then each device has one.
    """
    if values["train"].get("global_batch") != AUTO:
        return values, ()
    of_runs = TRAIN_DEFAULTS[cluster.device]["global_batch"]
    batch = max(of_runs, world_size)
    note = say("global_batch", batch=batch, of_runs=of_runs)
    return values | {"train": values["train"] | {"global_batch": batch}}, (note,)


def search_plan(
    config: RunConfig,
    cluster: DescribedCluster,
    stack: StackConfig,
    world_size: int,
    restrictions: Restrictions,
    notes: Sequence[str] = (),
) -> LayoutPlan:
    """Return the best layouts. Raises UserError if no layout of the world is possible.

    State and activations on the host are searched if the command line has them there, or if nothing fits without:
    their copies are predicted by a datasheet alone.
    """
    result = search(config, cluster, stack, world_size, restrictions, offloads=restrictions.wants_offload)
    if not result.best and not restrictions.wants_offload:
        result = search(config, cluster, stack, world_size, restrictions)
        notes = [*notes, say("searched_offload")]
    if not result.valid:
        most = max(result.problems, key=lambda problem: result.problems[problem], default="")
        batch = f"train.global_batch={config.train.global_batch}"
        reason = most or f"no degrees that make up world_size={world_size} divide {batch} and model={config.model.name}"
        raise UserError(f"strategy=search has no layout for world_size={world_size}: {reason}")
    return LayoutPlan(result.best, result, notes)


def restrictions_of(config: RunConfig, fixed_keys: Mapping[str, Any]) -> Restrictions:
    """Return what the command line fixes of a search."""
    of_strategy, of_checkpointing = (
        [key.removeprefix(prefix) for key in fixed_keys if key.startswith(prefix)]
        for prefix in ("strategy.", "checkpointing.")
    )
    return Restrictions(
        {name: getattr(config.strategy, name) for name in of_strategy if name != "options"},
        config.checkpointing if "checkpointing" in fixed_keys else None,
        config.train.micro_batch if "train.micro_batch" in fixed_keys else None,
        {name: getattr(config.checkpointing, name) for name in of_checkpointing},
    )


def combinations(arguments: Sequence[str]) -> list[Combination]:
    """Return every combination of comma lists, and of the lists of a sweep file. Raises UserError for a mistake.

    A key on the command line replaces the list that the sweep file has for it, as in a run.
    """
    words = [word for word in normalize_arguments(arguments) if word not in ("-m", "--multirun")]
    parser = OverridesParser.create()
    overrides = parser.parse_overrides(words)
    keys = [override.key_or_group for override in overrides]
    if "sweeps" in keys:
        single = [str(override.input_line) for override in overrides if not override.is_sweep_override()]
        of_file = sweeper_params(*single, primary="plan")
        overrides += parser.parse_overrides([f"{key}={value}" for key, value in of_file.items() if key not in keys])
    choices = [[(override.key_or_group, text) for text in _typed(override)] for override in overrides]
    several = [len(entries) > 1 for entries in choices]
    return [
        Combination(
            [text for _, text in chosen],
            {key: text.partition("=")[2] for key, text in chosen},
            " ".join(text for (_, text), varies in zip(chosen, several, strict=True) if varies),
        )
        for chosen in itertools.product(*choices)
    ]


def _typed(override: Override) -> list[str]:
    """Return an override for each of its values, as it is typed."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
