"""Measurements of a rank while it trains: time, memory, communication, kernels, state and its environment."""
