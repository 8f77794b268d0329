"""The reasons why a run cannot be exported to a file; each function yields one line for every reason."""

from collections.abc import Iterator

from harness.export.recorded_run import RecordedRun
from harness.layout.model_profile import model_profile

SCRIPTED_ENGINES = ("torch", "deepspeed", "accelerate")  # the engines whose layouts script.py can write


def why_not_common(run: RecordedRun) -> Iterator[str]:
    """Yield a line for every setting that a short script cannot reproduce as the engines of this project do."""
    config, layout = run.config, run.layout
    model, checkpointing, precision = config.model, config.checkpointing, config.precision
    if layout.engine not in SCRIPTED_ENGINES:
        yield f"strategy.engine={layout.engine} has no script: choose one of {', '.join(SCRIPTED_ENGINES)}"
    if not model_profile(model).is_project_decoder:
        yield f"model={model.name} is built by transformers, and exported scripts build this project's decoder"
    if model.dropout:
        yield f"model.dropout={model.dropout} needs masks that follow the layout, which a short script does not draw"
    if checkpointing.name not in ("none", "full", "every_n"):
        yield f"checkpointing={checkpointing.name} is implemented by this project: none, full and every_n are exported"
    if checkpointing.offload_activations:
        yield "checkpointing.offload_activations=true is implemented by this project's hooks"
    if config.train.loss_chunks > 1:
        yield f"train.loss_chunks={config.train.loss_chunks} is implemented by this project's output head"
    if config.train.compile:
        yield "train.compile=true is not exported: export a run without it and add layer.compile() to the script"
    if precision.name not in ("fp32", "bf16_mixed"):
        yield f"precision={precision.name} is not exported: fp32 and bf16_mixed are"
    if precision.is_mixed and layout.data_parallel != "fsdp" and not layout.uses_deepspeed_zero:
        yield (
            f"precision={precision.name} keeps fp32 masters beside 16-bit copies by this project's hooks: only fsdp_*"
            " and zero* have masters of their own"
        )
    if layout.uses_deepspeed_zero:
        yield from why_not_deepspeed_engine(run)


def why_not_deepspeed_engine(run: RecordedRun) -> Iterator[str]:
    """Yield a line for everything that DeepSpeed without this project's engine would do differently from the run."""
    from harness.engines.deepspeed.widths import reduces_to_owner_rank

    config, layout = run.config, run.layout
    if layout.tp_enabled:
        yield (
            f"strategy.tp={layout.tp} is reached by replacing layers with DeepSpeed's tensor-parallel ones, which no"
            " setting of DeepSpeed does"
        )
    if layout.zero_stage == 1 and config.precision.is_mixed and reduces_to_owner_rank(config):
        yield (
            f"precision={config.precision.name} at stage 1: DeepSpeed left to itself runs BF16_Optimizer, which sends"
            " more bytes than the run did"
        )


def why_not_train(run: RecordedRun) -> Iterator[str]:
    """Yield why train.py, and torchrun.sh with it, cannot be written."""
    config, layout = run.config, run.layout
    yield from why_not_common(run)
    if layout.cp_enabled:
        yield f"strategy.cp={layout.cp} gathers keys and values in this project's attention"
    if layout.pp_enabled and layout.world_size > layout.pp:
        yield f"strategy.pp={layout.pp} is combined with other parallelisms: only a pipeline by itself is exported"
    if layout.offload != "none" and not layout.uses_deepspeed_zero:
        yield f"strategy.offload={layout.offload} with fully_shard is not exported"
    if layout.partitions_by_parameter and layout.dp_replicate > 1:
        yield (
            f"strategy.dp_replicate={layout.dp_replicate} with ZeroRedundancyOptimizer over part of the ranks is not"
            " exported"
        )
    if layout.tp_enabled and config.model.tie_word_embeddings:
        yield f"model.tie_word_embeddings=true is tied again by this project after strategy.tp={layout.tp} is applied"
    if layout.sequence_parallel and config.model.architecture.learned_positions:
        yield "strategy.sequence_parallel=true shards learned positions by this project's own parallel style"


def why_not_deepspeed(run: RecordedRun) -> Iterator[str]:
    """Yield why deepspeed.json cannot be written."""
    if not run.layout.uses_deepspeed_zero:
        yield f"strategy={run.config.strategy.name} is torch's own; DeepSpeed's are zero1, zero2 and zero3"
    yield from why_not_common(run)


def why_not_accelerate(run: RecordedRun) -> Iterator[str]:
    """Yield why accelerate.yaml and train_accelerate.py cannot be written."""
    layout = run.layout
    if layout.pp_enabled:
        yield "Accelerate has no pipeline parallelism for training"
    if layout.tp_enabled or layout.cp_enabled:
        yield "Accelerate's tensor and context parallelism need a model of transformers"
    if layout.world_size == 1:
        yield "a run of one process needs no launcher"
    if layout.data_parallel == "none" and layout.zero_stage == 0:
        yield f"strategy={run.config.strategy.name} has no data parallelism, and Accelerate wraps no other here"
    if layout.data_parallel == "ddp" and layout.zero_stage:
        yield "Accelerate has no ZeroRedundancyOptimizer"
    if layout.data_parallel == "fsdp" and layout.zero_stage == 0:
        yield "Accelerate's FSDP2 refuses a layout that shards nothing"
    if layout.data_parallel == "fsdp" and run.config.model.tie_word_embeddings:
        yield "model.tie_word_embeddings=true shares a weight between two FSDP groups of Accelerate"
    if layout.offload != "none":
        yield f"strategy.offload={layout.offload} through Accelerate is not proven by this project"
    yield from why_not_common(run)
