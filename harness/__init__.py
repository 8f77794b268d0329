"""Declarative experiment sweeps over distributed training strategies, each one measured and proven."""

__version__ = "0.1.0"
