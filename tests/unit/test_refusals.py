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
    "strategy.schedule=zbh2": "strategy.schedule=zbh2 is not known: choose gpipe, 1f1b, interleaved_1f1b, zero_bubb…",
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
    "strategy=ddp train.save=async": "train.save=async is a way of torch.distributed.checkpoint, which strategy.en…",
    "strategy=fsdp_full_shard train.save=sync": "train.save=sync was not tried with fully_shard through Accelera…",
    "strategy=fsdp_full_shard": "strategy.engine=accelerate with … would not shard on a CPU: choose strategy=ddp",
    "strategy=zero1 precision=bf16_mixed": "… always all-reduces through Accelerate…",
    "strategy=zero1_torch": "strategy.zero_stage=1 is not a mode of Accelerate's ddp…",
    "strategy=ddp +strategy.options.device_ids=1": "strategy.options.device_ids=1 is not supported by…",
    "strategy=zero2 strategy.offload=optimizer": "strategy.offload=optimizer is not supported by strategy.engine=acc…",
    "strategy=ddp strategy.offload=optimizer": "strategy.offload=optimizer is not supported by strategy.engine=acc…",
    "strategy=tp": "strategy.tp=2 is not supported by strategy.engine=accelerate…",
    "strategy=single world_size=1": "… has no data parallelism to wrap…",
}

OF_DEEPSPEED = "is not supported by strategy.engine=deepspeed: choose"

OPTIONS = ", ".join(sorted({*FLAGS, *SIZES}))

TWO = "strategy.tp=2 strategy.vocabulary_parallel=false"

BY_DEEPSPEED = {
    "strategy=zero2 train.save=async": "train.save=async is a way of torch.distributed.checkpoint, which strategy…",
    "strategy=zero2 strategy.dp_replicate=2": f"strategy.dp_replicate=2 {OF_DEEPSPEED} 1, and -1 for strategy.dp_shard",
    "strategy=zero2 strategy.zero_stage=0": f"strategy.zero_stage=0 {OF_DEEPSPEED} 1, 2 or 3",
    "strategy=zero2 strategy.dp_shard=2 strategy.cp=2": f"strategy.cp=2 {OF_DEEPSPEED} 1",
    "strategy=zero2 +strategy.options.reduce_scater=true": (
        f"strategy.options.reduce_scater=True {OF_DEEPSPEED} among {OPTIONS}"
    ),
    "strategy=zero2 +strategy.options.stage=3": f"strategy.options.stage=3 {OF_DEEPSPEED} among {OPTIONS}",
    "strategy=zero1_tp strategy.vocabulary_parallel=true": "strategy.vocabulary_parallel=true is not supported by…",
    "strategy=zero1_tp strategy.sequence_parallel=true": "strategy.sequence_parallel=true is not supported by…",
    f"strategy=zero3 {TWO}": "strategy.tp=2 of DeepSpeed keeps gathered weights…",
    "strategy=ddp strategy.vocabulary_parallel=false": "… is not supported by strategy.engine=torch: choose true…",
    "strategy=zero1_tp strategy.tp=4": "strategy.tp=4 does not divide model.num_key_value_heads=2…",
    "strategy=zero3 model=gpt_tiny checkpointing=selective": "… would add the biases of model=gpt_tiny twice…",
}

