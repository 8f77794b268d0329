"""The parameters that DeepSpeed's stage 3 has whole from moment to moment of a micro-batch. Imports no torch.

DeepSpeed records the order in which modules run and then fetches, prefetches and releases parameters by rules that
depend on nothing but that order, the sizes and four options (partitioned_param_coordinator.py). This module follows the
same rules with numbers of elements in the place of tensors.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig
from harness.layout.model_profile import model_profile

# The most elements of whole parameters, by the moment. Outside of layers that is an event: the phase, the module (the
# embedding, the norm, the head, or else its path) and what happens to it; `gather` is its entering with copies.
# A layer's forward is one moment. In its backward, moments are those when a matrix's gradient is computed, when it is
# forgotten as it becomes the parameter's, and all between two of them; the last number is the trained matrices before.
WholeParameters = Mapping[tuple[str | int, ...], int]


# The options of DeepSpeed's configuration that say how long parameters stay whole, with their defaults in elements.
OPTIONS = {
    "stage3_max_reuse_distance": 10**9,
    "stage3_max_live_parameters": 10**9,
    "stage3_prefetch_bucket_size": 5 * 10**7,
    "stage3_param_persistence_threshold": 10**5,
}


class Module(NamedTuple):
    """A module of the model, the names of its own parameters, and how many of these are matrices."""

    path: str
    parameters: tuple[str, ...] = ()
    matrices: int = 0

    @property
    def chain(self) -> list["Module"]:
        """The modules around it that run, which lists of layers or adapters do not, from the model on, and itself."""
        parts = self.path.split(".")
        around = [".".join(parts[:end]) for end, part in enumerate(parts) if not part.isdigit() and part != "default"]
        return [*map(Module, around), self]


# What happens to a module, and when: hooks of DeepSpeed, autograd's references to its parameters, and their gradients.
Event = tuple[
    Literal["enter", "leave", "refer", "compute", "forget", "between"],
    Module,
    Literal["forward", "backward", "recompute"],
]


@lru_cache(maxsize=256)
def whole_parameters(
    model: ModelConfig, checkpointing: CheckpointingConfig, options: tuple[int, ...], backend_copies: bool
) -> WholeParameters:
    """Return the elements of whole parameters in a micro-batch whose order of modules DeepSpeed has recorded.

    `options` are the values of OPTIONS. `backend_copies` is whether the backend copies what a module waits for, as gloo
    does.
    """
    profile, modules = model_profile(model), modules_in_order(model)
    places = {modules[0].path: "embedding", modules[-2].path: "norm", modules[-1].path: "head"}
    events = list(micro_batch_events(model, checkpointing, modules))
    sizes = {name: math.prod(shape) for name, shape in profile.parameter_shapes.items()}
    coordinator = ParameterCoordinator(sizes, [module for kind, module, _ in events if kind == "enter"], options)
    most = defaultdict[tuple[str | int, ...], int](int)
    behind = Counter[int]()  # trained matrices that backward has left, by their layer
    for kind, module, phase in events:
        waited = getattr(coordinator, kind)(module) if kind not in ("compute", "between") else 0
        layer, copied = profile.layer_index(module.path), waited if kind == "enter" and backend_copies else 0
        is_of_gradient = kind in ("compute", "forget") and model.adapter.trains(module.path)
        moments: dict[tuple[str | int, ...], int] = {}  # with their copies
        if layer is None:
            place = (phase, places.get(module.path, module.path))
            moments = {(*place, kind): 0, (*place, "gather"): copied}
        elif phase == "forward":
            moments = {(phase, layer): copied}
        elif is_of_gradient:
            moments = {(phase, layer, kind, behind[layer]): 0}
        elif phase == "recompute" or kind != "enter" or not module.matrices:
            moments = {("backward", layer, "between", behind[layer]): 0}
        for moment, copies in moments.items():
            most[moment] = max(most[moment], coordinator.elements + copies)
        if layer is not None:
            behind[layer] += is_of_gradient and kind == "forget"
    return dict(most)


def modules_in_order(model: ModelConfig) -> list[Module]:
    """Return the modules with parameters in the order in which forward runs them; a tied head is one of them."""
    shapes = model_profile(model).parameter_shapes
    names = {path: tuple(own) for path, own in groupby(shapes, lambda name: name.rpartition(".")[0])}
    paths = decoder_order(model) if model.hf_info is None else list(model.hf_info.modules_in_order or names)
    of_modules = [(path, names.get(path, names[paths[0]])) for path in paths]
    return [Module(path, own, sum(len(shapes[name]) > 1 for name in own)) for path, own in of_modules]


def decoder_order(model: ModelConfig) -> list[str]:
    """Return the paths of the modules of the project's decoder in the order in which forward runs them."""
    profile = model_profile(model)
    of_branches = [
        path
        for branch in model.architecture.branches
        for path in (branch.norm, *[f"{branch.module}.{each.matrix}" for each in branch.operators if each.matrix])
    ]
    own = dict.fromkeys(name.rpartition(".")[0] for name in profile.layer_shapes)  # with those that peft puts in others
    in_layer = [path for outer in of_branches for path in own if f"{path}.".startswith(f"{outer}.")]
    paths = [name.removesuffix(".weight") for name in profile.embedding_shapes]
    layers = [f"layers.{index}.{path}" for index in range(model.num_hidden_layers) for path in in_layer]
    return [*paths, *layers, "norm", "lm_head"]


