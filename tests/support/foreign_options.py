"""The page for people who come from other programs, made of the tables that `harness import` reads."""

from collections.abc import Iterator, Mapping

from harness.foreign.read import table
from tests.support.page_templates import render_page

PROGRAMS = ("deepspeed", "accelerate", "torchtitan", "megatron")  # with a section in the template

MOST_SETTINGS = 4  # of a value, that are written out

NOTHING = "nothing to set"

SAME_NAME = "`strategy.options`, under the same name"


def coming_from(note: str) -> str:
    """Return the page."""
    return render_page("coming_from", note=note, **{name: list(rows(table(name)["rules"])) for name in PROGRAMS})


def rows(rules: Mapping[str, str | dict[str, str]]) -> Iterator[str]:
    """Yield the rows of a table: options that become the same have one, and those that change nothing have none."""
    alike: dict[str, list[str]] = {}
    for option, rule in rules.items():
        name, _, rest = line(option, rule).removeprefix("| ").partition(" | ")
        alike.setdefault(rest.replace(f"`strategy.options.{option.rpartition('.')[2]}`", SAME_NAME), []).append(name)
    yield from (f"| {', '.join(names)} | {rest}" for rest, names in alike.items() if rest != f"{NOTHING} |  |")


def line(option: str, rule: str | dict[str, str]) -> str:
    """Return the row of an option."""
    by_value = rule if isinstance(rule, dict) else {"": rule}
    here, differs, alike = [], [], []
    for value, text in by_value.items():
        words, _, difference = (part.strip() for part in text.partition("|"))
        prefix = f"`{value}`: ".replace("`*`", "other") if value else ""
        settings = list(dict.fromkeys(setting(word) for word in words.split() if setting(word)))
        if len(settings) > MOST_SETTINGS:
            settings = list(dict.fromkeys(f"`{entry.strip('`').partition('.')[0]}.*`" for entry in settings))
        here += [prefix + " ".join(settings)] * bool(settings)
        differs += [prefix + difference] * bool(difference)
        alike += [f"`{value}`"] * (not settings and not difference)
    if "*" in by_value and alike:
        differs.insert(0, f"{', '.join(alike)}: nothing")
    return f"| `{option}` | {'; '.join(merged(here)) or NOTHING} | {'; '.join(differs)} |"


def merged(entries: list[str]) -> Iterator[str]:
    """Yield the entries, those of several values with the same settings as one."""
    by_settings: dict[str, list[str]] = {}
    for entry in entries:
        value, _, settings = entry.rpartition(": ")
        by_settings.setdefault(settings, []).append(value)
    for settings, values in by_settings.items():
        yield f"{', '.join(values)}: {settings}" if any(values) else settings


def setting(word: str) -> str:
    """Return what a word of a rule sets, as code: `KEY=VALUE`, a key alone, or nothing for a fact of the tables."""
    if word.startswith("@"):
        return f"the settings of that {table(word[1:])['name']} file"
    key, _, value = word.removeprefix("planned.").replace("?=", "=").partition("=")
    if key.startswith("_"):
        return ""
    return f"`{key}={'…' if '{' in value else value}`" if value else f"`{key}`"
