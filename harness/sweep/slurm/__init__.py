"""Runs as jobs of Slurm: its commands and scripts, its queue, and the program of a job on each of its nodes."""
