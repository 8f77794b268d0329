"""Model architectures as data: the parts in which the decoder layers of families differ. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """The parts of a decoder layer, four attention projections, two norms and an MLP, that differ by family."""

    # The kind of norm: rms has a scale alone (arXiv 1910.07467), layer also subtracts the mean and has a bias (arXiv
    # 1607.06450).
    norm: str
    biases: bool  # Whether the matrices of the layers have biases; the head never has one.
    learned_positions: bool  # Whether a learned table embeds positions; otherwise attention rotates queries and keys.
    widening: tuple[str, ...]  # The matrices of the MLP from hidden_size to intermediate_size.
    # The tensors of intermediate_size that the MLP saves for backward, in the order of its forward; the last is the
    # input of down_proj.
    mlp_saved_tensors: tuple[str, ...]
    # The numbers of tensors of intermediate_size, and of gradients of matrices, that exist beside the saved tensors
    # when the MLP's backward needs most memory.
    mlp_backward_peak: tuple[int, int]
    # Whether embeddings, attention weights and the residual stream's branches can have dropout (arXiv 1706.03762).
    dropout: bool

    @property
    def projections(self) -> tuple[str, ...]:
        """The matrices of a layer, in the order in which its forward multiplies with them."""
        return ("q_proj", "k_proj", "v_proj", "o_proj", *self.widening, "down_proj")

    @property
    def has_norm_biases(self) -> bool:
        """Whether norms have a bias beside their scale."""
        return self.norm == "layer"


ARCHITECTURES = {
    # arXiv 2302.13971. Backward at SwiGLU's product: gradients of product, silu and up, less the product freed before.
    "llama": Architecture(
        norm="rms",
        biases=False,
        learned_positions=False,
        widening=("gate_proj", "up_proj"),
        mlp_saved_tensors=("gate", "up", "silu", "product"),
        mlp_backward_peak=(2, 0),
        dropout=False,
    ),
    # GPT-2 and GPT-3 (arXiv 2005.14165) as Megatron-LM cuts them. Backward at down_proj: gradients of GELU's output and
    # of the matrix.
    "gpt": Architecture(
        norm="layer",
        biases=True,
        learned_positions=True,
        widening=("up_proj",),
        mlp_saved_tensors=("up", "product"),
        mlp_backward_peak=(1, 1),
        dropout=True,
    ),
}