# What would be lost, split or averaged wrongly.
INCOMPATIBLE = {
    "strategy=pp_zbv strategy.virtual_stages=1": "strategy.virtual_stages=1 does not make the two stages of each rank…",
    "strategy=pp_zbv strategy.pp=4 train.global_batch=7 train.micro_batch=1": "… make 7 micro-batches, fewer than the…",
    "strategy=pp_dualpipev model.num_hidden_layers=8 model.tie_word_embeddings=true": (
        "model.tie_word_embeddings=true shares a table…of strategy.schedule=dualpipev, which was not tried…"
    ),
    "strategy=pp_zbv strategy.pp=2 strategy.dp_replicate=2 strategy.data_parallel=ddp": "… before…computes…",
    "strategy=pp_zero_bubble train.compile=true": "… cannot split a backward that train.compile=true fuses…",
    "strategy=ddp checkpointing=selective train.compile=true": "… cannot recompute parts of a layer…",
    "strategy=ddp strategy.offload=parameters": (
        "strategy.offload=parameters is not supported by strategy.data_parallel=ddp: choose none, or…"
    ),
    "strategy=tp world_size=2 strategy.offload=optimizer": (
        "strategy.offload=optimizer is not supported by strategy.data_parallel=none: choose none, or…"
    ),
    "strategy=fsdp_full_shard strategy.offload=optimizer": "strategy.offload=… is not a policy of fully_shard…",
    "strategy=zero2 strategy.offload=parameters": "… needs sharded parameters, not strategy.zero_stage=2…",
    "strategy=pp_zero_bubble train.loss_chunks=4": "train.loss_chunks=4 saves nothing under strategy.schedule…",
    "strategy=ddp_pp strategy.schedule=zero_bubble": "… before strategy.schedule=zero_bubble computes them…",
    "strategy=fsdp_pp strategy.zero_stage=3 strategy.schedule=zero_bubble": "… frees parameters…",
    "strategy=cp strategy.data_parallel=none": "… to average gradients…",
    "strategy=tp_pp strategy.data_parallel=ddp": "… cannot wrap a model that strategy.tp=2 shards…",
    "strategy=cp model=moe_tiny model.routing=balanced": "… choose strategy.cp=1, or model.routing=learned",
    "strategy=ep model=moe_tiny model.intermediate_size=66 precision=bf16": "… in multiples of 8: choose such sizes",
    "strategy=zero1_tp model=moe_tiny": "… cuts single matrices, and model=moe_tiny has experts in stacks…",
    "strategy=ep strategy.cp=2 model=moe_tiny model.router_aux_loss_coef=0.1": "… divides the sequences whose experts…",
    "strategy=ep model=moe_tiny model.router_aux_loss_coef=0.1 precision=fp16_mixed": "… does not scale…",
    "strategy=cp train.seq_len=33": "strategy.cp=4 cuts train.seq_len=33 into 8 chunks: choose a multiple of 8…",
    "strategy=ddp strategy.context_parallel=ulysses": "… needs strategy.cp of 2 or more: choose gather",
    "strategy=cp_ulysses model.num_attention_heads=2": "… choose 1 or 2, or strategy.context_parallel=gather",
    "strategy=cp_ulysses train.seq_len=34": "… choose a multiple of 4…",
    "strategy=fsdp_full_shard strategy.dp_replicate=4": "… shards nothing…",
    "strategy=zero1_torch strategy.dp_replicate=4": "… shards nothing…",
}

DIVIDED_AGAIN = "strategy=fsdp_full_shard strategy.secondary_shards"

SECONDARY = {
    f"{DIVIDED_AGAIN}=3": "strategy.secondary_shards=3 does not divide the 4 shards into several…: choose 1 or 2",
    f"{DIVIDED_AGAIN}=4": "strategy.secondary_shards=4 does not divide the 4 shards into several…: choose 1 or 2",
    f"{DIVIDED_AGAIN}=2 strategy.zero_stage=2": "… which strategy.zero_stage=2 keeps whole: choose…",
    "strategy=fsdp_tp strategy.secondary_shards=2": "… was proven for data parallelism alone…",
    f"{DIVIDED_AGAIN}=2 model=moe_tiny": "strategy.secondary_shards=2 was not tried with experts…",
    f"{DIVIDED_AGAIN}=2 adapter=lora": "strategy.secondary_shards=2 was not tried with adapter=lora…",
    "strategy=zero3_hpz strategy.offload=parameters": "… was not tried with strategy.offload=parameters…",
    "strategy=zero3_hpz strategy.engine=accelerate": "strategy.secondary_shards=2 is not supported by…",
}

IN_BITS = "strategy=zero3 world_size=2 +strategy.options.zero_quantized_weights"

