"""What a run will need, computed from its configuration alone: no device, no process, no torch."""
