"""Engines: ways to train the one model under a layout, one module or package each; see harness.engines.base."""
