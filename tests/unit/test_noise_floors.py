"""Bounds from measured noise: honest reports pass, and every matrix whose gradient or update is scaled does not.

tests/data/noise_floors has the reports of two tensor-parallel ranks and of their reference, of the model tiny with two
layers: in fp32 at a learning rate of 3e-4, and in bf16_mixed at 1e-2. tests.support.noise_floors made such runs.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from harness.proof.bounds import (
    LARGEST_BOUND,
    SENSITIVITY,
    NoiseFloors,
    deviation_bound,
    noise_floors,
    proven_steps,
    shows_scaled_matrix,
)
from harness.proof.deviations import ROUNDING, Aspect, Difference
from harness.proof.training import Comparison, compare_training, deviation_problems, overflow_problems
from harness.records.rank_report import RankReport
from harness.tensors.fp32_sums import fp32_sums
from harness.worker.perturbed_training import DividedSums
from tests.support.scaled_matrices import FAULTS, SCALE, excess_by_fault, matrices, scaled

COMPUTE = {"fp32": "float32", "bf16_mixed": "bfloat16"}


def recorded(precision: str) -> tuple[RankReport, list[RankReport]]:
    """Return the report of the reference and those of the two ranks."""
    values = json.loads((Path(__file__).parents[1] / "data" / "noise_floors" / f"tp_{precision}.json").read_text())
    return RankReport.from_json(values["reference"]), [RankReport.from_json(rank) for rank in values["ranks"]]


def compare(precision: str, reference: RankReport, ranks: Sequence[RankReport]) -> Comparison:
    return compare_training(reference, ranks, COMPUTE[precision], 10.0)


@pytest.mark.parametrize("precision", COMPUTE)
def test_an_honest_run_is_proven(precision: str) -> None:
    """In bf16_mixed at this learning rate gradients deviate by 0.3, three times the bound that once was fixed."""
    comparison = compare(precision, *recorded(precision))
    assert list(deviation_problems(comparison)) == [] and comparison.is_floor_measured
    deviation = max(check.deviation for check in comparison.of_gradient())
    assert deviation > 0.3 if precision == "bf16_mixed" else deviation < 1e-5
    assert comparison.proven_steps == {"fp32": 6, "bf16_mixed": 5}[precision]


@pytest.mark.parametrize("precision", COMPUTE)
def test_a_little_scaled_matrix_is_an_error_whichever_it_is(precision: str) -> None:
    reference, ranks = recorded(precision)
    compute = COMPUTE[precision]
    excesses = excess_by_fault(reference, ranks, compute)
    assert len(matrices(reference)) == 16 and len(excesses) == 32 and min(excesses.values()) > 1.5
    (problem,) = deviation_problems(
        compare(precision, reference, scaled(ranks, FAULTS["update"], "lm_head.weight", SCALE[compute]))
    )
    assert problem.startswith("update deviates by") and "lm_head.weight's first updates" in problem
    assert "the measured noise floor is" in problem


def test_no_step_is_proven_where_rounding_hides_a_scaled_matrix() -> None:
    """A second training that moves a norm by 2 % would hide a matrix that is scaled by 1.1: honest, but no proof."""
    reference, ranks = recorded("bf16_mixed")
    assert reference.perturbed is not None and compare("bf16_mixed", reference, ranks).proven_steps == 5
    for factor, steps in ((1.01, 5), (1.02, 0)):
        (moved,) = scaled([reference], FAULTS["update"], "embed_tokens.weight", factor)
        noisy = dataclasses.replace(reference.perturbed, first_updates=moved.first_updates)
        comparison = compare("bf16_mixed", dataclasses.replace(reference, perturbed=noisy), ranks)
        assert list(deviation_problems(comparison)) == [] and comparison.proven_steps == steps
    norm = Aspect("norm", "first_gradients")
    cases = ((norm, 0.05, "bfloat16"), (norm, 0.05, "float32"), (norm, None, "bfloat16"))
    vectors = (norm._replace(of_vectors=True), 0.3, "bfloat16")
    assert [shows_scaled_matrix(*case) for case in (vectors, *cases)] == [True, True, False, False]


def test_a_reference_that_trained_once_has_assumed_floors() -> None:
    """Older records have no second training: the bounds are then those that were once fixed."""
    reference, ranks = recorded("fp32")
    once = dataclasses.replace(reference, perturbed=None)
    comparison = compare("fp32", once, ranks)
    assert list(deviation_problems(comparison)) == [] and not comparison.is_floor_measured
    bounds = {check.aspect: check.bound for check in comparison.checks}
    directions = [Aspect("direction", "first_updates", of_vectors=of_vectors) for of_vectors in (False, True)]
    assert bounds == pytest.approx(dict.fromkeys(bounds, 1e-4) | dict.fromkeys(directions, 0.5))
    older = [dataclasses.replace(rank, first_updates=()) for rank in ranks]
    assert list(deviation_problems(compare("fp32", dataclasses.replace(once, first_updates=()), older))) == []
    reference, ranks = recorded("bf16_mixed")
    (problem,) = deviation_problems(compare("bf16_mixed", dataclasses.replace(reference, perturbed=None), ranks))
    assert "last gradients), above the bound of 1.0e-01; the assumed noise floor is 1.0e-02" in problem


def test_a_reference_of_fewer_steps_proves_no_more_than_these() -> None:
    """The first two of six steps, without the gradients of a step that only the reference has as its last."""
    reference, ranks = recorded("fp32")
    assert reference.perturbed is not None
    cut = {"losses": reference.losses[:2], "grad_norms": reference.grad_norms[:2], "last_gradients": ()}
    perturbed = dataclasses.replace(
        reference.perturbed, **{name: getattr(reference.perturbed, name)[:2] for name in cut}
    )
    short = dataclasses.replace(reference, **cut, perturbed=perturbed)
    comparison = compare("fp32", short, ranks)
    assert list(deviation_problems(comparison)) == [] and comparison.proven_steps == 2
    late, early = (
        [dataclasses.replace(r, losses=[*r.losses[:n], 9.9, *r.losses[n + 1 :]]) for r in ranks] for n in (2, 1)
    )
    assert list(deviation_problems(compare("fp32", short, late))) == []
    assert any("(step 1)" in problem for problem in deviation_problems(compare("fp32", short, early)))
    skipped = [dataclasses.replace(rank, skipped_steps=1) for rank in ranks]
    assert list(overflow_problems(short, skipped)) == [] != list(overflow_problems(reference, skipped))


def test_the_earliest_deviation_is_the_headline() -> None:
    """A first update that is a little off stands before a late loss that is far off, which it may have led to."""
    reference, ranks = recorded("fp32")
    spoiled = scaled(ranks, FAULTS["update"], "lm_head.weight", SCALE["float32"])
    late = [dataclasses.replace(rank, losses=[*rank.losses[:5], 9.9]) for rank in spoiled]
    update, loss = deviation_problems(compare("fp32", reference, late))
    assert "lm_head.weight's first updates" in update and "(step 5)" in loss


def training(losses: Sequence[float], norms: Sequence[float]) -> RankReport:
    return RankReport(losses=losses, grad_norms=norms)


def test_floors_grow_with_steps_and_look_one_step_ahead() -> None:
    """A difference may be zero by chance, so that a step's floor is the largest until the step behind it."""
    perturbed = training([1.0, 1.001, 1.0, 1.04, 1.0], [1.0, 1.0, 1.0, 1.0, 1.04])
    reference = dataclasses.replace(training([1.0] * 5, [1.0] * 5), perturbed=perturbed)
    floors = noise_floors(reference, perturbed, "float32").of_aspects
    losses = [floors[Aspect("loss", "step", step)] for step in range(5)]
    norms = [floors[Aspect("global norm", "step", step)] for step in range(5)]
    assert losses == pytest.approx([0.001, 0.001, 0.04, 0.04, 0.04])
    assert norms == pytest.approx([0.0, 0.0, 0.0, 0.04, 0.04])

    def compared(losses: Sequence[float], last_norms: Sequence[float] = (1.0, 1.0)) -> Comparison:
        return compare_training(reference, [training(losses, [1.0] * 3 + [*last_norms])], "float32", 10.0)

    honest = compared([1.0, 1.009, 1.0, 1.9, 1.0], (1.1, 1.0))
    assert honest.proven_steps == 2 and list(deviation_problems(honest)) == []
    (problem,) = deviation_problems(compared([1.0, 1.011, 1.0, 1.0, 1.0]))
    assert problem.startswith("loss deviates by 1.10e-02 (step 1), above the bound of 1.0e-02")
    assert any(deviation_problems(compared([1.0, 1.0, 1.0, math.nan, 1.0])))  # NaN is an error at any step


