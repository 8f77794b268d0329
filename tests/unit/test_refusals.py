"""Mistakes in a configuration, and combinations that would train something else: each is refused by one sentence."""

import re

import pytest

from harness.engines.deepspeed.compatibility import FLAGS, SIZES
from harness.hardware.machine import Machine
from harness.runner.plan import make_plan
from harness.runner.resolve import machine_of_run
from harness.util.text import UserError
from tests.support.commands import compose

CPU = Machine("cpu", "cpu", 1, 2, 0, (2**40,), 2)  # for two ranks, with memory for every model

WRONG_VALUES = {
    "strategy.schedule=zbv": "strategy.schedule=zbv is not known: choose gpipe, 1f1b, interleaved_1f1b, zero_bubb…",
    "strategy.data_parallel=dp": "strategy.data_parallel=dp is not known: choose none, ddp, fsdp…",
    "strategy.offload=all": "strategy.offload=all is not known: choose none, optimizer, parameters…",
    "checkpointing.name=half": "checkpointing=half is not known: choose none, full, every_n, selective, attention…",
    "cluster.device=tpu": "cluster.device=tpu is not known: choose auto, cpu, cuda…",
    "launch=script": "launch=script is not known…",
    "launch=threads": "launch=threads is not known: choose processes, virtual, simulated…",
    "retry=[never]": "retry=never is not known: choose error, timeout, oom…",
    "strategy.schedule=3": "strategy.schedule=3 is not text: give it text…",
    "model=gpt_tiny model.dropout=1.5": "model.dropout=1.5 must be in [0, 1)…",
    "strategy.options=5": "strategy.options=5 is not a group like {key: value}…",
    "train.seed=9223372036854775808": "train.seed=9223372036854775808 does not fit 64 bits…",
    "timeout_seconds=0": "timeout_seconds=0.0 is not positive: choose seconds…",
    "train.loss_chunks=3": "train.loss_chunks=3 does not divide the 128 tokens of a micro-batch: choose…",
}

BY_ACCELERATE = {
    "strategy=fsdp_full_shard": "strategy.engine=accelerate with …: Accelerate silently drops sharding on CPU…",
    "strategy=zero1 precision=bf16_mixed": "…: Accelerate leaves DeepSpeed its BF16_Optimizer…",
    "strategy=zero1_torch": "strategy.zero_stage=1 is not a mode of Accelerate's ddp…",
    "strategy=ddp +strategy.options.device_ids=1": "strategy.options.device_ids=1 is not supported by…",
    "strategy=zero2 strategy.offload=optimizer": "strategy.offload=optimizer is not supported by strategy.engine=acc…",
    "strategy=ddp strategy.offload=optimizer": "strategy.offload=optimizer is not supported by strategy.engine=acc…",
    "strategy=tp": "strategy.tp=2 is not supported by strategy.engine=accelerate…",
    "strategy=single world_size=1": "…: Accelerate wraps data parallelism…",
}

OF_DEEPSPEED = "is not supported by strategy.engine=deepspeed: choose"

OPTIONS = ", ".join(sorted({*FLAGS, *SIZES}))

TWO = "strategy.tp=2 strategy.vocabulary_parallel=false"

BY_DEEPSPEED = {
    "strategy=zero2 strategy.dp_replicate=2": f"strategy.dp_replicate=2 {OF_DEEPSPEED} 1, and -1 for strategy.dp_shard",
    "strategy=zero2 strategy.zero_stage=0": f"strategy.zero_stage=0 {OF_DEEPSPEED} 1, 2 or 3",
    "strategy=zero2 strategy.dp_shard=2 strategy.cp=2": f"strategy.cp=2 {OF_DEEPSPEED} 1",
    "strategy=zero2 +strategy.options.reduce_scater=true": (
        f"strategy.options.reduce_scater=True {OF_DEEPSPEED} among {OPTIONS}"
    ),
    "strategy=zero2 +strategy.options.stage=3": f"strategy.options.stage=3 {OF_DEEPSPEED} among {OPTIONS}",
    "strategy=zero1_tp strategy.vocabulary_parallel=true": "… does not shard embedding and head; choose false…",
    "strategy=zero1_tp strategy.sequence_parallel=true": "strategy.sequence_parallel=true is not supported by…",
    f"strategy=zero3 {TWO}": "strategy.tp=2 with strategy.zero_stage=3: DeepSpeed's tensor-parallel layers…",
    "strategy=ddp strategy.vocabulary_parallel=false": "… is not supported by strategy.engine=torch: choose true…",
    "strategy=zero1_tp strategy.tp=4": "strategy.tp=4 does not divide model.num_key_value_heads=2…",
    "strategy=zero3 model=gpt_tiny checkpointing=selective": "… adds the biases of model=gpt_tiny in place…",
}

