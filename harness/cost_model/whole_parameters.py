"""The parameters that DeepSpeed's stage 3 has whole from moment to moment of a micro-batch. Imports no torch.

DeepSpeed records the order in which modules run and then fetches, prefetches and releases parameters by rules that
depend on nothing but that order, the sizes and four options (partitioned_param_coordinator.py). This module follows the
same rules with numbers of elements in the place of tensors.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig
from harness.layout.model_profile import model_profile

# The order in which a layer runs its parts; the modules of each part run in the order of its parameters.
LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

# What happens to a module: hooks of DeepSpeed, autograd's references to its parameters, and their gradients.
EventKind = Literal["enter", "leave", "refer", "compute", "forget"]

# The most elements of whole parameters, by the moment. Outside of layers that is an event: the phase, the module (the
# embedding, the final norm, the head, or else its path) and what happens to it; `gather` is its entering with copies.
# A layer's forward is one moment. In its backward, moments are those when a matrix's gradient is computed, when it is
# forgotten as it becomes the parameter's, and all between two matrices; the last number is the matrices before.
WholeParameters = Mapping[tuple[str | int, ...], int]


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


Event = tuple[EventKind, Module, Literal["forward", "backward", "recompute"]]  # what happens, where and when


def coordinator_options(options: Mapping[str, object]) -> CoordinatorOptions:
    """Return what the options of a strategy say about whole parameters."""
    names = {name: f"stage3_{name}" for name in CoordinatorOptions._fields}
    return CoordinatorOptions(**{name: int(float(str(options[key]))) for name, key in names.items() if key in options})


@lru_cache(maxsize=256)
def whole_parameters(
    model: ModelConfig, checkpointing: CheckpointingConfig, options: CoordinatorOptions, backend_copies: bool
) -> WholeParameters:
    """Return the elements of whole parameters in a micro-batch whose order of modules DeepSpeed has recorded.

    `backend_copies` is whether the backend copies what a module waits for, as gloo does.
    """
    profile, modules = model_profile(model), modules_in_order(model)
    events = list(micro_batch_events(model, checkpointing, modules))
    sizes = [math.prod(shape) for shape in profile.parameter_shapes.values()]
    coordinator = ParameterCoordinator(sizes, [module for kind, module, _ in events if kind == "enter"], options)
    layers = {path: profile.layer_index(f"{path}.") for path in {module.path for _, module, _ in events}}
    names = {modules[0].path: "embedding", modules[-2].path: "norm", modules[-1].path: "head"}
    most: defaultdict[tuple[str | int, ...], int] = defaultdict(int)
    behind: defaultdict[int, int] = defaultdict(int)  # matrices that backward has left, by their layer
    for kind, module, phase in events:
        if kind != "compute":
            getattr(coordinator, kind)(module)
        layer, place = layers[module.path], (phase, names.get(module.path, module.path))
        copied = coordinator.gathered_at_once if kind == "enter" and backend_copies else 0
        moments: dict[tuple[str | int, ...], int] = {}  # with their copies
        if layer is None:
            moments = {(*place, kind): 0, (*place, "gather"): copied} if kind == "enter" else {(*place, kind): 0}
        elif phase == "forward":
            moments = {("forward", layer): copied}
        elif kind in ("compute", "forget"):
            moments = {("backward", layer, kind, behind[layer]): 0}
        elif phase == "recompute" or kind == "leave" or not module.is_matrix:
            behind[layer] += module.is_matrix and phase == "backward"
            moments = {("backward", layer, "between", behind[layer]): 0}
        for moment, copies in moments.items():
            most[moment] = max(most[moment], coordinator.elements + copies)
    return dict(most)


def modules_in_order(model: ModelConfig) -> list[Module]:
    """Return the modules with parameters in the order in which forward runs them; a tied head is one of them."""
    profile = model_profile(model)
    paths = {name: name.rpartition(".")[0] for name in profile.parameter_shapes}
    matrices = {paths[name] for name, shape in profile.parameter_shapes.items() if len(shape) > 1}
    numbers = defaultdict[str, list[int]](list)
    for number, path in enumerate(paths.values()):
        numbers[path].append(number)

    def position(path: str) -> tuple[int, int]:
        layer = profile.layer_index(f"{path}.")
        if layer is None:
            return -1 if f"{path}.weight" in profile.embedding_shapes else model.num_hidden_layers, path in matrices
        parts = path.split(".")
        return layer, next((index for index, part in enumerate(LAYER_PARTS) if part in parts), len(LAYER_PARTS))

    modules = [
        Module(path, tuple(numbers[path]), path in matrices, profile.layer_index(f"{path}."))
        for path in sorted(numbers, key=position)
    ]
    head = Module("lm_head", modules[0].parameters, is_matrix=True)
    return [*modules, head] if model.tie_word_embeddings else modules


def micro_batch_events(
    model: ModelConfig, checkpointing: CheckpointingConfig, modules: Sequence[Module]
) -> Iterator[Event]:
    """Yield what happens to the modules in forward and backward, in order.

    Backward never leaves an embedding, whose input has no gradient. It enters a layer's last matrix before it runs the
    layer's second forward, which ends as soon as that matrix refers to its parameters again.
    """
    embeddings = {name.rpartition(".")[0] for name in model_profile(model).embedding_shapes}
    last_matrices = {module.layer: module for module in modules if module.is_matrix}
    forward = list(nested(modules))
    for kind, module in forward:
        yield kind, module, "forward"
    for kind, module in reversed(forward):
        if kind == "leave":
            yield "enter", module, "backward"
            layer = module.layer
            if layer is not None and module is last_matrices[layer] and checkpointing.recomputes_layer(layer):
                yield from second_forward([other for other in modules if other.layer == layer])
            continue
        if module.is_matrix:
            yield "compute", module, "backward"
            yield "forget", module, "backward"
        if module.path not in embeddings:
            yield "leave", module, "backward"


def second_forward(modules: Sequence[Module]) -> Iterator[Event]:
    """Yield what happens to a layer's modules in its second forward."""
    layer = {path for path in ancestors(modules[0]) if all(path in ancestors(module) for module in modules)}
    for kind, module in nested(modules):
        if module.path in layer:
            continue
        yield kind, module, "recompute"
        if kind == "enter" and module.is_matrix:
            yield "refer", module, "recompute"
            if module is modules[-1]:
                return


def nested(modules: Sequence[Module]) -> Iterator[tuple[Literal["enter", "leave"], Module]]:
    """Yield the modules in which forward enters and leaves these and the modules around them."""
    around: list[str] = []
    for module in modules:
        paths = ancestors(module)
        while around and around[-1] not in paths:
            yield "leave", Module(around.pop())
        for path in paths[len(around) :]:
            around.append(path)
            yield "enter", Module(path)
        yield "enter", module
        yield "leave", module
    while around:
        yield "leave", Module(around.pop())


def ancestors(module: Module) -> list[str]:
    """Return the paths of the modules around a module, the model's first, without lists of layers, which never run."""
    parts = module.path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts)) if not parts[end].isdigit()]


class ParameterCoordinator:
    """DeepSpeed's coordinator in a micro-batch.

    `sizes` is the elements of every parameter, and `order` the modules in the order in which forward and backward enter
    them. Small parameters are whole at all times.
    """

    def __init__(self, sizes: Sequence[int], order: Sequence[Module], options: CoordinatorOptions) -> None:
        self.sizes, self.options = sizes, options
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