def test_each_kind_of_gradient_has_its_own_floor_in_every_step() -> None:
    """Rounding moves the gradients of queries and keys most. A wrong one of another kind must not hide behind them."""
    reference, ranks = recorded("fp32")

    def with_norms(report: RankReport, **off: float) -> RankReport:
        """Return a report of three steps whose norms are off by shares, of the kinds of parameters by their names."""
        names = [entry.name for entry in report.first_gradients]
        shares = [next((share for kind, share in off.items() if f".{kind}." in name), 0.0) for name in names]
        squares = [float(entry.square or 0) for entry in report.first_gradients]
        changed = [square * (1 + share) ** 2 for square, share in zip(squares, shares, strict=True)]
        return dataclasses.replace(report, gradient_squares=[squares, changed, squares])

    others = dict.fromkeys(("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 1e-3)
    assert reference.perturbed is not None
    perturbed = with_norms(reference, q_proj=1e-2, k_proj=1e-2, **others).gradient_squares
    noisy = dataclasses.replace(
        with_norms(reference), perturbed=dataclasses.replace(reference.perturbed, gradient_squares=perturbed)
    )
    for off, expected in (({"q_proj": 5e-2}, None), ({"v_proj": 5e-3}, None), ({"v_proj": 2e-2}, "v_proj")):
        problems = list(deviation_problems(compare("fp32", noisy, [with_norms(rank, **off) for rank in ranks])))
        assert bool(problems) == bool(expected)
        assert expected is None or f"self_attn.{expected}.weight's gradient at step 1" in problems[0], problems


@pytest.mark.parametrize("compute", SENSITIVITY)
@pytest.mark.parametrize("moment", ["first_gradients", "first_moments", "first_updates"])
def test_no_floor_hides_a_scaled_matrix(moment: str, compute: str) -> None:
    bounds = [deviation_bound(Aspect("norm", moment), floor, 10.0, compute) for floor in (0.0, 1e-6, 1e-2, 1.0)]
    assert all(bound is not None and bound <= SENSITIVITY[compute] / 2 for bound in bounds)
    of_its_own = deviation_bound(Aspect("norm", moment), 0.1, 10.0, compute, 0.1)
    assert of_its_own == pytest.approx(0.3)  # of a tensor whose own norm is moved by rounding
    last = Aspect("norm", "last_gradients")
    floors = (LARGEST_BOUND / 20, LARGEST_BOUND / 5, LARGEST_BOUND / 2)
    assert [deviation_bound(last, floor, 10.0, compute) for floor in floors] == [0.05, LARGEST_BOUND, None]
    assert proven_steps({last: None}, 3) == 2 and proven_steps({Aspect("loss", "step", 0): None}, 3) == 0
    assert proven_steps({}, 3) == 3


HIDDEN, TOKENS = 32, 4096


def gradients(module: torch.nn.Module, parts: int, threads: int = 1) -> list[torch.Tensor]:
    """Return the gradients of the parameters that some ranks sum, each of which has a part of the tokens."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(TOKENS, HIDDEN, generator=generator)
    gradient = torch.randn(TOKENS, HIDDEN, generator=generator) + 0.2 * torch.randn(HIDDEN, generator=generator)
    dtype = next(module.parameters()).dtype
    is_embedding = isinstance(module, torch.nn.Embedding)
    inputs = torch.arange(TOKENS) % 2 if is_embedding else values.bfloat16().to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for part, of_part in zip(inputs.chunk(parts), gradient.bfloat16().to(dtype).chunk(parts), strict=True):
            module(part[None]).backward(of_part[None])
    finally:
        torch.set_num_threads(before)
    summed = [parameter.grad.double() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    return summed


def largest_deviation(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(float(abs(tensor.norm() / other.norm() - 1)) for tensor, other in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [torch.nn.LayerNorm, lambda hidden: torch.nn.Embedding(3, hidden, padding_idx=2)])
def test_sums_over_tokens_are_accurate_in_16_bits(build: type[torch.nn.Module], dtype: torch.dtype) -> None:
    """Torch's own kernels lose up to a third of these gradients, and how much depends on threads and parts."""
    exact = gradients(build(HIDDEN).double(), 1)
    module = build(HIDDEN).to(dtype)
    whole = gradients(module, 1)
    loss, rounding = largest_deviation(whole, exact), ROUNDING[str(dtype).removeprefix("torch.")]
    with fp32_sums():
        for parts, threads in ((1, 1), (1, 8), (2, 1), (4, 2)):
            assert largest_deviation(gradients(module, parts, threads), exact) < rounding
        with DividedSums():
            assert largest_deviation(gradients(module, 1), exact) < rounding
        single = gradients(build(HIDDEN), 1)
    assert loss > (0.05 if dtype is torch.bfloat16 else 1e-3)  # so that rounding would hide a tensor scaled by 1.1
    for plain, other in ((gradients(module, 1), whole), (gradients(build(HIDDEN), 1), single)):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))  # torch's kernels, in fp32 and later


