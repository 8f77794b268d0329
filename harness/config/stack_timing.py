"""How an implementation of training spends time, as data: the timing side of a stack. Imports no torch."""

from dataclasses import dataclass

from harness.config.optimizer import ADAMW
from harness.config.validation import require


@dataclass(frozen=True)
class StackTiming:
    """The choices of an implementation that decide the time of a step."""

    # Whether gradients are sent while backward still runs, those of the last micro-batch if they are sent once a step.
    overlaps_gradient_reduction: bool = True
    # Whether updated parameters are gathered while the next forward already runs; otherwise before it.
    overlaps_parameter_gather: bool = False
    # Time of the host for each rank's slice of each parameter, where ZeRO gathers into a list of slices and copies one
    # after the other into its parameter; 0 where one flat buffer is gathered.
    shard_slice_seconds: float = 0.0
    # Whether gathered parameters of the next layer arrive while a layer computes, in ZeRO's stage 3.
    prefetches_parameters: bool = True
    # Whether replicas of shards sum their gradients in every micro-batch, in stage 3; otherwise once a step.
    reduces_replicas_every_micro_batch: bool = False
    # Whether backward gathers the inputs of column-parallel matrices again, with sequence parallelism.
    gathers_inputs_again: bool = False
    # Whether the gradient of a column-parallel matrix's input is summed while that of its weight is computed.
    overlaps_input_gradient: bool = False
    skips_masked_scores: bool = True  # Whether the fused attention kernel skips the half that the causal mask hides.
    # The memory traffic of kernels between matrix products in units of one read and one write for each operator, as
    # torch runs them without a compiler.
    elementwise_traffic: float = 1.0
    logit_bytes: float = 28.0  # Bytes read and written by the loss for each logit, in forward and backward.
    kernels_per_layer: int = 90  # Kernels of a decoder layer, in forward and backward.
    # Time in which a device at least waits for its host in both passes of a layer, and beside the layers in those of a
    # stage for a micro-batch.
    layer_seconds: float = 0.0
    micro_batch_seconds: float = 0.0
    # What the host does beside a layer's own kernels, in launches that take as long, on a CPU, where it was measured:
    # to gather or reduce a layer's parameters in stage 3, or a parameter of an engine that gathers them one by one; in
    # a layer that tensor-parallel ranks divide; and in a micro-batch outside its layers.
    layer_gather_launches: int = 0
    parameter_gather_launches: int = 0
    divided_layer_launches: int = 0
    micro_batch_launches: int = 0
    collective_launch_seconds: float = 0.0  # Time of the host for one tensor-parallel collective, beside a kernel's.
    # The same for each rank of the collective, and in a pipeline, where a stage's host waits for its neighbors.
    collective_seconds_per_rank: float = 0.0
    pipelined_collective_seconds_per_rank: float = 0.0
    # Time of one step of a ring between nodes beside the hardware's, such as that of processes that wait for others.
    inter_node_step_seconds: float = 0.0
    blocking_transfers: bool = False  # Whether a stage waits for its transfers instead of computing meanwhile.
    # Time of a transfer between stages on two nodes beside its bytes, and the power of the number of nodes, in units
    # of two, by which it grows.
    transfer_seconds: float = 0.0
    transfer_growth: float = 0.0
    # Time of each micro-batch beside everything else on 64 nodes, and the power of the nodes by which it grows.
    inter_node_micro_batch_seconds: float = 0.0
    inter_node_micro_batch_growth: float = 0.0
    optimizer_bytes: float = (
        ADAMW.update_bytes
    )  # Bytes that the update reads and writes for each parameter, masters included.
    step_seconds: float = 0.0  # Time of a step beside everything else.
    # The range of measured over predicted step time of a step without exposed communication in published measurements
    # of this stack, nine of ten rows inside; null means that there are none.
    measured_over_predicted: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        low, high = self.measured_over_predicted or (1.0, 1.0)
        rule = "is not a range around 1: choose a number up to 1 and one from 1 on"
        require(0 < low <= 1 <= high, "stack.timing.measured_over_predicted", self.measured_over_predicted, rule)
        for key in (
            "elementwise_traffic",
            "logit_bytes",
            "kernels_per_layer",
            "layer_seconds",
            "micro_batch_seconds",
            "layer_gather_launches",
            "parameter_gather_launches",
            "divided_layer_launches",
            "micro_batch_launches",
            "collective_launch_seconds",
            "collective_seconds_per_rank",
            "pipelined_collective_seconds_per_rank",
            "transfer_seconds",
            "transfer_growth",
            "inter_node_step_seconds",
            "inter_node_micro_batch_seconds",
            "inter_node_micro_batch_growth",
            "optimizer_bytes",
            "shard_slice_seconds",
            "step_seconds",
        ):
            value = getattr(self, key)
            require(value >= 0, f"stack.timing.{key}", value, "is negative: choose 0 or more")
