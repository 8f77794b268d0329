"""Benchmarks of the harness's own cost, which are started by hand."""
