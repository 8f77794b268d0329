"""What sets model families apart, as data: the parts of a decoder layer that differ. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """Attention's four projections, two norms, an MLP that widens and narrows again: what varies of these."""

    norm: str  # rms: a scale alone (arXiv 1910.07467); layer: also a mean and a bias (arXiv 1607.06450)
    biases: bool  # of the layers' matrices; a head has none
    learned_positions: bool  # a table beside the embedding; else rotary, in attention
    widening: tuple[str, ...]  # the MLP's matrices from hidden_size to intermediate_size
    mlp_keeps: tuple[str, ...]  # of intermediate_size, for backward, in the order they are made; the last is narrowed
    mlp_backward: tuple[int, int]  # tensors of intermediate_size at the worst moment of the MLP's backward, beyond what
    # is kept, and matrices' gradients
    dropout: bool  # of embeddings, attention's weights, and what joins the residual stream (arXiv 1706.03762)

    @property
    def has_norm_biases(self) -> bool:
        return self.norm == "layer"


ARCHITECTURES = {
    # arXiv 2302.13971. Backward at SwiGLU's product: gradients of product, silu and up, less the product freed before.
    "llama": Architecture(
        norm="rms",
        biases=False,
        learned_positions=False,
        widening=("gate_proj", "up_proj"),
        mlp_keeps=("gate", "up", "silu", "product"),
        mlp_backward=(2, 0),
        dropout=False,
    ),
    # GPT-2 and GPT-3 (arXiv 2005.14165) as Megatron-LM cuts them. Backward at down_proj: gradients of GELU's output and
    # of the matrix.
    "gpt": Architecture(
        norm="layer",
        biases=True,
        learned_positions=True,
        widening=("up_proj",),
        mlp_keeps=("up", "product"),
        mlp_backward=(1, 1),
        dropout=True,
    ),
}
