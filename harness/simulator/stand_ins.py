"""Functions in the place of others for a while, which may call those that they replace."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


def around(owner: Any, name: str, stand_in: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Return a context in which a stand-in is called in a function's place, with this function as first argument."""
    ordinary = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        return stand_in(ordinary, *arguments, **keywords)

    is_static = isinstance(vars(owner).get(name), staticmethod)
    return mock.patch.object(owner, name, staticmethod(call) if is_static else call)
