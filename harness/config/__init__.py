"""Configuration: typed groups, the border to Hydra, overrides, and the identity of a run."""
