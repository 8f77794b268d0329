"""The search behind train.micro_batch=max: the largest micro-batch that fits, found by running candidates."""

from collections.abc import Callable, Sequence

from harness.config.from_dict import ConfigValues
from harness.records.schema import Record
from harness.runner.plan import RunPlan
from harness.util.errors import UserError

MAX = "max"


def wants_max_micro_batch(values: ConfigValues) -> bool:
    """Return whether composed values have train.micro_batch=max."""
    train = values.get("train")
    return isinstance(train, dict) and train.get("micro_batch") == MAX


def candidates(values: ConfigValues) -> list[ConfigValues]:
    """Return the values with every micro-batch that divides the global batch, smallest first. Raises UserError."""
    batch = values["train"].get("global_batch")
    if type(batch) is not int or batch < 1:
        raise UserError(
            f"train.micro_batch=max searches the divisors of train.global_batch={batch}: choose a whole number for it"
        )
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    return [values | {"train": values["train"] | {"micro_batch": size}} for size in sizes]


def feasible_plans(values: ConfigValues, plan: Callable[[ConfigValues], RunPlan]) -> list[RunPlan]:
    """Return the plans of the candidates that can be run. Raises the UserError of the smallest if none can."""
    plans: list[RunPlan] = []
    first_error: UserError | None = None
    for candidate in candidates(values):
        try:
            plans.append(plan(candidate))
        except UserError as error:
            first_error = first_error or error
    if not plans and first_error is not None:
        raise first_error
    return plans


class MicroBatchSearch:
    """A search that starts at the largest micro-batch predicted to fit and goes up or down, one run at a time."""

    def __init__(self, plans: Sequence[RunPlan], fits: Callable[[RunPlan], bool]) -> None:
        self.plans = plans
        self.index = max((index for index, plan in enumerate(plans) if fits(plan)), default=0)
        self.largest: int | None = None  # index of the largest that ran
        self.smallest_failure: tuple[int, str] | None = None  # index and status of the smallest that did not

    @property
    def first(self) -> RunPlan:
        """The plan to run first."""
        return self.plans[self.index]

    def next(self, record: Record) -> RunPlan | None:
        """Return the plan to run after this record; None if the search is over, or any other failure ends it."""
        status = record.status
        if status == "ok":
            self.largest, step = self.index, 1
        else:
            self.smallest_failure, step = (self.index, status), -1
        following = self.index + step
        known = (self.largest, self.smallest_failure and self.smallest_failure[0])
        if status not in ("ok", "oom", "refused") or following in known or not 0 <= following < len(self.plans):
            return None
        self.index = following
        return self.plans[following]

    def result(self) -> str:
        """Return the outcome of the search as one line."""
        searched = f"train.micro_batch=max of {self.plans[0].run_id.rpartition('-')[0]}"
        failure = self.smallest_failure
        above = f"; {self.size(failure[0])} is {failure[1]}" if failure else ""
        if self.largest is None:
            return f"{searched}: no micro-batch is ok{above}"
        return f"{searched}: {self.size(self.largest)} fits{above}"

    def size(self, index: int) -> int:
        """Return the micro-batch of a plan by its index."""
        return self.plans[index].config.train.micro_batch
