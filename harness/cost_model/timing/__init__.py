"""The time of a training step, predicted from shapes, layout and a cluster's hardware. Imports no torch."""
