"""Model architectures as data: the parts in which the decoder layers of families differ. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """The parts of a decoder layer, four attention projections, two norms and an MLP, that differ by family."""

    norm: str  # rms: a scale alone (arXiv 1910.07467); layer: also a mean and a bias (arXiv 1607.06450)
    biases: bool  # whether the layers' matrices have biases; the head has none
    learned_positions: bool  # whether positions are a learned table; else rotary, in attention
    widening: tuple[str, ...]  # the MLP's matrices from hidden_size to intermediate_size
    # Tensors of intermediate_size kept for backward, in the order of the forward; the last is down_proj's input.
    mlp_saved_tensors: tuple[str, ...]
    # At the fullest moment of the MLP's backward, beyond what is kept: tensors of intermediate_size, and gradients of
    # matrices.
    mlp_backward_peak: tuple[int, int]
    # Whether embeddings, attention weights, and what joins the residual stream can have dropout (arXiv 1706.03762).
    dropout: bool

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
