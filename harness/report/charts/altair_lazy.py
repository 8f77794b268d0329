"""altair, imported when the first chart is made: commands that make none start without its third of a second."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt
else:

    class _Altair:
        def __getattr__(self, name: str) -> Any:
            import altair

            return getattr(altair, name)

    alt = _Altair()

__all__ = ["alt"]
