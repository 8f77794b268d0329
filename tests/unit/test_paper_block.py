"""The paper's activations of a layer, from the parts that its sections 4.1, 4.2 and 5 count."""

import pytest

from harness.report.claims_model_parallel import PaperBlock


@pytest.mark.parametrize("scores", [0.0, 80.0])
@pytest.mark.parametrize("degree", [1, 2, 8])
def test_a_layer_keeps_what_the_paper_counts(degree: int, scores: float) -> None:
    """11 of attention, 19 of the MLP and 4 of the norms; tensor parallelism alone leaves inputs, masks and norms."""
    attention, mlp, norms = 11 + scores, 19, 4
    replicated = 2 + 1 + 2 + 1 + norms  # the inputs of attention and MLP, and the masks of dropout after them
    alone = replicated + (attention + mlp + norms - replicated) / degree
    assert PaperBlock(degree, False, False, scores).size == pytest.approx(alone)
    assert PaperBlock(degree, True, False, scores).size == pytest.approx((attention + mlp + norms) / degree)
    assert (
        PaperBlock(degree, False, True, scores).size == 2 and PaperBlock(degree, True, True, scores).size == 2 / degree
    )


@pytest.mark.parametrize(
    ("block", "formula"),
    [
        (PaperBlock(1, False, False, 0.0), "34sbh"),
        (PaperBlock(1, False, False, 80.0), "(34 + 5as/h)sbh"),
        (PaperBlock(2, False, False, 0.0), "(10 + 24/t)sbh"),
        (PaperBlock(2, False, False, 80.0), "(10 + 24/t + 5as/(ht))sbh"),
        (PaperBlock(2, True, False, 80.0), "(34 + 5as/h)sbh/t"),
        (PaperBlock(2, False, True, 80.0), "2sbh"),
        (PaperBlock(2, True, True, 0.0), "2sbh/t"),
    ],
)
def test_the_formula_is_that_of_the_size(block: PaperBlock, formula: str) -> None:
    assert block.formula == formula
    python = formula.replace("5as/(ht)", "80/t").replace("5as/h", "80").replace("sbh", "*1")
    assert block.size == pytest.approx(eval(python, {"t": block.degree}))
