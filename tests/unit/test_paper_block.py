"""The paper's activations of a layer, from the parts that its sections 4.1, 4.2 and 5 count."""

from typing import Any

import pytest

from harness.metrics.formulas import value_of
from harness.report.claims import TABLE


@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("degree", [1, 2, 8])
def test_a_layer_keeps_what_the_paper_counts(degree: int, attention: str) -> None:
    """11 of attention, 19 of the MLP and 4 of the norms; tensor parallelism alone leaves inputs, masks and norms."""
    whole = 11 + 80 * (attention == "eager") + 19 + 4
    replicated = 2 + 1 + 2 + 1 + 4  # the inputs of attention and MLP, the masks of dropout after them, and the norms

    def layer(**row: Any) -> Any:
        known = {"t": degree, "a": 16, "s": 2, "b": 1, "h": 2, "attention": attention} | row
        formula = next(formula for holds, formula in TABLE["layer"] if value_of(holds, known))
        return value_of(formula.replace("*s*b*h", ""), known)

    alone = replicated + (whole - replicated) / degree
    assert layer(checkpointing="none", sequence_parallel=False) == pytest.approx(alone)
    assert layer(checkpointing="none", sequence_parallel=True) == pytest.approx(whole / degree)
    assert layer(checkpointing="full", sequence_parallel=False) == 2
    assert layer(checkpointing="full", sequence_parallel=True) == 2 / degree
    assert layer(checkpointing="selective") is None
