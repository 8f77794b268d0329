"""Megatron-LM's golden values as configurations and layouts: bytes allocated at rest and at the peak of the last rank.

Flags are those of the file. Where one is missing, Megatron-LM's default holds (megatron/training/arguments.py): a
vocabulary of 50,257 tokens (GPT-2's), an inner size of 4 x hidden_size or, gated, two thirds of it rounded down to a
multiple of 64, dropout of 0.1, learned positions, LayerNorm and biases. Three flags that the file does not list are
known by the name of the case: uneven stages, two instances of the distributed optimizer, and the fused loss. Rows
without a number of GPUs ran on the eight of their machine, as those of the same platform did.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache

from harness.config.model import ARCHITECTURES, Architecture, ModelConfig
from harness.config.schema import CheckpointingConfig, PrecisionConfig
from harness.config.stack import StackConfig, load_stack
from harness.config.strategy import StrategyConfig
from tests.support.published import (
    BF16_MIXED,
    DATA,
    TunedRow,
    Values,
    numbered_rows,
    published_row,
    train_config,
)

FILE = "megatron_golden_values.csv"

# What the host launches in both passes of a layer of these tests, which run deterministic and partly unfused kernels:
# fitted to their step times (tests/benchmarks/fit_planner.py), and no figure of Megatron-LM in training.
KERNELS_PER_LAYER = 265

EXCLUDED_CASES = {
    "grpo": "reinforcement learning: the memory is that of its inference engine",
    "inference": "inference",
    "release": "neither the number of GPUs nor the vocabulary is listed",
    "account_for_embedding": "stages without a layer, which no layout here has",
    "check_grads": "a head size of 128 (--kv-channels) is not listed, and the case runs several layouts",
}

# The compute capability and the file in conf/cluster of the devices that a platform names.
DEVICES = {"a100": (8, "8xa100_80"), "h100": (9, "8xh100"), "gb200": (10, "8xb200")}

# What --recompute-granularity recomputes: the whole layer, or attention alone.
RECOMPUTED = {"": "none", "full": "full", "selective": "attention"}


@dataclass(frozen=True)
class MegatronModel(ModelConfig):
    """A model whose parts Megatron-LM's flags combine in other ways than the families of this project do."""

    parts: Architecture | None = None

    @property
    def architecture(self) -> Architecture:
        """The parts of a decoder layer."""
        return self.parts or super().architecture


def exclusion(values: Values) -> str | None:
    """Return why a row is left out, or None: what is trained is another model, or a flag that matters is not listed."""
    reasons = [
        (values["suite"] != "gpt" or values["num-experts"], f"suite {values['suite']}: not a dense decoder"),
        (not values["mem_allocated_last"] or not values["mem_max_allocated_last"], "no memory is listed"),
        *((word in values["case"], reason) for word, reason in EXCLUDED_CASES.items()),
        (values["use-megatron-fsdp"], "Megatron-FSDP, another implementation of sharding"),
        (values["fp8-format"], "parameters in FP8, which no precision here has"),
    ]
    return next((reason for is_left_out, reason in reasons if is_left_out), None)


@cache
def rows() -> tuple[TunedRow, ...]:
    """Return the rows of dense decoders that the flags in the file describe."""
    return tuple(_row(number, values) for number, values in numbered_rows(DATA / FILE) if exclusion(values) is None)


def _integer(values: Values, key: str, default: int) -> int:
    return int(float(values[key])) if values[key] else default


def _row(number: int, values: Values) -> TunedRow:
    tp, pp, cp = (
        _integer(values, key, 1)
        for key in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    )
    nodes, per_node = (int(part) for part in (values["nodes_gpus"] or "1x8").split("x"))
    dp = nodes * per_node // (tp * pp * cp)
    model = _model(values)
    platform = "a100" if values["platform"].endswith(".json") else values["platform"]  # the oldest files name no device
    capability, cluster = next(device for name, device in DEVICES.items() if name in platform)
    sharded = values["use-distributed-optimizer"] == "True"
    replicas = 2 if "multi_dist_optimizer_instances" in values["case"] else 1
    virtual = _virtual_stages(values, model.num_hidden_layers, pp)
    strategy = StrategyConfig(
        "megatron",
        data_parallel="ddp" if dp * cp > 1 else "none",
        zero_stage=1 if sharded else 0,
        dp_replicate=replicas if sharded else dp,
        dp_shard=dp // replicas if sharded else 1,
        tp=tp,
        sequence_parallel=values["sequence-parallel"] == "True" and tp > 1,
        cp=cp,
        pp=pp,
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        layers_per_stage=_layers_per_stage(values["case"], model.num_hidden_layers, pp * virtual),
    )
    micro_batch = _integer(values, "micro-batch-size", 1)
    train = train_config(
        _integer(values, "global-batch-size", micro_batch * dp), micro_batch, _integer(values, "seq-length", 1024)
    )
    measured = {
        "resting_bytes": float(values["mem_allocated_last"]),
        "peak_bytes": float(values["mem_max_allocated_last"]),
    }
    if values["iteration_s_median"]:
        measured["step_seconds"] = float(values["iteration_s_median"])
    row = published_row(
        FILE,
        number,
        model,
        strategy,
        train,
        cluster=cluster,
        stack="megatron",
        world_size=nodes * per_node,
        gpus_per_node=per_node,
        group=f"{values['case']} on {nodes * per_node} GPUs",
        precision=_precision(values),
        checkpointing=CheckpointingConfig(RECOMPUTED[values["recompute-granularity"]]),
        measured=measured,
        timing_changes={"kernels_per_layer": KERNELS_PER_LAYER},
    )
    return TunedRow(row, _stack(values), capability)


