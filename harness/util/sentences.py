"""Sentences from files of macros: a macro has the name of the kind of fact that it says, and gets its values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined


@dataclass(frozen=True)
class Sentences:
    """What the macros of a file say, which are compiled at the first sentence.

    A line break in their source is a space, so that sentences may be of several lines.
    """

    path: Path
    filters: Mapping[str, Callable[..., object]]
    constants: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, kind: str, /, **values: Any) -> str:
        """Return the sentence, or the sentences, on a fact of a kind."""
        return str(getattr(self._macros, kind)(**values))

    def of(self, facts: Mapping[str, object], /, **values: Any) -> Iterator[str]:
        """Yield the sentence on each kind of fact that holds; all have the same values.

        A kind with a list has a sentence for each entry, which are its own values.
        """
        for kind, holds in facts.items():
            for own in holds if isinstance(holds, list) else [{}] * bool(holds):
                yield self(kind, **values, **own)

    @cached_property
    def _macros(self) -> object:
        environment = Environment(autoescape=False, undefined=StrictUndefined)
        environment.filters |= self.filters
        environment.globals |= self.constants
        return environment.from_string(" ".join(self.path.read_text(encoding="utf-8").split())).module
