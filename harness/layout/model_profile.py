"""The facts about a model that its layout, its cost and its engines depend on, whichever code builds the model."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

from harness.config.model import ModelConfig
from harness.config.schema import RunConfig
from harness.layout.decoder_profile import DecoderProfile
from harness.layout.hf_profile import HFProfile
from harness.layout.layer_spec import Matrix, Shapes, numel
from harness.layout.layout import Layout


class ModelProfile(Protocol):
    """The parameters, operations and limits of a model.

    Parameters and modules go by their plain names in the whole model. Operations are floating-point operations of
    forward for a number of sequences of `seq_len` tokens.
    """

    @property
    def parameter_shapes(self) -> Shapes:
        """The shape of every parameter; a tied head is the embedding."""

    @property
    def layer_shapes(self) -> Shapes:
        """The shapes of one layer's parameters by their names in the layer; the first layer represents all of them."""

    @property
    def layer_matrices(self) -> tuple[Matrix, ...]:
        """The matrices of that layer."""

    @property
    def elementwise_tensors(self) -> tuple[int, int]:
        """The tensors of hidden_size and of intermediate_size that a layer's elementwise operators move in forward."""

    @property
    def embedding_shapes(self) -> Shapes:
        """The shapes of the parameters that turn tokens into hidden states."""

    @property
    def head_shapes(self) -> Shapes:
        """The shapes of the parameters that turn hidden states into logits; a tied matrix is the embedding's."""

    @property
    def has_biases(self) -> bool:
        """Whether matrices of the decoder layers have biases."""

    def layer_index(self, name: str) -> int | None:
        """Return the index of the decoder layer that a parameter or module is part of; None if it is part of none."""

    def recomputes_to_end(self, module: str) -> bool:
        """Return whether the second forward of a checkpointed layer runs this module of the layer to its end."""

    def tp_style(self, module: str) -> str | None:
        """Return the style in which tensor parallelism cuts a module, a key of SHARD_DIM; None if it stays whole."""

    @property
    def communicates_per_matrix(self) -> bool:
        """Whether tensor-parallel ranks sum or gather for every matrix by itself, as a library's own plan makes them.

        Otherwise the matrices of attention, and those of the MLP, share the collectives of their input and output.
        """

    @property
    def supports_pipeline(self) -> bool:
        """Whether the model can be cut into pipeline stages."""

    @property
    def supports_compile(self) -> bool:
        """Whether its layers can be compiled, so that their operators show whether they were."""

    @property
    def is_project_decoder(self) -> bool:
        """Whether the layers are this project's, which exported scripts contain and every engine is tested with."""

    @property
    def activations_are_known(self) -> bool:
        """Whether there are formulas for the activations, and so for the peak of memory."""

    @property
    def has_fused_attention_on_cpu(self) -> bool:
        """Whether torch is expected to run attention as one fused kernel on a CPU; a CPU's kernel takes no dropout."""

    def layer_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations of one decoder layer's forward."""

    def head_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations of the forward of all that is not in decoder layers; a tied head counts as well."""

    def recompute_flops(self, layers: int, sequences: int, seq_len: int, runs_to_end: bool) -> int:
        """Return the operations of so many second forwards of a decoder layer.

        `runs_to_end` is whether they run the layer's last projection although nothing in backward needs its result.
        """

    def recomputed_score_flops(self, sequences: int, seq_len: int) -> int:
        """Return the operations of queries with keys that backward runs again inside a fused attention kernel."""

    def incompatibilities(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        """Yield one line for every reason why this model cannot run as configured, each with its key and a remedy."""


@lru_cache(maxsize=64)
def model_profile(model: ModelConfig) -> ModelProfile:
    """Return the profile of a model: the project's decoder, or a traced model of the transformers library."""
    return DecoderProfile(model) if model.hf_info is None else HFProfile(model, model.hf_info)


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model; a tied embedding counts once."""
    return numel(model_profile(model).parameter_shapes)


@lru_cache(maxsize=128)
def layer_parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of one decoder layer; the first represents all of them."""
    return numel(model_profile(model).layer_shapes)