def micro_batch_events(
    model: ModelConfig, checkpointing: CheckpointingConfig, modules: Sequence[Module]
) -> Iterator[Event]:
    """Yield what happens to the modules in forward and backward, in order.

    Backward never leaves an embedding, whose input has no gradient, and does not enter a frozen one. It enters a
    layer's last matrix before it runs the layer's second forward, which ends as soon as that matrix refers to its
    parameters again.
    """
    profile = model_profile(model)
    embeddings = {module.path for module in modules[:-2] if profile.layer_index(module.path) is None}
    by_layer = defaultdict[int | None, list[Module]](list)
    for module in modules:
        by_layer[profile.layer_index(module.path)].append(module)
    last_matrices = {layer: [each for each in own if each.matrices][-1] for layer, own in by_layer.items()}
    depth = len(Module(profile.layers[0]).chain)
    forward = list(nested(modules))
    yield from ((kind, module, "forward") for kind, module in forward)
    for kind, module in reversed(forward):
        if module.path in embeddings and model.adapter.is_enabled:
            continue
        if kind == "leave":
            yield "enter", module, "backward"
            layer = profile.layer_index(module.path)
            if layer is not None and module is last_matrices[layer] and checkpointing.recomputes_layer(layer):
                yield from second_forward(by_layer[layer], depth)
        else:
            for number in range(module.matrices):
                if number:
                    yield "between", module, "backward"
                yield "compute", module, "backward"
                yield "forget", module, "backward"
            if module.path not in embeddings:
                yield "leave", module, "backward"


def second_forward(modules: Sequence[Module], depth: int) -> Iterator[Event]:
    """Yield what happens to a layer's modules in its second forward, which is inside of so many outer modules."""
    for kind, module in nested(modules, depth):
        yield kind, module, "recompute"
        if kind == "enter" and module.matrices:
            yield "refer", module, "recompute"
            if module is [each for each in modules if each.matrices][-1]:
                return


def nested(modules: Sequence[Module], depth: int = 0) -> Iterator[tuple[Literal["enter", "leave"], Module]]:
    """Yield these modules and those around them, but for so many outermost ones, as forward enters and leaves them."""
    chains = [[], *(module.chain[depth:] for module in modules), []]
    for before, after in pairwise(chains):
        shared = sum(1 for pair in zip(before, after, strict=False) if pair[0] == pair[1])
        yield from (("leave", module) for module in reversed(before[shared:]))
        yield from (("enter", module) for module in after[shared:])


