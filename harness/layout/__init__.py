"""The arrangement of ranks, the profile of a model, and its partition among the ranks. Imports no torch."""
