"""The facts about a model that its layout, its cost and its engines depend on, whichever code builds the model.

Those of the project's own decoder (harness.models.decoder) follow from its sizes; those of a model of the transformers
library are read off its trace (HFModelInfo).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from harness.config.model import HFModelInfo, ModelConfig
from harness.layout.layer_spec import MATRIX_DIMS, SHARD_DIM, STYLES, Matrix, Shapes, layer_matrices, norm_shapes, numel


@dataclass(frozen=True, eq=False)
class ModelProfile:
    """The parameters of a model and its modules, by their plain names in the whole model."""

    # Whether the layers are this project's. Exported scripts contain them, every engine is tested with them, they can
    # be compiled and cut into stages, and there are formulas for their activations and so for the peak of memory.
    # The matrices of attention, and those of the MLP, share the collectives of their input and output, where
    # tensor-parallel ranks sum or gather for every matrix of a library's plan by itself.
    is_project_decoder: bool
    parameter_shapes: Shapes  # of every parameter; a tied one appears once
    layers: tuple[str, ...]  # the paths of the decoder layers
    head: tuple[str, ...]  # the paths of the modules that a pipeline's last stage has
    # The style of each module that tensor parallelism changes, by its path. A library's style that no rank can apply
    # here is none of them, and incompatibilities() refuses to cut the model.
    tensor_plan: Mapping[str, str]
    layer_matrices: tuple[Matrix, ...]  # of the first layer, in the order of its parameters
    # Paths, or ends of paths, of modules that a second forward does not run to their end.
    not_recomputed: tuple[str, ...]
    rotated_key_features: int = 0  # of latent attention, the features of a key that all heads share

    @cached_property
    def layer_shapes(self) -> Shapes:
        """The shapes of the first layer's parameters by their names in the layer."""
        prefix, named = f"{self.layers[0]}.", self.parameter_shapes.items()
        return {name.removeprefix(prefix): shape for name, shape in named if name.startswith(prefix)}

    @cached_property
    def cut_tensors(self) -> frozenset[str]:
        """Which tensors tensor-parallel ranks divide in every layer, and behind the layers: `heads`, `inner`, `logits`.

        A row-parallel matrix takes a divided input. The MLP has a layer's last matrix.
        """
        if self.is_project_decoder:
            return frozenset(("heads", "inner", "logits"))
        is_cut = {"logits": self.tensor_plan.get(self.head[-1]) == "vocabulary"}
        for name, of_mlp in (("heads", False), ("inner", True)):
            is_cut[name] = all(self._has_row(layer, of_mlp) for layer in self.layers)
        return frozenset(name for name, holds in is_cut.items() if holds)

    def _has_row(self, layer: str, of_mlp: bool) -> bool:
        """Return whether a matrix of a layer's MLP, or one of its others, is row-parallel."""
        matrices = [name for name, shape in self.parameter_shapes.items() if len(shape) >= MATRIX_DIMS]
        paths = [name.rpartition(".")[0] for name in matrices if name.startswith(f"{layer}.")]
        mlp = paths[-1].rpartition(".")[0]
        return any(self.tensor_plan.get(path) == "row" and (path.rpartition(".")[0] == mlp) == of_mlp for path in paths)

    @cached_property
    def embedding_shapes(self) -> Shapes:
        """The shapes of all parameters that are neither in decoder layers nor in the head, as tables are."""
        named = self.parameter_shapes.items()
        return {name: shape for name, shape in named if name not in self.head_shapes and self.layer_index(name) is None}

    @cached_property
    def head_shapes(self) -> Shapes:
        """The shapes of the head's parameters, which for the project's decoder are the final norm's, too."""
        prefixes = tuple(f"{path}." for path in self.head)
        return {name: shape for name, shape in self.parameter_shapes.items() if name.startswith(prefixes)}

    @cached_property
    def has_biases(self) -> bool:
        """Whether modules of the decoder layers, norms included, have biases."""
        return any(name.endswith(".bias") and self.layer_index(name) is not None for name in self.parameter_shapes)

    def layer_index(self, name: str) -> int | None:
        """Return the index of the decoder layer that a parameter or module is part of; None if it is part of none."""
        path = ".".join(name.split(".")[: self.layers[0].count(".") + 1])
        return self.layers.index(path) if path in self.layers else None

    def recomputes_to_end(self, module: str) -> bool:
        """Return whether the second forward of a checkpointed layer runs this module to its end."""
        return not module.endswith(self.not_recomputed)


