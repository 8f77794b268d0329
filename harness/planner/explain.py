"""The arithmetic behind the figures of a plan, in sentences. Imports no torch."""

from collections.abc import Iterator

from harness.config.byte_size import format_bytes
from harness.cost_model.flops import model_flops
from harness.cost_model.pipeline import bubble_ratio
from harness.cost_model.prediction import SECONDS_PER_HOUR, Prediction
from harness.planner.sentences import fit_sentence, terms

# What exposes the communication of each axis.
_EXPOSED = {
    "tp": "collectives of hidden states in every layer, which the next product waits for",
    "cp": "keys and values gathered before attention, their gradients scattered after it",
    "pp": "transfers of hidden states between stages that nothing hides",
    "dp_replicate": "sums of gradients among replicas, less what backward hides",
    "dp_shard": "gathered parameters and reduced gradients, less what the passes hide",
}


def explanation(prediction: Prediction) -> Iterator[str]:
    """Yield the derivation of each figure of a prediction, a line each."""
    yield from memory_explanation(prediction)
    yield from time_explanation(prediction)
    yield from speed_explanation(prediction)
    sent = prediction.sent_bytes
    volumes = ", ".join(f"{name} {format_bytes(size)}" for name, size in sent.items() if size)
    yield f"communication_bytes = {round(sum(sent.values()))}: a rank sends {volumes or 'nothing'} by ring algorithms."


def memory_explanation(prediction: Prediction) -> Iterator[str]:
    """Yield the derivation of the figures of memory."""
    layout, memory, widths, peak = prediction.layout, prediction.memory, prediction.widths, prediction.peak
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in memory.at_peak.items() if size)
    yield f"predicted_peak_bytes = {memory.peak_bytes}: at its worst, in {memory.phase} of rank {memory.rank}, {parts}."
    if prediction.cluster.device == "cuda":
        beyond = peak.reserved_bytes - memory.peak_bytes
        is_planned = prediction.stack.memory.fragmentation > 0
        unknown = "" if is_planned else "; freed blocks that fit no later request come on top"
        yield (
            f"peak_reserved_bytes = {peak.reserved_bytes}: {beyond} bytes beyond the peak, in segments of 2 MiB:"
            f" what the allocator holds and cannot use again{unknown}."
        )
    yield f"fits = {fit_sentence(prediction)}"
    if prediction.stack.memory.kind == "harness":
        for name, size, width in (
            ("parameter", memory.parameter_bytes, widths.parameters),
            ("gradient", memory.gradient_bytes, widths.gradients),
            ("optimizer", memory.optimizer_bytes, widths.optimizer),
        ):
            shards = layout.shard_count(name if name == "optimizer" else f"{name}s")
            yield (
                f"{name}_bytes = {size}: {width} bytes for each parameter of the fullest rank, which tensor parallelism"
                f" of {layout.tp} and {layout.pp} pipeline ranks leave it, over {shards} data-parallel shards."
            )
    yield (
        f"activation_bytes = {memory.activation_bytes}: the most that passes in flight keep for backward, of"
        f" micro-batches of {prediction.config.train.micro_batch} x {prediction.config.train.seq_len} tokens under"
        f" checkpointing={prediction.config.checkpointing.name}."
    )


def time_explanation(prediction: Prediction) -> Iterator[str]:
    """Yield the derivation of the parts of a step."""
    layout, time = prediction.layout, prediction.time
    summands = " + ".join(f"{name} {seconds:.4g}" for name, seconds in terms(prediction).items() if seconds)
    yield f"predicted_step_seconds = {prediction.step_seconds:.6g}: {summands} seconds."
    forward = time.micro_batches * time.forward_seconds
    yield (
        f"forward_seconds = {forward:.6g}: {time.micro_batches} micro-batches x {time.forward_seconds:.4g} seconds of"
        " the slowest stage's kernels, each by its operations or its bytes, whichever takes longer."
    )
    beside = time.compute_seconds - time.micro_batches * (time.forward_seconds + time.backward_seconds)
    yield (
        f"backward_seconds = {time.compute_seconds - forward:.6g}: {time.micro_batches} micro-batches x"
        f" {time.backward_seconds:.4g} seconds, and {beside:.4g} seconds by which hidden communication slows kernels."
    )
    for axis, seconds in time.exposed_communication_seconds.items():
        yield f"exposed_{axis}_seconds = {seconds:.6g}: {_EXPOSED[axis]}."
    if layout.pp_enabled:
        ratio = bubble_ratio(layout, time.micro_batches)
        yield (
            f"idle_seconds = {time.bubble_seconds:.6g}: a share of {ratio:.4g} of the other stages' passes, as"
            f" strategy.schedule={layout.schedule} leaves it with {layout.pp} ranks and {time.micro_batches}"
            " micro-batches."
        )
    if prediction.copy_seconds:
        bandwidth = prediction.cluster.hardware.host_bandwidth
        yield f"exposed_copy_seconds = {prediction.copy_seconds:.6g}: copies at {bandwidth:.4g} bytes a second."
    yield f"optimizer_seconds = {time.optimizer_seconds:.6g}: the bytes that gradient norm and update read and write."


def speed_explanation(prediction: Prediction) -> Iterator[str]:
    """Yield the derivation of speed, of the share of the devices' peak, and of the price."""
    config, layout, train = prediction.config, prediction.layout, prediction.config.train
    seconds = prediction.step_seconds
    yield (
        f"tokens_per_second = {prediction.tokens_per_second:.6g}: train.global_batch={train.global_batch} x"
        f" train.seq_len={train.seq_len} tokens over {seconds:.6g} seconds."
    )
    if prediction.mfu is not None:
        yield (
            f"mfu = {prediction.mfu:.4f}: {model_flops(config):.4g} operations of a step over {seconds:.6g}"
            f" seconds x {prediction.device_peak_flops:.4g} FLOP/s x {layout.world_size} devices."
        )
    price = prediction.cluster.hardware.price_per_device_hour
    if price is not None:
        yield (
            f"cost_per_billion_tokens = {prediction.cost_per_billion_tokens:.6g}: {layout.world_size} devices x {price}"
            f" an hour / {SECONDS_PER_HOUR} seconds x 1e9 tokens / {prediction.tokens_per_second:.6g} tokens a second."
        )
