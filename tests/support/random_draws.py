"""Random configurations: products of all options on a small model, and the same or a preset strategy at real sizes."""

import math
import random
from collections.abc import Sequence
from typing import Any

from tests.support.commands import ROOT

Overrides = dict[str, Any]  # by key

MOST_PARAMETERS = 16e6

RARE_FROM = 10_000  # draws from this number on are of what the others seldom have: see rare_preset()

MIXTURES_FROM = 20_000  # draws from this number on are of mixtures of experts: see draw_mixture()

NEWEST_FROM = 30_000  # draws from this number on have one of the newest choices: see draw_newest()

TUNED_FROM = 40_000  # draws from this number on have adapters, or another optimizer than AdamW: see draw_tuned()

RARE_STRATEGIES = ("3d", "fsdp_hybrid_shard", "fsdp_tp", "pp_interleaved", "tp_sp", "zero1_tp")

LARGE_WORLD_STRATEGIES = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "zero1", "zero2", "zero3")

HF_MODELS = ROOT / "tests" / "data" / "models"  # of 8 to 25 million parameters

MOST_WORK = 8e9  # parameters times tokens of a step, so that a step takes a core a few seconds

# The numbers of ranks of the presets that cannot have just any number, and of those that share one part of the data.
WORLDS = {
    "single": (1,),
    "dp": (1,),
    "3d": (4, 8),
    "tp_pp": (4,),
    **dict.fromkeys(("cp", "cp_ulysses"), (2, 3, 4)),
    **dict.fromkeys(("tp", "tp_sp"), (2, 4)),
    **dict.fromkeys(("pp_1f1b", "pp_gpipe", "pp_interleaved", "pp_zero_bubble", "pp_zbv", "pp_dualpipev"), (2, 3, 4)),
    "pp_interleaved_zero_bubble": (2, 3, 4),
    **dict.fromkeys(("ddp_pp", "fsdp_pp", "fsdp_tp", "zero1_tp", "fsdp_hybrid_shard", "zero3_hpz"), (4, 6, 8)),
}

MODEL_RANKS = {"3d": 4, "tp_pp": 4} | dict.fromkeys(("ddp_pp", "fsdp_pp", "fsdp_tp", "zero1_tp"), 2)

# The axes that a kind of data parallelism cannot have, by engine, kind and stage of ZeRO.
IMPOSSIBLE = {
    ("torch", "none", 0): ("dp_replicate", "dp_shard", "cp"),
    **dict.fromkeys((("torch", "ddp", 0), ("accelerate", "ddp", 0)), ("dp_shard", "tp")),
    ("torch", "ddp", 1): ("tp",),
    ("torch", "fsdp", 0): ("dp_shard",),
}

PRECISIONS = ("fp32", "fp32", "fp32", "bf16_mixed", "bf16_mixed", "bf16", "fp16_mixed")


def degrees(random_: random.Random, most: int) -> dict[str, int]:
    """Return random degrees of the five axes, whose product is at most `most` and mostly more than 1."""
    axes = ["dp_replicate", "dp_shard", "tp", "cp", "pp"]
    random_.shuffle(axes)
    degree_of, left = dict.fromkeys(axes, 1), most
    for axis in axes:
        degree_of[axis] = random_.choice([degree for degree in (1, 2, 2, 4) if degree <= left])
        left //= degree_of[axis]
    return degree_of


