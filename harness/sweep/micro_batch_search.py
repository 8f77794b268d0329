"""train.micro_batch=max: the largest micro-batch that fits, found by running it."""

from collections.abc import Callable, Sequence
from typing import Any

from harness.records.schema import Record
from harness.runner.plan import Plan
from harness.util.errors import UserError

MAX = "max"


def wants_max_micro_batch(values: dict[str, Any]) -> bool:
    train = values.get("train")
    return isinstance(train, dict) and train.get("micro_batch") == MAX


def candidates(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The same values with every micro-batch that divides the batch, smallest first. Raises UserError."""
    batch = values["train"].get("global_batch")
    if type(batch) is not int or batch < 1:
        raise UserError(
            f"train.micro_batch=max is a divisor of train.global_batch={batch}: choose a whole number for it"
        )
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    return [values | {"train": values["train"] | {"micro_batch": size}} for size in sizes]


def feasible_plans(values: dict[str, Any], plan: Callable[[dict[str, Any]], Plan]) -> list[Plan]:
    """The plans of those that the layout takes. Raises UserError, of the smallest, if it takes none."""
    found: list[Plan] = []
    refusal: UserError | None = None
    for candidate in candidates(values):
        try:
            found.append(plan(candidate))
        except UserError as error:
            refusal = refusal or error
    if not found and refusal is not None:
        raise refusal
    return found


class MicroBatchSearch:
    """Begins with the largest that is predicted to fit and goes up or down from there, a run at a time."""

    def __init__(self, plans: Sequence[Plan], fits: Callable[[Plan], bool]) -> None:
        self.plans = plans
        self.at = max((index for index, plan in enumerate(plans) if fits(plan)), default=0)
        self.largest: int | None = None  # index of the largest that ran
        self.above: tuple[int, str] | None = None  # of the smallest that did not, and how it ended

    @property
    def first(self) -> Plan:
        return self.plans[self.at]

    def next(self, record: Record) -> Plan | None:
        """What to run after the last one ended so; None when it is found, or cannot be for another failure."""
        status = record["row"]["status"]
        if status == "ok":
            self.largest, step = self.at, 1
        else:
            self.above, step = (self.at, status), -1
        following = self.at + step
        known = (self.largest, self.above and self.above[0])
        if status not in ("ok", "oom", "refused") or following in known or not 0 <= following < len(self.plans):
            return None
        self.at = following
        return self.plans[following]

    def result(self) -> str:
        asked = f"train.micro_batch=max of {self.plans[0].run_id.rpartition('-')[0]}"
        other = f"; {self.size(self.above[0])} is {self.above[1]}" if self.above else ""
        if self.largest is None:
            return f"{asked}: none is ok{other}"
        return f"{asked}: {self.size(self.largest)} fits{other}"

    def size(self, index: int) -> int:
        return self.plans[index].config.train.micro_batch
