"""Why a file cannot say what a run was, one line each."""

from collections.abc import Iterator

from harness.export.recorded_run import RecordedRun

SCRIPTED = ("torch", "deepspeed", "accelerate")  # engines whose layouts script.py knows to write


def why_not_common(run: RecordedRun) -> Iterator[str]:
    """What no script of a page can do as this project's engines do."""
    config, layout = run.config, run.layout
    if layout.engine not in SCRIPTED:
        yield f"strategy.engine={layout.engine} has no script here, {', '.join(SCRIPTED)} have"
    if config.model.asked is not None:
        yield f"model={config.model.name} is a library's, whose own trainer builds it"
    if config.model.dropout:
        yield f"model.dropout={config.model.dropout} draws masks by rank, which this project's engines see to"
    if config.checkpointing.name not in ("none", "full", "every_n"):
        yield f"checkpointing={config.checkpointing.name} is this project's own"
    if config.checkpointing.offload_activations:
        yield "checkpointing.offload_activations=true is this project's own"
    if config.train.loss_chunks > 1:
        yield f"train.loss_chunks={config.train.loss_chunks} is done by this project's head"
    if config.train.compile:
        yield "train.compile=true is not part of it; add block.compile() to a script of train.compile=false"
    if config.precision.name not in ("fp32", "bf16_mixed"):
        yield f"precision={config.precision.name} is not part of it: fp32 and bf16_mixed are"
    if config.precision.is_mixed and layout.data_parallel != "fsdp" and not run.layout.uses_deepspeed_zero:
        yield (
            f"precision={config.precision.name} keeps fp32 masters beside 16-bit copies by this project's hooks; fsdp_*"
            " and zero* have them"
        )
    if run.layout.uses_deepspeed_zero:
        yield from why_not_deepspeed_engine(run)


def why_not_deepspeed_engine(run: RecordedRun) -> Iterator[str]:
    from harness.engines.deepspeed.widths import reduces_to_owner_rank

    config, layout = run.config, run.layout
    if layout.tp > 1:
        yield f"strategy.tp={layout.tp}: this project puts in DeepSpeed's layers one by one, which no setting does"
    if layout.zero_stage == 1 and config.precision.is_mixed and reduces_to_owner_rank(config):
        yield (
            f"precision={config.precision.name} at stage 1: DeepSpeed left to itself runs BF16_Optimizer, which sends"
            " more than the run did"
        )


def why_not_train(run: RecordedRun) -> Iterator[str]:
    config, layout = run.config, run.layout
    yield from why_not_common(run)
    if layout.cp > 1:
        yield f"strategy.cp={layout.cp} gathers keys and values by this project's attention"
    if layout.pp > 1 and layout.world_size > layout.pp:
        yield "a pipeline beside other parallelisms is this project's own; one alone is written"
    if layout.offload != "none" and not run.layout.uses_deepspeed_zero:
        yield f"strategy.offload={layout.offload} with fully_shard is not part of it"
    if layout.partitions_by_parameter and layout.dp_replicate > 1:
        yield f"strategy.dp_replicate={layout.dp_replicate} with ZeroRedundancyOptimizer over part of the ranks"
    if layout.tp > 1 and config.model.tie_word_embeddings:
        yield f"model.tie_word_embeddings=true is tied again after strategy.tp={layout.tp} by this project"
    if layout.sequence_parallel and config.model.architecture.learned_positions:
        yield "strategy.sequence_parallel=true cuts learned positions by this project's own style"


def why_not_deepspeed(run: RecordedRun) -> Iterator[str]:
    if not run.layout.uses_deepspeed_zero:
        yield f"strategy={run.config.strategy.name} is torch's own; DeepSpeed's are zero1, zero2 and zero3"
    yield from why_not_common(run)


def why_not_accelerate(run: RecordedRun) -> Iterator[str]:
    layout = run.layout
    if layout.pp > 1:
        yield "Accelerate has no pipeline parallelism for training"
    if layout.tp > 1 or layout.cp > 1:
        yield "Accelerate's tensor and context parallelism are for models of transformers"
    if layout.world_size == 1:
        yield "one process needs no launcher"
    if layout.data_parallel == "none" and layout.zero_stage == 0:
        yield f"strategy={run.config.strategy.name} is no data parallelism, which is what Accelerate wraps"
    if layout.data_parallel == "ddp" and layout.zero_stage:
        yield "Accelerate does not have ZeroRedundancyOptimizer"
    if layout.data_parallel == "fsdp" and layout.zero_stage == 0:
        yield "Accelerate's FSDP2 refuses a layout that shards nothing"
    if layout.data_parallel == "fsdp" and run.config.model.tie_word_embeddings:
        yield "model.tie_word_embeddings=true shares a weight between two of Accelerate's groups"
    if layout.offload != "none":
        yield f"strategy.offload={layout.offload} through Accelerate is not proven by this project"
    yield from why_not_common(run)
