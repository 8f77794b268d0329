"""The settings of a translation as a command line has them, and as files of conf/strategy and sweeps/."""

import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.config.from_dict import GroupValues
from harness.config.hydra import dataclass_defaults
from harness.config.locations import PACKAGED_CONF, PRESETS, files_in
from harness.config.mistakes import choices_of
from harness.config.schema import RunConfig
from harness.config.strategy import StrategyConfig
from harness.foreign.read import read_file, read_line, table
from harness.foreign.rules import Translation, translated
from harness.planner.plan import against_words
from harness.planner.row import strategy_presets
from harness.runner.resolve import preset_values
from harness.util.text import UserError

CLUSTER, GPUS = "8xh100", 8  # what a plan is for until the user names another cluster

FREE = ("name", "options", "literature")  # of a strategy: what does not decide which preset is nearest

MARK = "# Imported from"  # the first words of a strategy file that is not a preset of the package


@dataclass(frozen=True)
class Imported:
    """What a configuration of another program is here: its translation, and the words of a command line."""

    translation: Translation
    words: Sequence[str]  # the settings of a plan
    run_words: Sequence[str]  # those of a run, whose machine is the one at hand
    others: Sequence[str]  # model, batch and everything else but the strategy
    preset: str  # the nearest strategy
    strategy: GroupValues  # the values that differ from the defaults of a strategy


def import_configuration(file: Path | None, line: Sequence[str] = (), settings: Sequence[str] = ()) -> Imported:
    """Return what a file and a launch line of other programs are here, with settings of ours that replace theirs.

    Raises UserError for a mistake in them.
    """
    sources = read_line(line) if line else []
    translation = translated(sources if file is None else [*sources, read_file(file)], settings)
    facts = translation.facts
    usual = {"cluster.nodes": 1, "cluster.gpus_per_node": GPUS, "stack.name": "harness"}
    machine = [f"{key.removesuffix('.name')}={facts[key]}" for key in usual if facts.get(key, usual[key]) != usual[key]]
    others = [
        word for group in ("model", "checkpointing", "precision", "optimizer") for word in group_words(group, facts)
    ]
    others += [f"{key}={text_of(facts[key])}" for key in facts if key == "world_size" or key.startswith("train.")]
    machine += nearest("precision", of_group("planned.precision", facts), presets_of("precision", facts))[1:]
    words, values = strategy_words(facts)
    planned = against_words([f"cluster={CLUSTER}", *machine, *others, *words], settings)
    preset = words[0].partition("=")[2]
    return Imported(translation, planned, against_words([*others, *words], settings), others, preset, values)


def of_group(group: str, facts: Mapping[str, Any]) -> GroupValues:
    """Return the facts of a group by their keys in it."""
    return {key.removeprefix(f"{group}."): facts[key] for key in facts if key.startswith(f"{group}.")}


def presets_of(group: str, facts: Mapping[str, Any]) -> dict[str, GroupValues]:
    """Return the files of a group that a fact names, or all of them, by their names."""
    name = facts.get(f"{group}.name")
    return {entry: preset_values(group, entry) for entry in choices_of(group) if name in (None, entry)}


def nearest(group: str, wanted: GroupValues, presets: Mapping[str, GroupValues]) -> list[str]:
    """Return the settings that give a group these values: of the presets the one that needs the fewest others.

    A name that no preset has, such as a model's in the hub, has all of them.
    """
    defaults = dataclass_defaults(typing.get_type_hints(RunConfig)[group])
    changes = {
        name: [key for key in wanted if key != "name" and (defaults | preset).get(key) != wanted[key]]
        for name, preset in (presets or {str(wanted.get("name")): {}}).items()
    }
    name = min(changes, key=lambda entry: len(changes[entry]))
    return [f"{group}={name}", *(f"{group}.{key}={text_of(wanted[key])}" for key in changes[name])]


def group_words(group: str, facts: Mapping[str, Any]) -> list[str]:
    """Return the settings of model, checkpointing or precision; nothing if no fact is of the group."""
    wanted, presets = of_group(group, facts), presets_of(group, facts)
    alike = {entry: preset for entry, preset in presets.items() if preset.get("family") == wanted.get("family")}
    return nearest(group, wanted, alike or presets) if wanted else []


def strategy_words(facts: Mapping[str, Any]) -> tuple[list[str], GroupValues]:
    """Return the settings of the strategy, and its values that differ from the defaults of a strategy.

    The nearest preset has the same engine, and no options that are not wanted.
    """
    defaults, chosen = vars(StrategyConfig("")), of_group("strategy", facts)
    options, imported = of_group("options", chosen), imported_names()
    wanted = {key: chosen.get(key, value) for key, value in defaults.items() if key not in FREE}
    presets = {
        preset["name"]: preset
        for preset in strategy_presets()
        if (preset["engine"], preset["options"] or options) == (wanted["engine"], options)
        and preset["name"] not in imported
    }
    words = nearest("strategy", wanted, presets)
    preset = presets[words[0].partition("=")[2]]
    values = {key: value for key, value in wanted.items() if value != defaults[key]}
    if preset["options"] == options:
        return words, values | {"options": options, "literature": preset["literature"]}
    return [*words, f"strategy.options={text_of(options)}"], values | {"options": options, "literature": False}


def imported_names() -> set[str]:
    """Return the names of strategies that an import has written."""
    return {name for name, path in files_in("strategy").items() if MARK in path.read_text()}


def text_of(value: Any) -> str:
    """Return a value as an override has it: JSON without quotes, spaces after colons and commas."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {text_of(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(text_of, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def files(name: str, origin: str, imported: Imported) -> dict[Path, str]:
    """Return the texts of the strategy and of the sweep that compares it with its neighbours, by their paths.

    They are in the folder that configurations are searched in first.
    """
    rules = table("derived")["neighbours"]
    near = next(rule["strategies"] for rule in rules if imported.translation.evaluate(rule["when"]))
    names = [name, *(preset for preset in near if preset != imported.preset)]
    params = dict(word.split("=", 1) for word in imported.others) | {"strategy": ",".join(names)}
    sweep = {"name": name, "hydra": {"mode": "MULTIRUN", "sweeper": {"params": params}}}
    head, strategy = f"{MARK} {origin}.\n", {"name": name} | imported.strategy
    return {
        Path("conf") / "strategy" / f"{name}.yaml": head + yaml.safe_dump(strategy, sort_keys=False),
        Path("sweeps") / f"{name}.yaml": f"# @package _global_\n{head}{yaml.safe_dump(sweep, sort_keys=False)}",
    }


def chosen_name(name: str | None, file: Path | None) -> str:
    """Return the name of an import's files. Raises UserError for one that is a preset's or no name of a file."""
    packaged = [*(PACKAGED_CONF / "strategy").glob("*.yaml"), *(PRESETS / "sweeps").glob("*.yaml")]
    presets = {path.stem for path in packaged} - imported_names()
    stem = "imported" if file is None else re.sub(r"[^\w-]", "_", file.stem)
    chosen = name or (f"{stem}_imported" if stem in presets else stem)
    if chosen in presets or not re.fullmatch(r"[\w-]+", chosen):
        raise UserError(f"--name={name} is a strategy's of the package, or no name: choose letters, digits, _ and -")
    return chosen
