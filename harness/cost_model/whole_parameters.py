"""The elements of whole parameters at the moments of a micro-batch under DeepSpeed's stage 3. Imports no torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from harness.config.checkpointing import CheckpointingConfig
from harness.config.model import ModelConfig
from harness.cost_model.parameter_coordinator import CoordinatorOptions, EventKind, Module, ParameterCoordinator
from harness.layout.model_profile import model_profile

# The order in which a layer runs its parts; the modules of each part run in the order of its parameters.
LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class Event(NamedTuple):
    """What happens to a module, and where in a micro-batch."""

    kind: EventKind
    module: Module
    phase: Literal["forward", "backward", "recompute"]


class LayerElements(NamedTuple):
    """The elements of whole parameters in the backward of a layer, which reaches its last matrix first."""

    computing: list[int]  # when the gradient of each matrix is computed
    accumulating: list[int]  # when that becomes the parameter's
    between: list[int]  # the most before the first of these matrices, between two of them, and behind the last one


class WholeParameters(NamedTuple):
    """The elements of whole parameters in a micro-batch, with the tensors through which they are gathered."""

    forward: tuple[int, ...]  # the most in each layer's forward
    at_head: int  # when forward enters the head
    loss: int  # between forward and backward
    entering_head: int  # when backward enters the head
    in_head: int  # in its backward
    behind_head: int  # in that of the final norm
    layers: tuple[LayerElements, ...]
    at_embedding: int  # in the embedding's backward


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
    events = micro_batch_events(model, checkpointing, modules)
    order = [event.module for event in events if event.kind == "enter"]
    sizes = [math.prod(shape) for shape in profile.parameter_shapes.values()]
    coordinator = ParameterCoordinator(sizes, order, options)
    layers = model.num_hidden_layers
    layer_of = {path: profile.layer_index(f"{path}.") for path in {event.module.path for event in events}}
    forward, backward = [0] * layers, [LayerElements([], [], [0]) for _ in range(layers)]
    most: dict[tuple[str, str, str], int] = {}  # at an event, with copies
    after: dict[tuple[str, str, str], int] = {}
    for kind, module, phase in events:
        if kind != "compute":
            getattr(coordinator, kind)(module)
        elements = after[kind, module.path, phase] = coordinator.elements
        copied = coordinator.gathered_at_once if kind == "enter" and backend_copies else 0
        most[kind, module.path, phase] = elements + copied
        layer = layer_of[module.path]
        if layer is not None and phase == "forward":
            forward[layer] = max(forward[layer], elements + copied)
        elif layer is not None:
            add_sample(backward[layer], kind, elements, module.is_matrix and phase == "backward")
    embedding, norm, head = modules[0].path, modules[-2].path, modules[-1].path
    return WholeParameters(
        tuple(forward),
        most["enter", head, "forward"],
        after["leave", "", "forward"],
        most["enter", head, "backward"],
        after["enter", head, "backward"],
        after["enter", norm, "backward"],
        tuple(backward),
        after["enter", embedding, "backward"],
    )


def add_sample(layer: LayerElements, kind: str, elements: int, is_at_matrix: bool) -> None:
    """Add the elements after an event of a layer's backward; `is_at_matrix` is whether it is a matrix's own."""
    if kind == "compute":
        layer.computing.append(elements)
    elif kind == "forget":
        layer.accumulating.append(elements)
    elif kind == "leave" and is_at_matrix:
        layer.between.append(elements)
    elif not (kind == "enter" and is_at_matrix):
        layer.between[-1] = max(layer.between[-1], elements)


def modules_in_order(model: ModelConfig) -> list[Module]:
    """Return the modules with parameters in the order in which forward runs them; a tied head is one of them."""
    profile = model_profile(model)
    numbers: dict[str, list[int]] = {}
    matrices = set()
    for number, (name, shape) in enumerate(profile.parameter_shapes.items()):
        path = name.rpartition(".")[0]
        numbers.setdefault(path, []).append(number)
        if len(shape) > 1:
            matrices.add(path)

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
    if model.tie_word_embeddings:
        modules.append(Module("lm_head", modules[0].parameters, is_matrix=True))
    return modules


def micro_batch_events(
    model: ModelConfig, checkpointing: CheckpointingConfig, modules: Sequence[Module]
) -> list[Event]:
    """Return what happens to the modules in forward and backward, in order.

    Backward never leaves an embedding, whose input has no gradient. It enters a layer's last matrix before it runs the
    layer's second forward, which ends as soon as that matrix refers to its parameters again.
    """
    profile = model_profile(model)
    embeddings = {name.rpartition(".")[0] for name in profile.embedding_shapes}
    forward = list(nested(modules))
    events = [Event(kind, module, "forward") for kind, module in forward]
    behind = -1  # the layer in whose backward the last event is
    for kind, module in reversed(forward):
        if kind == "leave":
            events.append(Event("enter", module, "backward"))
            layer = module.layer
            if module.is_matrix and layer is not None and layer != behind:
                behind = layer
                if checkpointing.recomputes_layer(layer):
                    events += second_forward([other for other in modules if other.layer == layer])
            continue
        if module.is_matrix:
            events += [Event("compute", module, "backward"), Event("forget", module, "backward")]
        if module.path not in embeddings:
            events.append(Event("leave", module, "backward"))
    return events


def second_forward(modules: Sequence[Module]) -> Iterator[Event]:
    """Yield what happens to a layer's modules in its second forward."""
    layer = {path for path in ancestors(modules[0]) if all(path in ancestors(module) for module in modules)}
    for kind, module in nested(modules):
        if module.path in layer:
            continue
        yield Event(kind, module, "recompute")
        if kind == "enter" and module.is_matrix:
            yield Event("refer", module, "recompute")
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
