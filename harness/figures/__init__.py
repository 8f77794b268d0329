"""A finished run's columns, from what its ranks wrote down: memory, time, bytes, speed."""

from typing import Any

Row = dict[str, Any]
