"""The intervals of predicted step times: nine of ten measured steps of other groups lie inside, and they are narrow."""

from functools import lru_cache
from statistics import mean, median

import pytest

from harness.config.from_dict import from_dict
from harness.config.locations import files_in
from harness.config.stack import StackTiming, load_stack
from harness.cost_model.timing.step_time import UNMEASURED_RANGE, StepTime
from harness.planner.row import planned_row
from harness.util.text import UserError
from tests.benchmarks.time_intervals import SEEDS, STACKS, TimedRow, fit_range, held_out, timed_rows
from tests.support.planned import planned


@lru_cache(maxsize=1)
def nanotron() -> list[TimedRow]:
    """Return the rows of nanotron's grid with an MFU of 10 % or more."""
    return timed_rows("nanotron")


def test_nine_of_ten_steps_of_other_groups_lie_inside() -> None:
    """The range is fitted to half of the groups; the other half counts, for five ways to halve them."""
    shares, half_widths = zip(*(held_out(nanotron(), seed) for seed in SEEDS), strict=True)
    assert len(nanotron()) > 300
    assert mean(shares) >= 0.9 and min(shares) >= 0.85 and max(half_widths) <= 0.2


@pytest.mark.parametrize("stack", STACKS)
def test_the_range_on_file_is_the_fitted_one(stack: str) -> None:
    """Where a fit changed, python -m tests.benchmarks.time_intervals prints the range to write into the file."""
    rows = nanotron() if stack == "nanotron" else timed_rows(stack)
    on_file = load_stack(stack).timing.measured_over_predicted
    assert on_file == pytest.approx(fit_range(rows), abs=0.03)
    assert on_file is not None and mean(entry.is_inside(on_file) for entry in rows) >= 0.9


def test_a_plain_range_would_be_wider() -> None:
    """Widths that grow with exposed communication are what makes the median interval narrow."""
    ratios = sorted(entry.ratio for entry in nanotron())
    outside = round(0.03 * len(ratios))
    plain = (ratios[-outside] - ratios[outside]) / 2
    assert median(entry.half_width(fit_range(nanotron())) for entry in nanotron()) < 0.9 * plain


def step(exposed: float) -> StepTime:
    """Return a step of one second, so much of it exposed communication."""
    return StepTime(1 - exposed, {"tp": exposed}, 0.0, 0.0, 0.0, 1, 0.1, 0.2, 0.0)


def test_intervals_grow_with_exposed_communication_and_nodes() -> None:
    timing = StackTiming(measured_over_predicted=(0.9, 1.2))
    assert step(0.0).interval(timing, 64) == pytest.approx((0.9, 1.2))
    steps = ((0.0, 1), (0.2, 1), (0.2, 8), (0.5, 8))
    intervals = (step(exposed).interval(timing, nodes) for exposed, nodes in steps)
    widths = [high - low for low, high in intervals]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    assert step(0.4).spread(1) == pytest.approx(2.0)
    assert step(0.0).interval(StackTiming(), 1) == pytest.approx(UNMEASURED_RANGE)


def test_a_stack_without_measurements_has_the_range_of_the_least_predictable_one() -> None:
    """No range on file is wider than the one that stands in where there is none."""
    low, high = UNMEASURED_RANGE
    for name in files_in("stack"):
        on_file = load_stack(name).timing.measured_over_predicted
        assert on_file is None or (low <= on_file[0] and on_file[1] <= high), name
    with pytest.raises(UserError, match=r"stack.timing.measured_over_predicted=\(1.1, 1.2\) is not a range around 1"):
        from_dict(StackTiming, {"measured_over_predicted": (1.1, 1.2)}, "stack.timing")


def test_a_plan_has_its_interval() -> None:
    (prediction,) = planned("model=7b", "cluster=8xh100", "cluster.nodes=2", "strategy=fsdp_full_shard").predictions
    cells = planned_row(prediction)
    low, seconds, high = (float(str(cells[f"predicted_step_{name}seconds"])) for name in ("low_", "", "high_"))
    assert 0 < low < seconds < high
    assert (low, high) == pytest.approx(prediction.time.interval(prediction.stack.timing, 2))
