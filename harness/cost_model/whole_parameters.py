"""The elements of whole parameters at the moments of a micro-batch under DeepSpeed's stage 3. Imports no torch."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal

from harness.config.model import ModelConfig
from harness.config.schema import CheckpointingConfig
from harness.cost_model.parameter_coordinator import CoordinatorOptions, EventKind, Module, ParameterCoordinator
from harness.layout.model_profile import model_profile

# The order in which a layer runs its parts; the modules of each part run in the order of its parameters.
LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

Event = tuple[EventKind, Module, Literal["forward", "backward", "recompute"]]  # what happens, where and when

# The most elements of whole parameters, by the moment. Outside of layers that is an event: the phase, the module (the
# embedding, the final norm, the head, or else its path) and what happens to it; `gather` is its entering with copies.
# A layer's forward is one moment. In its backward, moments are those when a matrix's gradient is computed, when it is
# forgotten as it becomes the parameter's, and all between two matrices; the last number is the matrices before.
WholeParameters = Mapping[tuple[str | int, ...], int]


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
