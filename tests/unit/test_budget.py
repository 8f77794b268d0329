"""What each package weighs, held to the budget in tests/support/budget.toml."""

import tomllib
from collections.abc import Iterator, Mapping

from tests.benchmarks.weight import BUDGET, ROUNDED, Weights, measured_budget

SPARE = 0.05  # of a figure: where a budget leaves more, it is to be lowered


def budget_problems(budget: Mapping[str, Weights], measured: Mapping[str, Weights]) -> Iterator[str]:
    """Yield a line for each figure that exceeds its budget or is far below it, and for each package without one."""
    for row in budget.keys() | measured.keys():
        if row not in budget or row not in measured:
            yield f"{row}: in the budget or in the code, not in both"
            continue
        for name, allowed in budget[row].items():
            if measured[row][name] > allowed:
                yield f"{row}: {measured[row][name]} {name}, {allowed} allowed: cut, or raise it with a reason"
            elif allowed - measured[row][name] > SPARE * allowed + ROUNDED[name]:
                yield f"{row}: {measured[row][name]} {name}, {allowed} allowed: lower the budget"


def test_no_package_exceeds_its_budget():
    assert sorted(budget_problems(tomllib.loads(BUDGET.read_text()), measured_budget())) == []


def test_growth_waste_and_new_packages_are_named():
    budget = {"harness/a": {"statements": 1000}, "harness/b": {"statements": 1000}, "harness/c": {"statements": 1000}}
    measured = {"harness/a": {"statements": 1001}, "harness/b": {"statements": 900}, "harness/d": {"statements": 1}}
    packages = sorted(problem.partition(":")[0] for problem in budget_problems(budget, measured))
    assert packages == ["harness/a", "harness/b", "harness/c", "harness/d"]
