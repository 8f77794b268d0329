"""Processes of a run, from the parent's side: start the ranks, monitor them, classify how they ended."""
