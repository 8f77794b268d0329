"""The parameters that DeepSpeed's stage 3 has whole from moment to moment of a micro-batch. Imports no torch.

DeepSpeed records the order in which modules run and then fetches, prefetches and releases parameters by rules that
depend on nothing but that order, the sizes and four options (partitioned_param_coordinator.py). This module follows the
same rules with numbers of elements in the place of tensors.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

# What happens to a module: hooks of DeepSpeed, autograd's references to its parameters, and their gradients.
EventKind = Literal["enter", "leave", "refer", "compute", "forget"]


class CoordinatorOptions(NamedTuple):
    """The options of DeepSpeed's configuration that say how long parameters stay whole, in elements."""

    max_reuse_distance: int = 10**9
    max_live_parameters: int = 10**9
    prefetch_bucket_size: int = 5 * 10**7
    param_persistence_threshold: int = 10**5


class Module(NamedTuple):
    """A module of the model and the numbers of its own parameters, in the order of the model's parameters."""

    path: str
    parameters: tuple[int, ...] = ()
    is_matrix: bool = False
    layer: int | None = None  # the index of the decoder layer that it is part of, if it has parameters


class ParameterCoordinator:
    """DeepSpeed's coordinator in a micro-batch.

    `sizes` is the elements of every parameter, and `order` the modules in the order in which forward and backward enter
    them. Small parameters are whole at all times.
    """

    def __init__(self, sizes: Sequence[int], order: Sequence[Module], options: CoordinatorOptions) -> None:
        self.sizes, self.order, self.options = sizes, order, options
        self.queue = deque((number, step) for step, module in enumerate(order) for number in module.parameters)
        self.uses = defaultdict[int, list[int]](list)  # the steps at which a parameter is used
        for number, step in self.queue:
            self.uses[number].append(step)
        traversed = (self._size(module.parameters) for module in order)
        self.before_step = list(accumulate(traversed, initial=0))  # elements of all modules before a step
        self.step = 0  # of the next module in the order
        self.fetched_for = defaultdict[int, int](lambda: -1)  # the last step for which a parameter was fetched
        self.users = defaultdict[int, set[str]](set)  # the modules that use a parameter now
        self.references: dict[int, bool] = {}  # by parameter, whether its tensor is still the whole one
        self.in_flight: dict[int, tuple[int, ...]] = {}  # by parameter, all that are gathered with it
        self.whole = {number for number in self.uses if self._is_persistent(number)}
        self.elements = self._size(self.whole)  # of all tensors that exist now
        self.available = 0  # elements that count against max_live_parameters
        self.gathered_at_once = 0  # elements that the module entered last was waiting for, as nothing had gathered them

    def enter(self, module: Module) -> None:
        """Fetch the parameters of the next module in the order, and prefetch those of others."""
        if module != self.order[self.step]:
            raise ValueError(f"{module} is not the next module, which is {self.order[self.step]}")
        partitioned = [number for number in module.parameters if self._is_partitioned(number)]
        self.gathered_at_once = self._size(partitioned)
        self._gather(partitioned)
        for number in module.parameters:
            self.users[number].add(module.path)
            self._wait(number)
        missing = {number for number in module.parameters if self.fetched_for[number] < self.step}
        while self.queue and missing:
            number, step = self.queue.popleft()
            self.fetched_for[number] = step
            missing.discard(number)
        self._prefetch()
        self.step += 1

    def leave(self, module: Module) -> None:
        """Release the parameters of a module that has run, but for those that another one uses soon."""
        for number in module.parameters:
            self.users[number].discard(module.path)
            if not self.users[number] and number in self.whole and not self._stays(number):
                self.whole.discard(number)
                self.available -= self.sizes[number]
                if self.references.get(number):
                    self.references[number] = False  # what refers to the tensor alone has it now
                else:
                    self.elements -= self.sizes[number]

    def refer(self, module: Module) -> None:
        """Keep a reference to the present tensors of a module's parameters, as autograd does in a second forward."""
        self.references |= {number: True for number in module.parameters if number in self.whole}

    def forget(self, module: Module) -> None:
        """Drop the references to the tensors of a module's parameters."""
        for number in module.parameters:
            if self.references.pop(number, True) is False:
                self.elements -= self.sizes[number]

    def _size(self, numbers: Iterable[int]) -> int:
        return sum(self.sizes[number] for number in numbers)

    def _is_partitioned(self, number: int) -> bool:
        return number not in self.whole and number not in self.in_flight

    def _is_persistent(self, number: int) -> bool:
        return self.sizes[number] <= self.options.param_persistence_threshold

    def _gather(self, numbers: Sequence[int]) -> None:
        """Gather partitioned parameters; those of one call share a flat tensor (all_gather_coalesced)."""
        self.in_flight |= dict.fromkeys(numbers, tuple(numbers))
        self.available += self._size(numbers)
        self.elements += self._size(numbers)

    def _wait(self, number: int) -> None:
        """Wait for a parameter, and for all that were gathered with it.

        A single one is gathered in place. Several are copied out of the flat tensor when the first of them is waited
        for, and that is freed when all have been waited for (partition_parameters.py, AllGatherCoalescedHandle).
        """
        together = self.in_flight.pop(number, ())
        flat = self._size(together) if len(together) > 1 else 0
        if number not in self.whole:
            self.elements += flat
            self.whole.update(together)
        if all(other is not together for other in self.in_flight.values()):
            self.elements -= flat

    def _prefetch(self) -> None:
        """Gather the parameters that are used next, as many as the options allow (_fetch_sub_module_impl)."""
        limit = min(self.options.max_live_parameters - self.available, self.options.prefetch_bucket_size)
        numbers: dict[int, None] = {}
        while self.queue and self._size(numbers) < limit:
            number, step = self.queue.popleft()
            self.fetched_for[number] = max(self.fetched_for[number], step)
            if self._is_partitioned(number):
                numbers[number] = None
        self._gather([*numbers])

    def _stays(self, number: int) -> bool:
        """Return whether a parameter is small, was fetched for a later module, or is used again within the distance.

        This is the rule of __params_to_release.
        """
        if self._is_persistent(number) or self.fetched_for[number] > self.step:
            return True
        following = next((self.before_step[step] for step in self.uses[number] if step >= self.step), math.inf)
        return following - self.before_step[self.step] < self.options.max_reuse_distance
