"""The adapters that are trained in the place of a model's own weights, with the names of the library peft."""

from dataclasses import dataclass
from typing import Annotated

from harness.config.from_dict import Positive, one_of

NF4_BYTES = 0.5  # of a weight in 4 bits, beside its scales


@dataclass(frozen=True)
class AdapterConfig:
    """The adapters of the matrices of decoder layers; with them, all weights of the model itself are frozen."""

    # The kind of adapters: none, which trains all weights, lora, or qlora, with frozen matrices in 4 bits. With
    # fully_shard or fp16 qlora is planned and not run.
    name: Annotated[str, one_of("none", "lora", "qlora")] = "none"
    r: Positive = 16  # The rank of LoRA's two matrices, which have the shapes (r, inputs) and (outputs, r).
    lora_alpha: Positive = 32  # The factor of a pair's output, divided by model.adapter.r.
    # The names of the matrices that have adapters, such as q_proj; null means all matrices of the layers.
    target_modules: tuple[str, ...] | None = None
    # Whether qlora stores the scales of its blocks in 8 bits, with a scale for every 256 of them, and not in fp32.
    double_quant: bool = True

    @property
    def is_enabled(self) -> bool:
        """Whether adapters are trained, and the model's own weights are frozen."""
        return self.name != "none"

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen matrices of layers are stored in 4 bits."""
        return self.name == "qlora"

    def rank_of(self, matrix: str) -> int:
        """Return the rank of the adapter of a matrix, by its name; 0 where it has none."""
        return self.r if self.is_enabled and matrix in (self.target_modules or (matrix,)) else 0

    def trains(self, parameter: str) -> bool:
        """Return whether a parameter, by its name, is trained."""
        return not self.is_enabled or ".lora_" in parameter