def draw(seed: int, most_ranks: int) -> Overrides:
    """Return the overrides of one random run of a small model.

    Most are valid, so that refused runs do not crowd out the others.
    """
    r = random.Random(seed)
    degree = degrees(r, most_ranks)
    engine = r.choices(("torch", "deepspeed", "accelerate"), (75, 15, 10))[0]
    base = "single"
    data_parallel, stage = r.choice([("none", 0), ("ddp", 0), ("ddp", 1), ("fsdp", 0), ("fsdp", 2), ("fsdp", 3)])
    if engine == "deepspeed" or (engine == "accelerate" and r.random() < 0.5):
        data_parallel, stage = "none", r.choice((1, 2, 3))
        base = f"zero{stage}"  # with its options
        cut = r.choice((1, 1, 1, 2)) if engine == "deepspeed" else 1
        degree = dict.fromkeys(degree, 1) | {"dp_shard": r.choice((1, 2, 4)), "tp": cut}
    elif engine == "accelerate":
        data_parallel, stage = "ddp", 0
        degree = dict.fromkeys(degree, 1) | {"dp_replicate": r.choice((1, 2, 4))}
    if r.random() < 0.9:  # mostly leave out what the kind of data parallelism cannot do at all
        degree |= dict.fromkeys(IMPOSSIBLE.get((engine, data_parallel, stage), ()), 1)
    schedule = r.choice(("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"))
    virtual = r.choice((1, 2)) if schedule == "zero_bubble" else 1 + (schedule == "interleaved_1f1b")
    virtual = virtual if degree["pp"] > 1 else 1
    micro_batch = r.choice((1, 2))
    passes = r.choice((1, 2, 3)) if degree["pp"] == 1 else degree["pp"] * r.choice((1, 2))
    model = small_model(r, is_deep=degree["pp"] * virtual > 4)
    checkpointing = r.choice(("none", "none", "full", "every_n", "selective", "attention"))
    vocabulary = degree["tp"] == 1 or engine != "deepspeed"
    exchange = random.Random(f"exchange {seed}").choice(("gather", "ulysses")) if degree["cp"] > 1 else "gather"
    return {
        "strategy": base,
        **dict(sorted(model.items())),
        "world_size": math.prod(degree.values()),
        **{f"strategy.{axis}": size for axis, size in degree.items()},
        "strategy.context_parallel": exchange,
        "strategy.engine": engine,
        "strategy.data_parallel": data_parallel,
        "strategy.zero_stage": stage,
        "strategy.schedule": schedule if degree["pp"] > 1 else "1f1b",
        "strategy.virtual_stages": virtual,
        "strategy.sequence_parallel": vocabulary and degree["tp"] > 1 and r.random() < 0.5,
        "strategy.literature": (data_parallel, stage) != ("ddp", 1),
        "strategy.vocabulary_parallel": vocabulary,
        "strategy.offload": offload(r, engine, data_parallel, stage),
        "checkpointing": checkpointing,
        "checkpointing.offload_activations": checkpointing != "selective" and r.random() < 0.15,
        "precision": r.choice(("fp32", "fp32", "fp32", "bf16_mixed", "bf16", "fp16_mixed")),
        "train.global_batch": micro_batch * passes * degree["dp_replicate"] * degree["dp_shard"],
        "train.micro_batch": micro_batch,
        "train.seq_len": r.choice((16, 32, 48)),
        "train.steps": 1,
        "train.warmup_steps": 2,
        "train.gradient_clipping": r.choice((0, 1.0)),
        "train.loss_chunks": r.choice((1, 1, 1, 2)),
        "train.fused_optimizer": r.random() < 0.8,
        "train.compile": r.random() < 0.05,
    }


def small_model(r: random.Random, is_deep: bool) -> Overrides:
    heads, groups = r.choice(((4, 2), (4, 4), (8, 4)))
    layers = 8 if is_deep else r.choice((4, 5))
    family = r.choice(("tiny", "tiny", "gpt_tiny"))
    return {
        "model": family,
        "model.num_hidden_layers": layers,
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": groups,
        "model.hidden_size": r.choice((64, 96)),
        "model.intermediate_size": r.choice((128, 192)),
        "model.vocab_size": r.choice((256, 258)),
        "model.attention": r.choice(("flash", "eager")),
        "model.tie_word_embeddings": r.random() < 0.2,
        "model.dropout": 0.1 if family == "gpt_tiny" and r.random() < 0.3 else 0,
    }


