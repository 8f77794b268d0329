"""The calibration of a machine: measurements of its kernels and collectives, and the curves of a cluster file."""
