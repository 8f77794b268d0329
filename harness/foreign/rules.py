"""The interpreter of the tables of equivalents: from the values of other programs to settings of this project.

`rules` of a table has for each key of its format, or pattern of keys, the words that follow from it, or such words for
each of its values, "*" for all others. A word is

    KEY=VALUE   a setting, or a fact if KEY begins with `_`; in VALUE, {} is the key's own value, {…} an expression
    KEY?=VALUE  the same, unless anything else sets KEY
    KEY         what the key has part in: its final value is shown
    @FORMAT     the key's value is a file of that format, or the values of one

What follows `|` is what has no equivalent, after what that changes: memory, speed, numbers, or nothing. Keys in
`nothing` change nothing of a step, and `defaults` are words that hold wherever the format is used. `derived` of
derived.toml adds what follows from all facts together.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, UndefinedError
from jinja2.sandbox import SandboxedEnvironment

from harness.config.from_dict import typed_value
from harness.config.locations import files_in
from harness.config.mistakes import VALUES, canonical, choices_of, known_keys, source_name
from harness.foreign.read import Source, flat, is_known, match, plain, read_file, table
from harness.runner.resolve import preset_values
from harness.util.redact import redacted
from harness.util.text import UserError

GROUPS = (
    "model",
    "precision",
    "checkpointing",
    "optimizer",
    "stack",
)  # settings that choose a file of conf/, as facts `GROUP.name`

WORD = re.compile(r"(@?[\w.]+?)(?:(\??=)(.*))?")


@dataclass(frozen=True)
class Reading:
    """A key of another program with its value, the facts or @FORMAT that it has part in, and what has no equivalent."""

    key: str
    value: Any
    names: tuple[str, ...]
    difference: str


@dataclass
class Translation:
    """What is read so far; `facts` are settings by their dotted keys, and facts of tables, which begin with `_`."""

    facts: dict[str, Any] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    nothing: list[str] = field(default_factory=list)  # keys that change nothing of a step
    unknown: list[str] = field(default_factory=list)  # keys that no table has
    of_shell: list[str] = field(default_factory=list)  # keys whose values are variables of a shell
    _keys: dict[str, tuple[str, bool]] = field(default_factory=dict)  # of facts: the key, and whether others must match
    _weak: dict[str, Any] = field(default_factory=dict)
    _expressions: list[tuple[str, str]] = field(default_factory=list)
    _sizes: dict[str, Any] = field(default_factory=dict)  # of a known model, as facts
    _files: list[str] = field(default_factory=list)  # the names of those that are read

    def add(self, source: Source) -> None:
        """Read the values of a source, then of those that it names. Raises UserError for a value that cannot be."""
        entry = table(source.format)
        inner: list[Source] = []
        for key, value in flat(source.format, source.values):
            pattern = match(entry["rules"], key)
            if isinstance(value, str) and "$" in value:
                self.of_shell.append(key)
            elif pattern is None:
                (self.nothing if is_known(source.format, key) else self.unknown).append(key)
            else:
                inner += self._read(entry, key, value, entry["rules"][pattern], source)
        for word in entry.get("defaults", "").split():
            self._set(word, None, (f"{entry['name']}'s default", False))
        for further in inner:
            self.add(further)

    def _read(self, entry: dict[str, Any], key: str, value: Any, rule: Any, source: Source) -> Iterator[Source]:
        """Set what follows from a key, and yield the sources that it names."""
        names: list[str] = []
        texts = [rule] if isinstance(rule, str) else _chosen(rule, key, value)
        differences = [difference.strip() for _, _, difference in (text.partition("|") for text in texts) if difference]
        for word in " ".join(text.partition("|")[0] for text in texts).split():
            if word.startswith("@"):
                yield from self._named(word[1:], key, value, source)
            names.append(word if word.startswith("@") else self._set(word, value, (key, "must_match" in entry)))
        self.readings.append(Reading(key, redacted({key: value})[key], tuple(names), "; ".join(differences)))

    def _set(self, word: str, value: Any, origin: tuple[str, bool]) -> str:
        """Set what a word says, and return the name of its fact. Raises UserError for a value of another type."""
        name, operator, text = WORD.fullmatch(word).groups()  # type: ignore[union-attr]
        name = f"{name}.name" if name in GROUPS else name
        if operator is None:
            return name
        if re.fullmatch(r"\{.+\}", text):
            self._expressions.append((name, text[1:-1]))
            return name
        new = typed(name, value if text == "{}" else text, origin[0])
        if operator == "?=":
            self._weak.setdefault(name, new)
        elif self.facts.setdefault(name, new) != new:
            before, must_match = self._keys[name]
            if (must_match or origin[1]) and "=" not in before:
                raise UserError(f"{before} and {origin[0]} differ, {self.facts[name]} and {new}: make them equal")
        self._keys.setdefault(name, origin)
        return name

    def _named(self, name: str, key: str, value: Any, source: Source) -> Iterator[Source]:
        """Yield the source that a key names by a file, unless it is read already, or by its values."""
        values = value
        if isinstance(value, str):
            path = Path(value) if Path(value).is_file() else source.path.parent / value
            if path.name in self._files:
                return
            if not path.is_file():
                raise UserError(f"{key}={value} is no file here: type the command in its folder, or leave {key} out")
            values = read_file(path, name).values
        if isinstance(values, dict):
            is_group = key in table(name)["groups"]
            yield Source(name, {key: values} if is_group else values, source.path)

    def set_own(self, word: str) -> None:
        """Set a setting of ours that is no choice of a strategy or a cluster, which no fact is."""
        names = {*GROUPS, *known_keys()} - {"strategy", "cluster"}
        if re.fullmatch(r"[\w.]+=[^{]*", word) and word.partition("=")[0] in names:
            self._set(word, None, (word, False))

    def settle(self) -> None:
        """Add what is set weakly, and then what follows from all facts."""
        for name, expression in self._expressions:
            self._derive(name, expression)
        self.facts = self._weak | self.facts
        if "model.name" in self.facts:
            name = self.facts["model.name"] = known_model(str(self.facts["model.name"]))
            sizes = preset_values("model", name) if name in choices_of("model") else {}
            self._sizes = {f"model.{key}": size for key, size in sizes.items()}
        for name, expression in table("derived")["derived"].items():
            self._derive(name, expression)

    def _derive(self, name: str, expression: str) -> None:
        """Set a fact that is not set to the value of an expression, if it has one."""
        result = self.evaluate(expression)
        values = {f"{name}.{key}": result[key] for key in result} if isinstance(result, dict) else {name: result}
        self.facts = {key: value for key, value in values.items() if value is not None} | self.facts

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression over the facts and the sizes of a known model, None where it lacks one."""
        nested: dict[str, Any] = {}
        for name, fact in (self._sizes | self.facts).items():
            place = nested
            *owners, last = name.split(".")
            for owner in owners:
                place = place.setdefault(owner, {})
            place[last] = fact
        try:
            return _compiled(expression)(**nested)
        except (UndefinedError, TypeError, ZeroDivisionError):
            return None

    def holding(self, section: str) -> Iterator[str]:
        """Yield the sentences of a section of derived.toml whose condition holds, with facts in the place of braces."""
        for sentence, condition in table("derived")[section].items():
            if self.evaluate(condition):
                yield re.sub(r"\{([\w.]+)\}", lambda name: str(self.evaluate(name[1])), sentence)


