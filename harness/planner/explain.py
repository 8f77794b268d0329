"""The arithmetic behind the figures of a plan, in sentences. Imports no torch."""

from collections.abc import Iterator

from harness.config.byte_size import format_bytes
from harness.cost_model.flops import model_flops
from harness.planner.predict import SECONDS_PER_HOUR, Prediction
from harness.planner.search import terms


def explanation(prediction: Prediction) -> Iterator[str]:
    """Yield the derivation of each figure of a prediction, a line each."""
    config, layout, memory, time = prediction.config, prediction.layout, prediction.memory, prediction.time
    widths, train = prediction.widths, config.train
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in memory.at_peak.items() if size)
    yield f"predicted_peak_bytes = {memory.peak_bytes}: at the worst moment of a step, {parts}."
    if prediction.stack.memory.kind == "harness":
        for name, size, width in (
            ("parameters", memory.parameter_bytes, widths.parameters),
            ("gradients", memory.gradient_bytes, widths.gradients),
            ("optimizer", memory.optimizer_bytes, widths.optimizer),
        ):
            shards = layout.shard_count(name)
            key = {"parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes"}[name]
            yield (
                f"{key} = {size}: {width} bytes for each parameter of the fullest rank, which tensor parallelism of"
                f" {layout.tp} and {layout.pp} pipeline ranks leave it, over {shards} data-parallel shards."
            )
    summands = " + ".join(f"{name} {seconds:.4g}" for name, seconds in terms(prediction).items() if seconds)
    yield f"predicted_step_seconds = {time.step_seconds:.6g}: {summands} seconds."
    yield (
        f"tokens_per_second = {prediction.tokens_per_second:.6g}: train.global_batch={train.global_batch} x"
        f" train.seq_len={train.seq_len} tokens over {time.step_seconds:.6g} seconds."
    )
    if prediction.mfu is not None:
        yield (
            f"mfu = {prediction.mfu:.4f}: {model_flops(config):.4g} operations of a step over {time.step_seconds:.6g}"
            f" seconds x {prediction.device_peak_flops:.4g} FLOP/s x {layout.world_size} devices."
        )
    volumes = ", ".join(f"{name} {format_bytes(size)}" for name, size in prediction.sent_bytes.items() if size)
    yield f"communication_bytes = {round(sum(prediction.sent_bytes.values()))}: a rank sends {volumes or 'nothing'}."
    price = prediction.cluster.hardware.price_per_device_hour
    if price is not None:
        yield (
            f"cost_per_billion_tokens = {prediction.cost_per_billion_tokens:.6g}: {layout.world_size} devices x {price}"
            f" an hour / {SECONDS_PER_HOUR} seconds x 1e9 tokens / {prediction.tokens_per_second:.6g} tokens a second."
        )
