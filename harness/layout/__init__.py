"""The arrangement of ranks, the partition of a model among them, and what both must agree on. Imports no torch."""
