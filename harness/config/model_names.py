"""Models by the names that hubs and papers give them, such as meta-llama/Llama-3.1-8B."""

import re
from collections.abc import Sequence

import yaml

from harness.config.locations import conf_folders, files_in

# The beginning of the models of a family, by a word in the name that a user knows; "" are those of llama.
FAMILIES = {"mistral": "mistral_", "gpt": "gpt_", "mpt": "mpt_", "llama": ""}

NEAREST_FAMILY = ""  # of names that have a size and no known family, such as 7B


def similar_models(name: str, choices: Sequence[str]) -> list[str]:
    """Return the models that a name probably means: those with the same source, else family and size."""
    stem = name.lower().rpartition("/")[2]
    from_source = [model for model, source in sources(choices).items() if stem == source]
    if from_source:
        return from_source
    size = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)[\s_-]*([bmt])(?![a-z])", stem)
    if size is None:
        return []
    spelled = f"{size[1]}{size[2]}"
    family = next((family for family in FAMILIES if family in stem), None)
    if family is None and re.sub(r"[\W_]+", "", stem) != spelled.replace(".", ""):
        return []  # another family, whose sizes say little
    prefix = NEAREST_FAMILY if family is None else FAMILIES[family]
    if f"{prefix}{spelled}" in choices:
        return [f"{prefix}{spelled}"]
    return nearest_size(size[1], size[2], [choice for choice in choices if choice.startswith(prefix)], prefix)


def nearest_size(number: str, unit: str, choices: Sequence[str], prefix: str) -> list[str]:
    """Return the model of a family whose size, as its name says it, is nearest to the wanted one."""
    scale = {"m": 1e6, "b": 1e9, "t": 1e12}
    sizes = {}
    for choice in choices:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([bmt])", choice.removeprefix(prefix))
        if match:
            sizes[choice] = float(match[1]) * scale[match[2]]
    wanted = float(number) * scale[unit]
    return sorted(sizes, key=lambda choice: max(sizes[choice], wanted) / min(sizes[choice], wanted))[:1]


def sources(choices: Sequence[str]) -> dict[str, str]:
    """Return the name on the hub, without its owner and in lower case, of every model that has one."""
    names = {}
    for model, path in files_in(conf_folders(), "model").items():
        match = re.match(r"[\w-]+/([\w.-]+)", str((yaml.safe_load(path.read_text()) or {}).get("source", "")))
        if match and model in choices:
            names[model] = match[1].lower()
    return names