def offload(r: random.Random, engine: str, data_parallel: str, stage: int) -> str:
    """Return a kind of offload, mostly none, and otherwise mostly one that the engine supports."""
    if r.random() < 0.8:
        return "none"
    if engine == "deepspeed":
        return "parameters" if stage == 3 and r.random() < 0.5 else "optimizer"
    return "parameters" if data_parallel == "fsdp" or r.random() < 0.1 else "none"


def draw_real_size(seed: int, most_ranks: int) -> Overrides:
    """Return the overrides of one random run at a real size: half of them of a preset strategy, half as draw() has."""
    r, is_rare = random.Random(f"real size {seed}"), seed >= RARE_FROM
    if MIXTURES_FROM <= seed < NEWEST_FROM:
        return draw_mixture(r, most_ranks)
    if is_rare and seed < NEWEST_FROM and r.random() < 0.25:
        return draw_library_model(r)
    if seed >= TUNED_FROM:
        overrides = draw_tuned(r, most_ranks)
    elif seed >= NEWEST_FROM:
        overrides = draw_newest(r, most_ranks)
    elif is_rare:
        overrides = draw_preset(r, most_ranks, *rare_preset(r))
    else:
        overrides = draw_preset(r, most_ranks) if r.random() < 0.5 else draw(seed, most_ranks)
    layers = overrides.get("model.num_hidden_layers") or r.randint(1, 6)
    is_gpt = overrides["model"] == "gpt_tiny"
    ranks = overrides["world_size"] if overrides["strategy"] == "cp_ulysses" else 1  # which divide heads
    heads, groups = r.choice([pair for pair in ((4, 2), (4, 4), (8, 4), (8, 8), (12, 4)) if pair[0] % ranks == 0])
    while True:
        hidden, vocabulary = heads * r.randrange(8, 1 + 768 // heads, 8), vocabulary_size(r)
        intermediate = r.choice((hidden * 4, hidden * 8 // 3, hidden * 3 + r.randrange(32)))
        matrices = 2 if is_gpt else 3
        parameters = 2 * vocabulary * hidden + layers * hidden * (4 * hidden + matrices * intermediate)
        if hidden >= 64 and parameters <= MOST_PARAMETERS:
            break
    tokens = overrides["train.global_batch"] * parameters
    lengths = [n for n in (32, 48, 64, 96, 128, 192, 256, 384, 512) if n * tokens <= MOST_WORK] or [24]
    lengths = [n for n in lengths if is_rare and n > 64] or lengths
    if (overrides["strategy"][:2], overrides["world_size"]) == ("cp", 3):
        lengths = [n for n in lengths if n % 6 == 0] or [24]
    precision = r.choice(PRECISIONS)
    if precision == "fp16_mixed" and overrides["strategy"].startswith("zero") and r.random() < 0.9:
        precision = "fp32"  # which DeepSpeed refused when these draws were first made
    return overrides | {
        "model.num_hidden_layers": layers,
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": heads if is_gpt else groups,
        "model.hidden_size": hidden,
        "model.intermediate_size": intermediate,
        "model.vocab_size": vocabulary,
        "model.context_length": 512,
        "data": "synthetic" if vocabulary < 256 or r.random() < 0.5 else "text",
        "precision": precision,
        "train.seq_len": r.choice(lengths),
        "train.warmup_steps": r.choice((1, 2)),
        "train.compile": r.random() < (0.2 if is_rare else 0.08) and seed < NEWEST_FROM,
    }


# Strategies of the newest choices, the ranks that they can have, and how many stages each rank has in a V.
NEWEST = (
    ("cp_ulysses", (2, 3, 4), 1),
    ("cp_ulysses strategy.tp=2 strategy.data_parallel=fsdp strategy.zero_stage=3", (4, 8), 1),
    ("zero3_hpz", (4, 6, 8), 1),
    ("fsdp_full_shard strategy.secondary_shards=2", (4, 6, 8), 1),
    ("fsdp_full_shard strategy.secondary_shards=4", (8,), 1),
    *((strategy, (2, 3, 4), 1) for strategy in ("pp_zbv", "pp_dualpipev", "pp_interleaved_zero_bubble")),
    *((f"fsdp_pp strategy.schedule={name} strategy.virtual_stages=2", (4, 8), 2) for name in ("zbv", "dualpipev")),
)

SAVED = ("ddp", "fsdp_full_shard", "fsdp_hybrid_shard", "fsdp_pp", "tp_sp", "zero1", "zero2", "zero3")


def draw_newest(r: random.Random, most_ranks: int) -> Overrides:
    """Return the overrides of a run that exchanges heads, has secondary shards or a V of stages, or saves its state."""
    words, worlds, stages = r.choice(NEWEST) if r.random() < 0.8 else (r.choice(SAVED), (), 1)
    strategy, *settings = words.split()
    overrides = draw_preset(r, most_ranks, strategy, worlds) | dict(setting.split("=") for setting in settings)
    halves = "pp_" in strategy or stages > 1
    if halves:  # what their backward in halves refuses is left out, and a V's two ends of a rank
        kinds = ("none", "full", "every_n", "attention")
        fixed = {"model.tie_word_embeddings": False, "train.loss_chunks": 1, "checkpointing": r.choice(kinds)}
        overrides |= fixed | {"train.global_batch": stages * overrides["train.global_batch"]}
        overrides["model.num_hidden_layers"] = stages * overrides["model.num_hidden_layers"]
    is_torch = strategy not in ("zero1", "zero2", "zero3") and "strategy.engine" not in overrides
    saves = r.choice(("sync", "async" if is_torch else "sync"))
    return overrides | ({"train.save": saves} if strategy in SAVED or r.random() < 0.3 else {})


def rare_preset(r: random.Random) -> tuple[str, Sequence[int]]:
    """Return a preset strategy and numbers of ranks of which random draws have few."""
    if r.random() < 0.7:
        strategy = r.choice(RARE_STRATEGIES)
        return strategy, WORLDS[strategy]
    return r.choice(LARGE_WORLD_STRATEGIES), (7, 8)


def draw_library_model(r: random.Random) -> Overrides:
    """Return the overrides of a run of a model of transformers, with layers and a vocabulary of its own size or not."""
    world, micro_batch = r.choice((2, 3, 4)), r.choice((1, 2))
    return {
        "model": "hf",
        "model.path": r.choice(sorted(HF_MODELS.iterdir())).relative_to(ROOT),
        "model.num_hidden_layers": r.choice((2, 4, 6)),
        "model.vocab_size": r.choice((4_001, 8_000, 12_345)),
        "model.attention": r.choice(("flash", "flash", "eager")),
        "model.dropout": r.choice((0, 0, 0, 0.1)),
        "strategy": r.choice(LARGE_WORLD_STRATEGIES),
        "world_size": world,
        "checkpointing": r.choice(("none", "none", "full", "every_n")),
        "precision": r.choice(PRECISIONS[:-1]),
        "train.global_batch": world * micro_batch * r.choice((1, 2)),
        "train.micro_batch": micro_batch,
        "train.seq_len": r.choice((96, 128, 200)),
        "train.steps": 1,
        "train.warmup_steps": 2,
        "train.loss_chunks": r.choice((1, 1, 2)),
    }


# Strategies of mixtures of experts, the ranks that they need, and those that share sequences and layers.
MIXTURES = (
    *((strategy, 2, 1, 1) for strategy in ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "zero1", "zero2", "zero3")),
    *((strategy, 2, 2, 1) for strategy in ("tp", "tp_sp", "cp")),
    *((strategy, 2, 2, 2) for strategy in ("pp_1f1b", "pp_gpipe")),
    ("fsdp_tp", 4, 2, 1),
    *((f"{kind} strategy.ep={ep}", ep, 1, 1) for kind in ("ep", "fsdp_ep") for ep in (2, 2, 3, 4, 6)),
    *((f"{kind} strategy.tp=2", 4, 2, 1) for kind in ("ep", "fsdp_ep")),
    *((f"{kind} strategy.cp=2", 4, 2, 1) for kind in ("ep", "fsdp_ep")),
    *((f"{kind} strategy.pp=2", 4, 2, 2) for kind in ("ep", "fsdp_ep")),
    ("fsdp_ep strategy.tp=2 strategy.sequence_parallel=true", 4, 2, 1),
    ("fsdp_ep strategy.zero_stage=2", 2, 1, 1),
    ("fsdp_ep strategy.dp_replicate=2", 4, 1, 1),
)


def draw_mixture(r: random.Random, most_ranks: int) -> Overrides:
    """Return the overrides of a run of a mixture of experts, whole or divided."""
    strategy, least, shared, stages = r.choice(MIXTURES)
    world = least * (1 if shared == least else r.choice([n for n in (1, 1, 2) if n * least <= most_ranks]))
    first, *products = strategy.split()
    degree = int(strategy.partition("ep=")[2] or 2)
    experts = degree * r.choice((1, 2, 3, 5)) if "ep" in first else r.choice((3, 4, 7, 8, 16))
    of_token = r.randint(1, min(4, experts))
    heads, groups = r.choice(((4, 2), (4, 4), (8, 4), (12, 4)))
    micro_batch, passes = r.choice((1, 2)), stages * r.choice((1, 2))
    while True:
        hidden, inner, layers = (
            heads * r.randrange(8, 1 + 384 // heads, 8),
            r.choice((8, 8, 8, 2)) * r.randint(4, 50),
            r.randint(2, 5),
        )
        vocabulary, length = vocabulary_size(r), r.choice((32, 64, 96, 128, 192, 256))
        shared_inner = r.choice((0, 0, r.randrange(32, 200, 2)))
        mlps = 3 * hidden * (experts * inner + shared_inner)
        parameters = 2 * vocabulary * hidden + layers * (4 * hidden * hidden + mlps)
        tokens = world // shared * micro_batch * passes * length
        if hidden >= 64 and parameters <= MOST_PARAMETERS and parameters * tokens <= MOST_WORK:
            break
    return {
        "strategy": first,
        **dict(product.split("=") for product in products),
        "world_size": world,
        "model": "moe_tiny",
        "model.num_experts": experts,
        "model.num_experts_per_tok": of_token,
        "model.norm_topk_prob": of_token > 1 and r.random() < 0.5,
        "model.shared_expert_intermediate_size": shared_inner,
        "model.router_aux_loss_coef": r.choice((0, 0, 0.01)),
        "model.routing": r.choice(("learned", "learned", "balanced")),
        "model.num_hidden_layers": layers,
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": groups,
        "model.hidden_size": hidden,
        "model.intermediate_size": inner,
        "model.vocab_size": vocabulary,
        "model.context_length": 512,
        "model.attention": r.choice(("flash", "flash", "eager")),
        "model.tie_word_embeddings": r.random() < 0.2,
        "checkpointing": r.choice(("none", "none", "full", "every_n", "selective", "attention")),
        "data": "synthetic" if vocabulary < 256 or r.random() < 0.5 else "text",
        "precision": r.choice(PRECISIONS),
        "train.global_batch": world // shared * micro_batch * passes,
        "train.micro_batch": micro_batch,
        "train.seq_len": length,
        "train.steps": 1,
        "train.warmup_steps": r.choice((1, 2)),
        "train.gradient_clipping": r.choice((0, 1.0)),
        "train.loss_chunks": r.choice((1, 1, 1, 2)),
        "train.fused_optimizer": r.random() < 0.8,
    }


# Strategies of adapters and of optimizers, some of which refuse some of them.
TUNED = (
    *("single", "ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_no_shard", "fsdp_hybrid_shard", "fsdp_tp"),
    *("zero1", "zero1_torch", "zero2", "zero3", "tp", "tp_sp", "cp", "cp_ulysses"),
)


def draw_tuned(r: random.Random, most_ranks: int) -> Overrides:
    """Return the overrides of a run with adapters, or with another optimizer than AdamW."""
    overrides = draw_preset(r, most_ranks, r.choice(TUNED))
    if r.random() < 0.5:
        return overrides | {"optimizer": r.choice(("adamw_8bit", "adamw_bf16", "sgd", "muon", "muon"))}
    rank = r.choice((1, 4, 8, 16))
    return overrides | {
        "adapter": r.choice(("lora", "lora", "lora", "qlora")),
        "model.adapter.r": rank,
        "model.adapter.lora_alpha": rank * r.choice((1, 2)),
        "optimizer": r.choice(("adamw", "adamw", "sgd")),
    }


def draw_preset(
    r: random.Random, most_ranks: int, strategy: str | None = None, worlds: Sequence[int] = ()
) -> Overrides:
    """Return the overrides of a preset strategy, any by default, for a number of ranks that it can have."""
    strategy = strategy or r.choice(sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml")))
    worlds = worlds or WORLDS.get(strategy, (2, 3, 4, 5, 6, 8))
    world = r.choice([ranks for ranks in worlds if ranks <= most_ranks])
    is_one_replica = strategy.startswith(("pp_", "cp", "tp"))
    data_ranks = 1 if is_one_replica else world // MODEL_RANKS.get(strategy, 1)
    stages = world if strategy.startswith("pp_") else 1 + (strategy == "3d" or strategy.endswith("_pp"))
    stages *= 1 + strategy.endswith("v")  # two of each rank, and a micro-batch for each
    micro_batch, passes = r.choice((1, 1, 2)), stages * r.choice((1, 2)) if stages > 1 else r.choice((1, 2, 3, 4))
    overrides: Overrides = {
        "strategy": strategy,
        "world_size": world,
        "model": r.choice(("tiny", "tiny", "gpt_tiny")),
        "model.attention": r.choice(("flash", "flash", "eager")),
        "model.tie_word_embeddings": r.random() < 0.2,
        "checkpointing": r.choice(("none", "none", "full", "every_n", "selective", "attention")),
        "train.global_batch": data_ranks * micro_batch * passes,
        "train.micro_batch": micro_batch,
        "train.steps": 1,
        "train.gradient_clipping": r.choice((0, 1.0)),
        "train.loss_chunks": r.choice((1, 1, 1, 2)),
        "train.fused_optimizer": r.random() < 0.8,
    }
    if strategy.endswith("v"):
        overrides["model.tie_word_embeddings"] = False  # which a V refuses
    if stages > 1:
        overrides["model.num_hidden_layers"] = 2 * stages + r.choice((0, 0, 1))
    if strategy in ("ddp", "zero1", "zero2", "zero3") and r.random() < 0.25:
        overrides["strategy.engine"] = "accelerate"
    if strategy in ("fsdp_full_shard", "fsdp_shard_grad_op", "zero3") and r.random() < 0.2:
        overrides["strategy.offload"] = "parameters"
    if strategy == "fsdp_full_shard" and world in (4, 6, 8) and r.random() < 0.2:
        overrides["strategy.secondary_shards"] = 2
    if overrides["model"] == "gpt_tiny" and r.random() < 0.2:
        overrides["model.dropout"] = 0.1
    return overrides


def vocabulary_size(r: random.Random) -> int:
    """Return a vocabulary of 250 to 32,000 tokens, spread evenly over the orders of magnitude, and often an odd one."""
    size = round(math.exp(r.uniform(math.log(250), math.log(32_000))))
    return size if r.random() < 0.5 else max(256, size // 64 * 64)


def listed(overrides: Overrides) -> list[str]:
    """Return overrides as they stand on a command line."""
    return [f"{key}={value}" for key, value in overrides.items()]
