"""The lines of refused runs: refusals.toml, filled in."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.config.schema import RunConfig
from harness.layout.layout import Layout

_REFUSALS: dict[str, str] = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text("utf-8"))


def refusals(rules: Mapping[str, bool], config: RunConfig, layout: Layout, **values: object) -> Iterator[str]:
    """Yield the line of every rule of refusals.toml that is broken, filled in with the configuration and the values."""
    names = {"config": config, "model": config.model, "train": config.train, "layout": layout, **values}
    return (_REFUSALS[name].format(**names) for name, is_broken in rules.items() if is_broken)
