"""The profile of a causal language model of the transformers library, read off its trace (HFModelInfo)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from harness.config.from_dict import divisors_text
from harness.config.model import HFModelInfo, ModelConfig
from harness.config.schema import RunConfig
from harness.layout.layer_spec import SHARD_DIM, Matrix, Shapes
from harness.layout.layout import Layout, refusals


@dataclass(frozen=True)
class HFProfile:
    """A ModelProfile of a traced model.

    The trace has the operations of one sequence of train.seq_len tokens, so that the methods ignore their argument
    `seq_len`.
    """

    model: ModelConfig
    info: HFModelInfo
    is_project_decoder = False

    @property
    def parameter_shapes(self) -> Shapes:
        """The shape of every parameter by the library's name of it; a tied one appears once."""
        return self.info.shapes

    @cached_property
    def layer_shapes(self) -> Shapes:
        """The shapes of the first layer's parameters by their names in the layer."""
        prefix = f"{self.info.layers[0]}."
        return {name.removeprefix(prefix): each for name, each in self.info.shapes.items() if name.startswith(prefix)}

    @cached_property
    def layer_matrices(self) -> tuple[Matrix, ...]:
        """The matrices of the first layer, in the order of its parameters."""
        matrices, layer = [], self.info.layers[0]
        for name, shape in self.layer_shapes.items():
            if len(shape) == 2:
                path = name.rpartition(".")[0]
                matrices.append(Matrix(path.rpartition(".")[2], path, *shape, self.tp_style(f"{layer}.{path}")))
        return tuple(matrices)

    @property
    def elementwise_tensors(self) -> tuple[int, int]:
        """The tensors of hidden_size and of intermediate_size that a layer's elementwise operators move in forward."""
        return 12, 5  # between those of the project's own families

    @cached_property
    def embedding_shapes(self) -> Shapes:
        """The shapes of all parameters that are neither in decoder layers nor in the head."""
        head = self.head_shapes
        named = self.info.shapes.items()
        return {name: shape for name, shape in named if name not in head and self.layer_index(name) is None}

    @cached_property
    def head_shapes(self) -> Shapes:
        """The shapes of the head's parameters."""
        prefix = f"{self.info.head}."
        return {name: shape for name, shape in self.info.shapes.items() if name.startswith(prefix)}

    @property
    def has_biases(self) -> bool:
        """Whether modules of the decoder layers, norms included, have biases."""
        return any(name.endswith(".bias") and self.layer_index(name) is not None for name in self.info.shapes)

    def layer_index(self, name: str) -> int | None:
        """Return the index of the decoder layer that a parameter or module is part of; None if it is part of none."""
        paths = enumerate(self.info.layers)
        return next((index for index, path in paths if name.startswith(f"{path}.")), None)

    def recomputes_to_end(self, module: str) -> bool:
        """Return whether the second forward of a checkpointed layer ran this module to its end when it was traced."""
        return module not in self.info.not_recomputed_modules

    def tp_style(self, module: str) -> str | None:
        """Return the style of a module in the library's own plan, by its path; None if it stays whole.

        A style that no rank can apply here leaves a module whole, and incompatibilities() refuses to cut the model.
        """
        style = self.info.tensor_plan.get(module)
        return style if style in SHARD_DIM else None

    @property
    def has_fused_attention_on_cpu(self) -> bool:
        """Whether the trace, in training, ran more in backward than the two forwards that a backward costs.

        The model's dropout alone does not determine the kernel, because it may be outside attention.
        """
        return self.info.step_flops > 3 * self.info.forward_flops

    def layer_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations of the forward of an average decoder layer."""
        return sequences * self.info.layers_flops // self.model.num_hidden_layers

    def head_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations of the forward of all that is not in decoder layers."""
        return sequences * (self.info.forward_flops - self.info.layers_flops)

    def recompute_flops(self, layers: int, sequences: int, seq_len: int, runs_to_end: bool) -> int:
        """Return the operations of so many second forwards, as they were traced or as whole layers.

        Only linear modules at the end of a layer run to their end under an engine that recomputes the last projection.
        """
        if runs_to_end and self.info.not_recomputed_are_linear:
            return layers * self.layer_flops(sequences, seq_len)
        return sequences * self.info.checkpoint_recompute_flops * layers // self.model.num_hidden_layers

    def recomputed_score_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations that backward ran again in a fused attention kernel when it was traced."""
        return sequences * self.info.attention_recompute_flops

    def incompatibilities(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        """Yield a line for every setting that needs this project's code in the place of the library's."""
        name = config.checkpointing.name
        rules = {
            "hf_offload": config.checkpointing.offload_activations,
            "hf_context": config.train.seq_len > self.model.context_length,
            "hf_checkpointing": name in ("selective", "attention"),
            "hf_loss_chunks": config.train.loss_chunks > 1,
            "hf_compile": config.train.compile,
            "hf_cp": layout.cp_enabled,
            "hf_pp": layout.pp_enabled,
            "hf_sequence_parallel": layout.sequence_parallel,
            "hf_no_plan": layout.tp_enabled and not self.info.tensor_plan,
        }
        yield from refusals(rules, config, layout, model_type=self.info.config["model_type"])
        if layout.tp_enabled:
            yield from self.tensor_parallel_incompatibilities(config, layout)

    def tensor_parallel_incompatibilities(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        """Yield why so many tensor-parallel ranks cannot divide the model by the library's own plan."""
        for path, style in self.info.tensor_plan.items():
            dimension, shape = SHARD_DIM.get(style), self.info.shapes.get(f"{path}.weight")
            size = 0 if dimension is None or shape is None else shape[dimension]
            rules = {"hf_style": dimension is None, "hf_dimension": size % layout.tp != 0}
            yield from refusals(rules, config, layout, path=path, style=style, dimension=dimension, size=size)
            if any(rules.values()):
                return
        for key in ("num_attention_heads", "num_key_value_heads"):
            size = getattr(self.model, key)
            rules = {"hf_heads": size % layout.tp != 0}
            yield from refusals(rules, config, layout, key=key, size=size, divisors=divisors_text(size))
        yield from refusals(
            {"hf_tied": self.model.tie_word_embeddings, "hf_dropout": self.model.dropout > 0}, config, layout
        )
