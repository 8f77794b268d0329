"""Predictions of what a run will need, from its configuration alone: no device, no process, no torch."""