@pytest.mark.parametrize("module", [torch.nn.Linear(65, 33), torch.nn.LayerNorm(65), torch.nn.Embedding(5, 65)])
def test_divided_sums_differ_in_rounding_only(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    is_embedding = isinstance(module, torch.nn.Embedding)
    # Intel's library divides a sum of up to some thousand products in the middle itself.
    values = torch.randn(4, 997, 65, generator=generator, requires_grad=True)
    inputs = torch.arange(3988).view(4, 997) % 5 if is_embedding else values
    gradient = torch.randn(module(inputs).shape, generator=generator)

    def results() -> list[torch.Tensor]:
        """Return the gradients of the parameters and of the values, and the output."""
        output = module(inputs)
        wanted = [*module.parameters()] if is_embedding else [*module.parameters(), values]
        return [*torch.autograd.grad(output, wanted, gradient), output]

    expected = results()
    with DividedSums():
        divided = results()
    differences = [float((one - other).norm() / other.norm()) for one, other in zip(divided, expected, strict=True)]
    assert differences[0] > 0 and max(differences) < 3e-6
    assert (differences[-1] > 0) == isinstance(module, torch.nn.Linear)


def test_routers_widen_bounds_in_16_bits_alone() -> None:
    """A rounding sends a token to another expert: honest norms deviated by 3e-3 where no floor showed that."""
    direction, norm = Aspect("direction", "first_moments"), Aspect("norm", "gradients", 1)
    floors = {direction: 0.025, norm: 2e-4}
    for compute, widened in (("float32", False), ("bfloat16", True), ("float16", True)):
        plain, routed = (
            [NoiseFloors(floors, {}, has).bound(Difference(aspect, 0.0, ""), 10.0, compute) for aspect in floors]
            for has in (False, True)
        )
        assert plain[0] == LARGEST_BOUND
        assert routed == ([0.25, SENSITIVITY[compute] / 2] if widened else plain)


def test_a_vector_s_first_update_may_lack_an_element_in_16_bits() -> None:
    """A gradient that rounds to zero has no update: of 288 elements, one changes the norm by 0.17 %.

    Six signs of 96 make a deviation of 0.5.
    """
    direction = Aspect("direction", "first_updates", of_vectors=True)
    assert [deviation_bound(direction, 1e-2, 10, compute) for compute in ("float32", "bfloat16")] == [0.5, 0.75]
    of_vector = Aspect("norm", "first_updates", of_vectors=True)
    for compute, bound in (("float32", 1.53e-5), ("float16", 0.05), ("bfloat16", 0.05)):
        assert deviation_bound(of_vector, 1e-6, 10, compute) == pytest.approx(bound, rel=0.1)