@lru_cache(maxsize=64)
def model_profile(model: ModelConfig) -> ModelProfile:
    """Return the profile of a model."""
    return decoder_profile(model) if model.hf_info is None else traced_profile(model, model.hf_info)


def decoder_profile(model: ModelConfig) -> ModelProfile:
    """Return the profile of the project's decoder; parameters have the names of Hugging Face's Llama.

    A tied head is the embedding. A second forward runs all modules of a layer to their end but for the last matrix,
    and that one, too, where each token's outputs of experts are summed behind it. Of a last matrix with an adapter it
    does not run the adapter's second one. The first one is whole by then: its module reads the width of the weight,
    and DeepSpeed's stage 3 gathers all that a module reads when backward enters it.
    """
    layers, matrices = tuple(f"layers.{i}" for i in range(model.num_hidden_layers)), layer_matrices(model)
    table = (model.vocab_size, model.hidden_size)
    of_layer: Shapes = {}
    for branch in model.architecture.branches:
        of_layer |= norm_shapes(branch.norm, model)
    for matrix in matrices:
        of_layer[f"{matrix.base_path}.weight"] = matrix.shape
        if model.architecture.biases:
            of_layer[f"{matrix.base_path}.bias"] = (matrix.outputs,)
        of_layer |= {f"{matrix.path}.{name}": shape for name, shape in matrix.adapter_shapes.items()}
    shapes: Shapes = {"embed_tokens.weight": table}
    if model.architecture.learned_positions:
        shapes["embed_positions.weight"] = (model.context_length, model.hidden_size)
    shapes |= {f"{path}.{name}": shape for path in layers for name, shape in of_layer.items()}
    shapes |= norm_shapes("norm", model) | ({} if model.tie_word_embeddings else {"lm_head.weight": table})
    styled = [(part, matrix.style) for matrix in matrices if matrix.style for part in matrix.cut_modules]
    plan = {f"{path}.{part}": style for path in layers for part, style in styled}
    plan |= {"embed_tokens": "vocabulary", "lm_head": "vocabulary"}
    of_adapter = [f"{matrices[-1].path}.{name.removesuffix('.weight')}" for name in matrices[-1].adapter_shapes]
    not_recomputed = () if model.architecture.has_experts else tuple(of_adapter or [matrices[-1].path])
    return ModelProfile(True, shapes, layers, ("norm", "lm_head"), plan, matrices, not_recomputed)


def traced_profile(model: ModelConfig, info: HFModelInfo) -> ModelProfile:
    """Return the profile of a library's model, with the library's own plan.

    A parameter of more than two dimensions is the matrices of all experts.
    """
    plan = {path: style for path, style in info.tensor_plan.items() if style in STYLES}
    cut = {path: style for path, style in plan.items() if style in SHARD_DIM}
    first = f"{info.layers[0]}."
    weights = {name.removesuffix(".weight"): shape for name, shape in info.shapes.items() if name.startswith(first)}
    matrices = tuple(
        Matrix(
            path.rpartition(".")[2],
            path.removeprefix(first),
            shape[-2],
            shape[-1],
            cut.get(path),
            experts=model.num_experts if len(shape) > MATRIX_DIMS else 0,
            uses=model.num_experts_per_tok if len(shape) > MATRIX_DIMS else 1,
        )
        for path, shape in weights.items()
        if len(shape) == MATRIX_DIMS or (len(shape) > MATRIX_DIMS and model.num_experts)
    )
    rotated: int = info.config.get("qk_rope_head_dim") or 0
    of_layers, head = info.not_recomputed_modules, (info.head,)
    return ModelProfile(False, info.shapes, info.layers, head, plan, matrices, of_layers, rotated)


def active_parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters that compute a token: of experts, those that a token has."""
    unused = sum(
        (each.experts - each.uses) * each.outputs * each.inputs
        for each in model_profile(model).layer_matrices
        if each.experts
    )
    return parameter_count(model) - model.num_hidden_layers * unused


def trained_parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters that are trained: those of adapters where there are any, else all of them."""
    shapes = model_profile(model).parameter_shapes
    return numel({name: shape for name, shape in shapes.items() if model.adapter.trains(name)})


@lru_cache(maxsize=64)
def trained_share(model: ModelConfig) -> float:
    """Return the share of the parameters that are trained: 1 without adapters."""
    return trained_parameter_count(model) / parameter_count(model)


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model; a tied embedding counts once."""
    return numel(model_profile(model).parameter_shapes)
