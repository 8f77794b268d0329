"""The arithmetic behind the figures of a plan, in sentences. Imports no torch."""

from collections.abc import Iterator

from harness.cost_model.flops import model_flops
from harness.cost_model.pipeline import bubble_ratio
from harness.cost_model.prediction import Prediction
from harness.layout.state_widths import STATE_KINDS
from harness.planner.sentences import say, terms


def explanation(prediction: Prediction) -> Iterator[str]:
    """Yield the derivation of each figure of a prediction, a line each."""
    yield from memory_explanation(prediction)
    yield from time_explanation(prediction)
    yield say("tokens_per_second", entry=prediction)
    if prediction.mfu is not None:
        yield say("mfu", entry=prediction, operations=model_flops(prediction.config))
    facts = {
        "cost_per_billion_tokens": prediction.cost_per_billion_tokens is not None,
        "communication_bytes": True,
    }
    yield from say.of(facts, entry=prediction)


def memory_explanation(prediction: Prediction) -> Iterator[str]:
    """Yield the derivation of the figures of memory."""
    is_cuda = prediction.cluster.device == "cuda"
    yield from say.of({"predicted_peak_bytes": True, "peak_reserved_bytes": is_cuda}, entry=prediction)
    yield f"fits = {say('fit', entry=prediction)}"
    for kind in STATE_KINDS if prediction.is_runnable else ():
        name, shards = kind.removesuffix("s"), prediction.layout.shard_count(kind)
        size, width = getattr(prediction.memory, f"{name}_bytes"), getattr(prediction.widths, kind)
        yield say("state_bytes", entry=prediction, kind=name, size=size, width=width, shards=shards)
    yield say("activation_bytes", entry=prediction)


def time_explanation(prediction: Prediction) -> Iterator[str]:
    """Yield the derivation of the parts of a step."""
    time = prediction.time
    yield say("predicted_step_seconds", entry=prediction, terms=terms(prediction))
    yield say("forward_seconds", entry=prediction)
    beside = time.compute_seconds - time.micro_batches * (time.forward_seconds + time.backward_seconds)
    yield say("backward_seconds", entry=prediction, beside=beside)
    for axis, seconds in time.exposed_communication_seconds.items():
        yield say("exposed_seconds", axis=axis, seconds=seconds)
    if prediction.layout.pp_enabled:
        yield say("idle_seconds", entry=prediction, ratio=bubble_ratio(prediction.layout, time.micro_batches))
    yield from say.of({"exposed_copy_seconds": prediction.copy_seconds, "optimizer_seconds": True}, entry=prediction)