def _virtual_stages(values: Values, layers: int, pp: int) -> int:
    """Return the stages of each rank, from the flags that set their layers or their number."""
    if values["num-layers-per-virtual-pipeline-stage"]:
        return layers // pp // _integer(values, "num-layers-per-virtual-pipeline-stage", 1)
    return _integer(values, "num-virtual-stages-per-pipeline-rank", 1)


def _layers_per_stage(case: str, layers: int, stages: int) -> tuple[int, ...] | None:
    """Return the layers of stages that a case cuts unevenly, by the flags of its model_config.yaml.

    The uneven pipeline has two layers in its first and in its last stage (--decoder-first-pipeline-num-layers and
    --decoder-last-pipeline-num-layers).
    """
    if "uneven" in case:
        return (2, *[(layers - 4) // (stages - 2)] * (stages - 2), 2)
    return None


def _model(values: Values) -> MegatronModel:
    hidden, gated = _integer(values, "hidden-size", 0), values["swiglu"] == "True"
    heads = _integer(values, "num-attention-heads", 1)
    grouped = values["group-query-attention"] == "True"
    inner = hidden * 4 * 2 // 3 // 64 * 64 if gated else 4 * hidden
    backend, dropout = values["attention-backend"], values["hidden-dropout"] != "0.0"
    # The first images had no deterministic fused kernel that Transformer Engine would choose by itself.
    first_images = "dracooci" in values["platform"] and not backend
    eager = backend == "unfused" or values["transformer-impl"] == "local" or first_images
    parts = dataclasses.replace(
        ARCHITECTURES["llama" if gated else "gpt"],
        norm="rms" if values["normalization"] == "RMSNorm" else "layer",
        biases=values["disable-bias-linear"] != "True",
        learned_positions=values["position-embedding-type"] in ("", "learned_absolute"),
        dropout=True,
    )
    return MegatronModel(
        values["case"],
        family="gpt",
        hidden_size=hidden,
        num_hidden_layers=_integer(values, "num-layers", 1),
        num_attention_heads=heads,
        num_key_value_heads=_integer(values, "num-query-groups", heads) if grouped else heads,
        intermediate_size=_integer(values, "ffn-hidden-size", inner),
        vocab_size=_integer(values, "vocab-size", 50_257),
        tie_word_embeddings=values["untie-embeddings-and-output-weights"] != "True",
        context_length=_integer(values, "seq-length", 1024),
        parameters=0,
        source="Megatron-LM tests/functional_tests",
        attention="eager" if eager else "flash",
        dropout=0.1 if dropout else 0.0,
        parts=parts,
    )


def _precision(values: Values) -> PrecisionConfig:
    """Return the precision: gradients are accumulated in fp32 under --bf16, and as they are under --fp16."""
    if values["fp16"] == "True":
        return PrecisionConfig(
            "fp16_mixed", compute="float16", master="float32", accumulate="float16", reduce="float16"
        )
    return BF16_MIXED


def _stack(values: Values) -> StackConfig:
    """Return the stack as the flags of a row set it.

    Deterministic runs set CUBLAS_WORKSPACE_CONFIG=:4096:8, 32 MiB a handle (their model_config.yaml). Only Transformer
    Engine's layers have a workspace of their own.
    """
    stack = load_stack("megatron")
    changes: dict[str, int | tuple[int, int]] = {}
    if values["deterministic-mode"] == "True":
        changes["cublas_workspace_bytes"] = 8 * 4096 * 2**10
    if "cross_entropy_loss_fusion" in values["case"]:  # megatron/core/fusions/fused_cross_entropy.py: not in place
        changes["fp32_logits"] = 2
    if values["transformer-impl"] == "local":
        changes["library_workspace_bytes"] = (0, 0)
    return dataclasses.replace(stack, memory=dataclasses.replace(stack.memory, **changes))
