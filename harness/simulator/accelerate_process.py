"""Accelerate's state of a process, set for one simulated rank and cleared before the next."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch.nn.parallel import distributed

from harness.layout.layout import Layout


@contextmanager
def accelerate_process(layout: Layout, rank: int) -> Iterator[None]:
    """Return a context in which Accelerate finds one rank of the world, as the environment of a launched rank says.

    Accelerate keeps its state for the life of a process, in classes and in variables of the environment. This does
    nothing for a layout of another engine.
    """
    if layout.engine != "accelerate":
        yield
        return
    from accelerate.state import AcceleratorState, GradientState

    ranks = {"RANK": str(rank), "WORLD_SIZE": str(layout.world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with (
        mock.patch.dict("os.environ", ranks),
        mock.patch.object(distributed, "_verify_param_shape_across_processes", lambda group, parameters: None),
    ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