@cache
def _compiled(expression: str) -> Any:
    environment = SandboxedEnvironment(undefined=ChainableUndefined)
    environment.filters["occurrences"] = lambda text, part: text.count(part)
    return environment.compile_expression(" ".join(expression.split()))


def _chosen(rule: dict[str, str], key: str, value: Any) -> list[str]:
    """Return the rules for a value, of a list those for each of its words. Raises UserError for an unknown one."""
    text = " ".join(map(str, value)).lower() if isinstance(value, list) else str(value).lower()
    if text in rule:
        return [rule[text]]
    words = re.split(r"[\s,]+", text.strip())
    if all(word in rule or not word for word in words):
        return [rule[word] for word in words if word]
    if "*" in rule:
        return [rule["*"]]
    raise UserError(f"{key}={value} is not known: choose {', '.join(rule)}")


def typed(name: str, value: Any, key: str) -> Any:
    """Return a value as the key of its name has it. Raises UserError for another type, with the foreign key."""
    value = plain(value)
    hint = known_keys().get(name)
    if isinstance(value, float) and value.is_integer() and hint is not float:
        value = int(value)
    return value if hint is None or value is None else typed_value(hint, value, key)


def known_model(name: str) -> str:
    """Return the model of this project that a name in the hub or an alias stands for, else the name as it is."""
    sources = {source_name(path): model for model, path in files_in("model").items()}
    aliases = VALUES["model"].get(canonical(name), ())
    stem = name.lower().rpartition("/")[2]
    return name if name in choices_of("model") else sources.get(stem) or (aliases[0] if len(aliases) == 1 else name)


def translated(sources: Iterable[Source], settings: Iterable[str] = ()) -> Translation:
    """Return the translation of sources, of which the first count before the others, and settings before all.

    Raises UserError.
    """
    sources, translation = list(sources), Translation()
    translation._files += [source.path.name for source in sources]
    for word in settings:
        translation.set_own(word)
    for source in sources:
        translation.add(source)
    translation.settle()
    return translation
