"""The rank of this process, for faults of one rank alone."""

import os


def rank() -> int:
    """Return this process's rank among all of the run."""
    return int(os.environ["RANK"])
