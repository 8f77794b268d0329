"""Why a file cannot say what a run was, one line each."""

from collections.abc import Iterator

from harness.export.run import Recorded

SCRIPTED = ("torch", "deepspeed", "accelerate")  # engines whose layouts script.py knows to write


def common(run: Recorded) -> Iterator[str]:
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
    if config.precision.mixed and layout.data_parallel != "fsdp" and not run.layout.zero_by_deepspeed:
        yield (
            f"precision={config.precision.name} keeps fp32 masters beside 16-bit copies by this project's hooks; fsdp_*"
            " and zero* have them"
        )
    if run.layout.zero_by_deepspeed:
        yield from deepspeed_reasons(run)


def deepspeed_reasons(run: Recorded) -> Iterator[str]:
    from harness.engines.deepspeed import reduces_to_owner

    config, layout = run.config, run.layout
    if layout.tp > 1:
        yield f"strategy.tp={layout.tp}: this project puts in DeepSpeed's layers one by one, which no setting does"
    if layout.zero_stage == 1 and config.precision.mixed and reduces_to_owner(config):
        yield (
            f"precision={config.precision.name} at stage 1: DeepSpeed left to itself runs BF16_Optimizer, which sends"
            " more than the run did"
        )


def train(run: Recorded) -> Iterator[str]:
    config, layout = run.config, run.layout
    yield from common(run)
    if layout.cp > 1:
        yield f"strategy.cp={layout.cp} gathers keys and values by this project's attention"
    if layout.pp > 1 and layout.world_size > layout.pp:
        yield "a pipeline beside other parallelisms is this project's own; one alone is written"
    if layout.offload != "none" and not run.layout.zero_by_deepspeed:
        yield f"strategy.offload={layout.offload} with fully_shard is not part of it"
    if layout.gives_whole_parameters and layout.dp_replicate > 1:
        yield f"strategy.dp_replicate={layout.dp_replicate} with ZeroRedundancyOptimizer over part of the ranks"
    if layout.tp > 1 and config.model.tie_word_embeddings:
        yield f"model.tie_word_embeddings=true is tied again after strategy.tp={layout.tp} by this project"
    if layout.sequence_parallel and config.model.kind.learned_positions:
        yield "strategy.sequence_parallel=true cuts learned positions by this project's own style"


def deepspeed(run: Recorded) -> Iterator[str]:
    if not run.layout.zero_by_deepspeed:
        yield f"strategy={run.config.strategy.name} is torch's own; DeepSpeed's are zero1, zero2 and zero3"
    yield from common(run)


def accelerate(run: Recorded) -> Iterator[str]:
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
    yield from common(run)
