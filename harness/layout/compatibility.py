"""The reasons why a layout cannot train a model with a batch, whatever the engine; each names its key and a remedy."""

from collections.abc import Iterator

from harness.config.schema import RunConfig
from harness.layout.layout import Layout, micro_batches_per_round, refusals
from harness.layout.model_profile import model_profile
from harness.layout.partition import split_into_stages
from harness.util.text import UserError


def incompatibilities(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield one line for every reason why the configuration cannot run as this layout; nothing if it can."""
    train, checkpointing, pp_enabled = config.train, config.checkpointing, layout.pp_enabled
    try:
        micro_batches = layout.grad_accumulation_steps(train)
    except UserError as error:
        yield str(error)
        return
    tokens = train.micro_batch * train.seq_len // layout.cp
    moves = checkpointing.offload_activations  # by hooks that selective checkpointing and the compiler do not call
    rules = {
        "loss_chunks": tokens % train.loss_chunks != 0,
        "split_loss_chunks": train.loss_chunks > 1 and layout.splits_backward,
        "split_selective": checkpointing.name == "selective" and layout.splits_backward,
        "offload_selective": moves and checkpointing.name == "selective",
        "offload_compiled": moves and train.compile,
        "byte_vocabulary": config.data.kind == "text" and config.model.vocab_size < 256,
    }
    yield from refusals(rules, config, layout, tokens=tokens)
    profile = model_profile(config.model)
    yield from profile.incompatibilities(config, layout)
    if pp_enabled and profile.is_project_decoder:
        yield from pipeline_incompatibilities(config, layout, micro_batches)
    is_whole = layout.axes_size(layout.sharding_axes) == 1
    rules = {
        "copies": layout.zero_stage > 0 and layout.dp_replicate > 1 and is_whole,
        "virtual_stages": not pp_enabled and layout.virtual_stages > 1,
        "layers_per_stage": not pp_enabled and layout.layers_per_stage is not None,
        "sequence_chunks": layout.cp_enabled and train.seq_len % (2 * layout.cp) != 0,
    }
    yield from refusals(rules, config, layout, layers=list(layout.layers_per_stage or ()), cp_chunks=2 * layout.cp)


def pipeline_incompatibilities(config: RunConfig, layout: Layout, micro_batches: int) -> Iterator[str]:
    """Yield why the model cannot be cut into stages, or the schedule cannot take so many micro-batches."""
    p, schedule, round_size = layout.pp, layout.schedule, micro_batches_per_round(layout.pp, micro_batches)
    try:
        split_into_stages(config.model, layout)
    except UserError as error:
        yield str(error)
    takes_rounds = schedule in ("interleaved_1f1b", "zero_bubble")
    rules = {
        "tied_stages": config.model.tie_word_embeddings,
        "plain_schedule": schedule in ("gpipe", "1f1b") and layout.virtual_stages > 1,
        "interleaved_schedule": schedule == "interleaved_1f1b" and layout.virtual_stages == 1,
        "few_micro_batches": micro_batches < p,
        "micro_batch_rounds": takes_rounds and micro_batches >= p and micro_batches % (micro_batches // p) != 0,
    }
    values = {"micro_batches": micro_batches, "round_size": round_size, "batch_multiple": p * config.train.micro_batch}
    yield from refusals(rules, config, layout, **values)
