"""A plan: from the composed values of a command line to predictions of one layout, or of the best. Imports no torch."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from harness.config.arguments import normalize_arguments
from harness.config.from_dict import from_dict
from harness.config.hydra import compose_values, sweeper_params
from harness.config.schema import ClusterConfig
from harness.config.stack import StackConfig
from harness.cost_model.prediction import Prediction
from harness.hardware.machine import described_cluster
from harness.layout.layout import resolve_layout
from harness.planner.hf_config import hf_values
from harness.planner.row import SEARCH
from harness.planner.search import SearchResult, search
from harness.planner.sentences import say
from harness.planner.space import SearchedSpace, plan_problems, predict, undivided
from harness.runner.resolve import AUTO, TRAIN_DEFAULTS, resolve_auto, resolve_run_config
from harness.util.text import UserError


@dataclass(frozen=True)
class LayoutPlan:
    """The predictions for one combination of settings, or why there are none."""

    overrides: Sequence[str]  # that are planned
    values: Mapping[str, str]  # of the overrides, by the dotted key
    swept: str  # the settings that differ between the plans of a sweep, as they are typed
    predictions: Sequence[Prediction] = ()  # of the layout, or the choices of a search
    result: SearchResult | None = None  # of a search
    notes: Sequence[str] = ()  # what was chosen where the command line left a choice
    tokens: float | None = None  # of the whole training, if they are known
    refusal: str = ""


def plans(arguments: Sequence[str]) -> list[LayoutPlan]:
    """Return the plan of every combination of a command line, or why there is none.

    Raises UserError where that is the only combination, or no combination has a plan.
    """
    entries = [planned_or_refused(combination) for combination in combinations(arguments)]
    if all(entry.refusal for entry in entries):
        others = f", and none of the other {len(entries) - 1} combinations has a plan" if len(entries) > 1 else ""
        raise UserError(f"{entries[0].refusal}{others}")
    return entries


def against_words(arguments: Sequence[str], against: Sequence[str]) -> list[str]:
    """Return the settings of a plan with others in the place of those of the same key or group."""
    keys = {word.lstrip("+").partition("=")[0] for word in against}
    others = [word for word in arguments if not {word.partition("=")[0], word.partition(".")[0]} & keys]
    return [*others, *against]


def planned_or_refused(combination: LayoutPlan) -> LayoutPlan:
    """Return a combination of settings with its predictions, or with the reason why it cannot be planned."""
    try:
        return plan_layouts(combination)
    except UserError as error:
        return dataclasses.replace(combination, refusal=str(error))


def plan_layouts(plan: LayoutPlan) -> LayoutPlan:
    """Return a combination of settings with its predictions. Raises UserError for what cannot be planned."""
    values = dict(compose_values(*plan.overrides, primary="plan"))
    stack = from_dict(StackConfig, values.pop("stack"), "stack")
    cluster = described_cluster(from_dict(ClusterConfig, values["cluster"], "cluster"))
    world_size, train, strategy = values.get("world_size") or cluster.world_size, values["train"], values["strategy"]
    if values["model"].get("family") == "hf":
        cache = Path(values["data"]["cache"]).expanduser()
        values["model"] = hf_values(values["model"], train.get("seq_len"), cache)
        train = train | {"seq_len": train.get("seq_len") or values["model"]["context_length"]}
    plan, notes = dataclasses.replace(plan, tokens=values["plan"]["tokens"]), []
    if train.get("global_batch") == AUTO:  # that of a run, or with more devices than so many sequences one for each
        of_runs = TRAIN_DEFAULTS[cluster.device]["global_batch"]
        train = train | {"global_batch": max(of_runs, world_size)}
        notes = [say("global_batch", batch=train["global_batch"], of_runs=of_runs)]
    is_search = strategy.get("name") == SEARCH
    values |= {"train": train, "strategy": strategy | {"name": "single"} if is_search else strategy}
    config = resolve_run_config(resolve_auto(values, cluster.device, (cluster.hardware.compute_capability, 0)))
    if is_search:
        result, searched = search_layouts(SearchedSpace(config, cluster, stack, world_size, plan.values))
        return dataclasses.replace(plan, predictions=result.choices, result=result, notes=notes + searched)
    prediction = predict(config, resolve_layout(config.strategy, world_size), cluster, stack)
    for problem in plan_problems(prediction):
        raise UserError(problem)
    return dataclasses.replace(plan, predictions=[prediction], notes=notes)


def search_layouts(space: SearchedSpace) -> tuple[SearchResult, list[str]]:
    """Return the best layouts and what was chosen to find them. Raises UserError if no layout of the world is possible.

    State and activations on the host are searched if the command line has them there, or if nothing fits without:
    their copies are predicted by a datasheet alone.
    """
    result, notes = search(dataclasses.replace(space, wants_host=space.fixes_offload)), []
    if not result.best and not space.fixes_offload:
        result, notes = search(space), [say("searched_offload")]
    if not result.valid:
        most = max(result.problems, key=lambda problem: result.problems[problem], default="")
        batch, model = f"train.global_batch={space.config.train.global_batch}", f"model={space.config.model.name}"
        reason = most or f"no degrees that make up world_size={space.world_size} divide {batch} and {model}"
        raise UserError(f"strategy=search has no layout for world_size={space.world_size}: {reason}")
    problem = undivided(space)
    return result, [*notes, *say.of({"undivided": bool(problem)}, problem=problem)]


def combinations(arguments: Sequence[str]) -> list[LayoutPlan]:
    """Return every combination of comma lists, and of the lists of a sweep file, without its predictions.

    A key on the command line replaces the list that the sweep file has for it, as in a run. Raises UserError for a
    mistake.
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
        LayoutPlan(
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
