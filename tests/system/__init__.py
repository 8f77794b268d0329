"""Tests of whole commands: sweeps, reports, Slurm clusters, full disks, and the wheel."""