# What would be lost, split or averaged wrongly.
INCOMPATIBLE = {
    "strategy=pp_zero_bubble train.compile=true": "train.compile=true fuses a layer's backward into one operator…",
    "strategy=ddp checkpointing=selective train.compile=true": "checkpointing=selective recomputes parts of a layer…",
    "strategy=ddp strategy.offload=parameters": (
        "strategy.offload=parameters is not supported by strategy.data_parallel=ddp: choose none, or…"
    ),
    "strategy=tp world_size=2 strategy.offload=optimizer": (
        "strategy.offload=optimizer is not supported by strategy.data_parallel=none: choose none, or…"
    ),
    "strategy=fsdp_full_shard strategy.offload=optimizer": "strategy.offload=… is not a policy of fully_shard…",
    "strategy=zero2 strategy.offload=parameters": "strategy.offload=… needs strategy.zero_stage=3, not 2…",
    "strategy=pp_zero_bubble train.loss_chunks=4": "train.loss_chunks=4 saves nothing under strategy.schedule…",
    "strategy=ddp_pp strategy.schedule=zero_bubble": "… before the second half…",
    "strategy=fsdp_pp strategy.zero_stage=3 strategy.schedule=zero_bubble": "… frees parameters…",
    "strategy=cp strategy.data_parallel=none": "… to average gradients…",
    "strategy=tp_pp strategy.data_parallel=ddp": "… cannot wrap a model that strategy.tp=2 shards…",
    "strategy=ddp strategy.context_parallel=ulysses": "… needs strategy.cp of 2 or more: choose gather",
    "strategy=cp_ulysses model.num_attention_heads=2": "… choose 1 or 2, or strategy.context_parallel=gather",
    "strategy=cp_ulysses train.seq_len=34": "… choose train.seq_len a multiple of 4…",
    "strategy=cp train.seq_len=33": "… choose train.seq_len a multiple of 8…",
    "strategy=fsdp_full_shard strategy.dp_replicate=4": "… shards nothing…",
    "strategy=zero1_torch strategy.dp_replicate=4": "… shards nothing…",
}

SIMULATED = "strategy=ddp launch=simulated cluster=8xh100 train.global_batch=16"

VIRTUAL = "strategy=ddp launch=virtual world_size=4"

PLAYED = {
    f"{SIMULATED} train.compile=true": "train.compile=true cannot be simulated…",
    f"{SIMULATED} world_size=16": "world_size=16 is more than the 8 devices of cluster=8xh100: choose cluster.nodes=2…",
    f"{SIMULATED} simulate.rank=8 world_size=8": "simulate.rank=8 is not one of the 8 ranks: choose 0 to 7",
    f"{SIMULATED} simulate.rank=last": "simulate.rank=last is not a rank: choose peak, all, or a number…",
    f"{VIRTUAL} simulate.rank=4": "simulate.rank=4 is not one of the 4 ranks: choose 0 to 3",
    f"{VIRTUAL} cluster.nodes=2": "cluster.nodes=2 with launch=virtual, which runs one rank on this machine: choose 1…",
    "strategy=dp launch=virtual world_size=1": (  # every reason at once
        "… has one rank, which needs all its devices: choose launch=processes; strategy=dp needs two CUDA devices…"
    ),
}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        *(WRONG_VALUES | PLAYED).items(),
        *((f"world_size=2 {overrides} strategy.engine=accelerate", said) for overrides, said in BY_ACCELERATE.items()),
        *((f"world_size=4 {overrides}", said) for overrides, said in (BY_DEEPSPEED | INCOMPATIBLE).items()),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(overrides: str, sentence: str) -> None:
    """Where the sentence has an ellipsis, anything may stand."""
    values = {text.partition("=")[0]: text for text in overrides.split()}
    with pytest.raises(UserError) as refused:
        config, _ = compose("data=synthetic", *values.values())
        make_plan(config, machine_of_run(config.to_dict(), lambda _: CPU))
    assert re.fullmatch(re.escape(sentence).replace("…", ".*"), str(refused.value)), refused.value
