"""Executors make the runs of a command: one after another here, side by side here, or as jobs of Slurm."""