class ParameterCoordinator:
    """DeepSpeed's coordinator in a micro-batch.

    `sizes` is the elements of every parameter by its name, `order` the modules in the order in which forward and
    backward enter them, and `options` the values of OPTIONS. Small parameters are whole at all times.
    """

    def __init__(self, sizes: Mapping[str, int], order: Sequence[Module], options: Sequence[int]) -> None:
        self.sizes = sizes
        self.max_reuse_distance, self.max_live_parameters, self.prefetch_bucket_size, largest_small = options
        self.queue = deque((name, step) for step, module in enumerate(order) for name in module.parameters)
        self.uses = defaultdict[str, list[int]](list)  # the steps at which a parameter is used
        for name, step in self.queue:
            self.uses[name].append(step)
        traversed = (self._size(module.parameters) for module in order)
        self.before_step = list(accumulate(traversed, initial=0))  # elements of all modules before a step
        self.step = 0  # of the next module in the order
        self.fetched_for = defaultdict[str, int](lambda: -1)  # the last step for which a parameter was fetched
        self.references: dict[str, bool] = {}  # by parameter, whether its tensor is still the whole one
        self.in_flight: dict[str, tuple[str, ...]] = {}  # by parameter, all that are gathered with it
        self.small = {name for name in self.uses if sizes[name] <= largest_small}
        self.whole = set(self.small)
        self.elements = self._size(self.whole)  # of all tensors that exist now
        self.available = 0  # elements that count against max_live_parameters

    def enter(self, module: Module) -> int:
        """Fetch the parameters of the next module in the order, and prefetch those of others.

        Return the elements that it waits for, as nothing had gathered them.
        """
        missing = [name for name in module.parameters if name not in self.whole and name not in self.in_flight]
        self._gather(missing)
        for name in module.parameters:
            self._wait(name)
        limit = min(self.max_live_parameters - self.available, self.prefetch_bucket_size)
        ahead: list[str] = []  # those that are used next, as many as the options allow (_fetch_sub_module_impl)
        while self.queue and (self.queue[0][1] == self.step or self._size(ahead) < limit):
            name, step = self.queue.popleft()
            self.fetched_for[name] = step
            if name not in self.whole and name not in self.in_flight and name not in ahead:
                ahead.append(name)
        self._gather(ahead)
        self.step += 1
        return self._size(missing)

    def leave(self, module: Module) -> None:
        """Release the parameters of a module that has run, but for those that another one uses soon."""
        for name in module.parameters:
            if name in self.whole and not self._stays(name):
                self.whole.discard(name)
                self.available -= self.sizes[name]
                if self.references.get(name):
                    self.references[name] = False  # what refers to the tensor alone has it now
                else:
                    self.elements -= self.sizes[name]

    def refer(self, module: Module) -> None:
        """Keep a reference to the present tensors of a module's parameters, as autograd does in a second forward."""
        self.references |= {name: True for name in module.parameters if name in self.whole}

    def forget(self, module: Module) -> None:
        """Drop the references to the tensors of a module's parameters."""
        for name in module.parameters:
            if self.references.pop(name, True) is False:
                self.elements -= self.sizes[name]

    def _size(self, names: Iterable[str]) -> int:
        return sum(self.sizes[name] for name in names)

    def _gather(self, names: Sequence[str]) -> None:
        """Gather partitioned parameters; those of one call share a flat tensor (all_gather_coalesced)."""
        self.in_flight |= dict.fromkeys(names, tuple(names))
        self.available += self._size(names)
        self.elements += self._size(names)

    def _wait(self, name: str) -> None:
        """Wait for a parameter, and for all that were gathered with it.

        A single one is gathered in place. Several are copied out of the flat tensor when the first of them is waited
        for, and that is freed when all have been waited for (partition_parameters.py, AllGatherCoalescedHandle).
        """
        together = self.in_flight.pop(name, ())
        flat = self._size(together) if len(together) > 1 else 0
        if name not in self.whole:
            self.elements += flat
            self.whole.update(together)
        if all(other is not together for other in self.in_flight.values()):
            self.elements -= flat

    def _stays(self, name: str) -> bool:
        """Return whether a parameter is small, was fetched for a later module, or is used again within the distance.

        This is the rule of __params_to_release.
        """
        if name in self.small or self.fetched_for[name] > self.step:
            return True
        following = next((self.before_step[step] for step in self.uses[name] if step >= self.step), math.inf)
        return following - self.before_step[self.step] < self.max_reuse_distance
