"""Planted faults by their names, each of which spoils one part of a rank and then runs the worker unchanged.

Every rank is a process of its own, so the patches end with it.
"""

from tests.support.faults import (
    adapters,
    checkpoints,
    dropout,
    endings,
    experts,
    float8,
    optimizers,
    parallelism,
    training,
)

FILES = (parallelism, training, dropout, experts, optimizers, adapters, float8, checkpoints, endings)

globals().update({name: each for file in FILES for name, each in vars(file).items() if not name.startswith("_")})
