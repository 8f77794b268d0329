"""Experiment tracking: a process of its own that gives recorded runs to a service such as Weights & Biases."""