ZERO_PLUS_PLUS = {
    f"{IN_BITS}=true": "….zero_quantized_weights=true needs an operator that DeepSpeed has for CUDA alone…",
    "strategy=zero3_plus_plus strategy.secondary_shards=2 world_size=4": "… needs an operator … or false",
    f"{IN_BITS}=8": "…strategy.options.zero_quantized_weights=8 is neither true nor false…",
    f"{IN_BITS}=true launch=simulated cluster=8xh100 strategy.zero_stage=2": "… not tried with strategy.zero_stage=2…",
    f"{IN_BITS}=true launch=simulated cluster=8xh100 model=moe_tiny": "… was not tried with model=moe_tiny, which has…",
    f"{IN_BITS}=true launch=simulated cluster=8xh100 adapter=lora": "… was not tried with adapter=lora…",
    f"{IN_BITS}=true launch=simulated cluster=8xh100 model.vocab_size=257": "… unlike embed_tokens.weight of 257x…",
}

QUANTIZED = {
    "strategy=fsdp_full_shard adapter=qlora precision=bf16": "adapter=qlora is planned and not run with strategy=fsdp…",
    "strategy=ddp adapter=qlora precision=fp16_mixed": "… strategy=ddp precision=fp16_mixed, as 4-bit weights were…",
    "strategy=ddp adapter=qlora train.save=sync": "train.save=sync was not tried with adapter=qlora…",
    "strategy=zero3 adapter=qlora": "adapter=qlora is planned and run with strategy.engine=torch alone: choose…",
    "strategy=fsdp_tp strategy.tp=2 adapter=qlora precision=bf16": "strategy.tp=2 does not cut the 4-bit…",
    "strategy=fsdp_full_shard adapter=qlora precision=bf16_mixed": "precision=bf16_mixed casts what fully_shard…",
}

SIMULATED = "strategy=ddp launch=simulated cluster=8xh100 train.global_batch=16"

VIRTUAL = "strategy=ddp launch=virtual world_size=4"

PLAYED = {
    "train.save=sync launch=simulated": "train.save=sync writes what ranks have trained, and launch=simulated trains…",
    "train.save=async launch=virtual": "train.save=async writes what ranks have trained, and launch=virtual trains…",
    "train.save=later": "train.save=later is not known: choose none, sync, async…",
    "train.save=sync strategy=zero3_hpz world_size=4": "… choose train.save=none, or strategy=zero3",
    "train.save=sync optimizer=adamw_8bit": "train.save=sync: torch.distributed.checkpoint does not take the states…",
    f"{SIMULATED} train.compile=true": "train.compile=true cannot be simulated…",
    f"{SIMULATED} world_size=16": "world_size=16 is more than the 8 devices of cluster=8xh100: choose cluster.nodes=2…",
    f"{SIMULATED} simulate.rank=8 world_size=8": "simulate.rank=8 is not one of the 8 ranks: choose 0 to 7",
    f"{SIMULATED} simulate.rank=last": "simulate.rank=last is not a rank: choose peak, all, or a number…",
    f"{VIRTUAL} simulate.rank=4": "simulate.rank=4 is not one of the 4 ranks: choose 0 to 3",
    f"{VIRTUAL} cluster.nodes=2": "cluster.nodes=2 with launch=virtual, which runs one rank here: choose 1…",
    f"{SIMULATED} strategy=dp": "launch=simulated plays single ranks, and strategy.engine=nn_data_parallel needs all…",
    "strategy=dp launch=virtual world_size=1": (  # every reason at once
        "… needs all devices: choose launch=processes; strategy=dp needs two CUDA devices…"
    ),
}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        *(WRONG_VALUES | PLAYED | ZERO_PLUS_PLUS).items(),
        *((f"world_size=2 {overrides} strategy.engine=accelerate", said) for overrides, said in BY_ACCELERATE.items()),
        *(
            (f"world_size=4 {overrides}", said)
            for overrides, said in (BY_DEEPSPEED | INCOMPATIBLE | SECONDARY | QUANTIZED).items()
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(overrides: str, sentence: str) -> None:
    """Where the sentence has an ellipsis, anything may stand."""
    values = {text.partition("=")[0]: text for text in overrides.split()}
    with pytest.raises(UserError) as refused:
        config, _ = compose("data=synthetic", *values.values())
        make_plan(config, machine_of_run(config.to_dict(), lambda _: CPU))
    assert re.fullmatch(re.escape(sentence).replace("…", ".*"), str(refused.value)), refused.value
