"""The names by which other programs and papers know what the command line calls otherwise: data for `did you mean`.

Names are compared in lower case with `_` in the place of `-`, `.`, `/` and spaces (`canonical`).
"""

import re


def canonical(name: str) -> str:
    """Return the form of a name in which spellings are compared."""
    return re.sub(r"[-./\s]+", "_", name.strip().lower()).strip("_")


# Keys, or with `{}` for the value what to type, by the names of torchrun, Accelerate, transformers, DeepSpeed,
# Megatron-LM and Lightning.
KEYS = {
    **dict.fromkeys(
        ("gpus", "gpu", "num_gpus", "n_gpus", "n_gpu", "ngpus", "devices", "num_devices", "nproc", "nproc_per_node"),
        "world_size",
    ),
    **dict.fromkeys(("np", "n", "num_processes", "processes", "ranks", "num_ranks", "world", "workers"), "world_size"),
    **dict.fromkeys(("gpus_per_node", "devices_per_node"), "cluster.gpus_per_node"),
    **dict.fromkeys(("nnodes", "num_nodes", "n_nodes", "num_machines"), "cluster.nodes"),
    **dict.fromkeys(
        ("batch", "batch_size", "bs", "global_batch_size", "gbs", "train_batch_size"), "train.global_batch"
    ),
    **dict.fromkeys(
        (
            *("micro_batch_size", "mbs", "microbatch", "per_device_train_batch_size", "per_device_batch_size"),
            *("local_batch_size", "train_micro_batch_size_per_gpu"),
        ),
        "train.micro_batch",
    ),
    **dict.fromkeys(
        (
            *("seq", "seqlen", "seq_length", "sequence_length", "seq_len", "max_length", "max_seq_len", "block_size"),
            *("context", "max_seq_length", "model_max_length", "n_ctx"),
        ),
        "train.seq_len",
    ),
    **dict.fromkeys(("learning_rate", "max_lr"), "train.lr"),
    **dict.fromkeys(
        ("max_steps", "num_steps", "train_steps", "n_steps", "iters", "iterations", "max_iters", "train_iters"),
        "train.steps",
    ),
    **dict.fromkeys(("warmup", "num_warmup_steps", "warmup_iters"), "train.warmup_steps"),
    **dict.fromkeys(("wd", "decay"), "train.weight_decay"),
    **dict.fromkeys(
        ("max_grad_norm", "grad_clip", "clip_grad", "clip_grad_norm", "gradient_clip_val"), "train.gradient_clipping"
    ),
    **dict.fromkeys(("torch_compile", "jit"), "train.compile"),
    **dict.fromkeys(("random_seed", "rng_seed"), "train.seed"),
    **dict.fromkeys(
        ("tp", "tensor_parallel", "tensor_parallel_size", "tp_size", "tensor_model_parallel_size"),
        "strategy=tp strategy.tp={}",
    ),
    **dict.fromkeys(
        ("pp", "pipeline_parallel", "pipeline_parallel_size", "pp_size", "pipeline_model_parallel_size"),
        "strategy=pp_1f1b strategy.pp={}",
    ),
    **dict.fromkeys(("cp", "context_parallel", "context_parallel_size", "cp_size"), "strategy=cp strategy.cp={}"),
    **dict.fromkeys(("dp", "data_parallel_size", "dp_size", "dp_degree"), "strategy=ddp world_size={}"),
    **dict.fromkeys(("stage", "zero", "ds_stage", "zero_optimization"), "strategy.zero_stage"),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "offload_param"), "strategy.offload"),
    **dict.fromkeys(("pipeline_schedule", "pp_schedule"), "strategy.schedule"),
    **dict.fromkeys(("backend", "library", "framework"), "strategy.engine"),
    **dict.fromkeys(("parallelism", "parallel", "strat", "method", "algorithm"), "strategy"),
    **dict.fromkeys(("dtype", "torch_dtype", "mixed_precision", "amp", "bits"), "precision"),
    **dict.fromkeys(
        (
            *("gradient_checkpointing", "activation_checkpointing", "ac", "recompute", "recomputation", "remat"),
            *("checkpoint", "activation_checkpoint", "activation_checkpoint_mode", "selective_ac_option"),
        ),
        "checkpointing",
    ),
    **dict.fromkeys(
        ("model_name", "model_name_or_path", "pretrained_model_name_or_path", "arch", "size", "model_size"), "model"
    ),
    **dict.fromkeys(("attn", "attn_implementation", "flash_attention", "sdpa"), "model.attention"),
    **dict.fromkeys(("layers", "num_layers", "n_layers", "n_layer", "depth"), "model.num_hidden_layers"),
    **dict.fromkeys(("hidden", "d_model", "n_embd", "width", "dim"), "model.hidden_size"),
    **dict.fromkeys(("heads", "num_heads", "n_head", "n_heads"), "model.num_attention_heads"),
    **dict.fromkeys(("kv_heads", "n_kv_heads", "num_kv_heads"), "model.num_key_value_heads"),
    **dict.fromkeys(("ffn_hidden_size", "ffn_dim", "d_ff", "n_inner"), "model.intermediate_size"),
    **dict.fromkeys(("vocab", "n_vocab", "vocabulary_size"), "model.vocab_size"),
    **dict.fromkeys(("tie_embeddings", "tied_embeddings", "weight_tying"), "model.tie_word_embeddings"),
    **dict.fromkeys(("memory", "max_memory", "memory_limit", "vram", "budget"), "cluster.memory_budget"),
    **dict.fromkeys(("accelerator", "use_cuda"), "cluster.device"),
    **dict.fromkeys(("queue",), "cluster.partition"),
    **dict.fromkeys(("dataset", "dataset_name"), "data"),
    **dict.fromkeys(("data_path", "train_data", "data_file", "train_file"), "data.path"),
    **dict.fromkeys(("output", "output_dir", "out", "out_dir", "save_dir", "log_dir"), "results_dir"),
    **dict.fromkeys(("run_name", "experiment", "exp", "experiment_name"), "name"),
    **dict.fromkeys(("num_repeats", "n_repeats", "trials", "runs", "num_runs"), "repeats"),
    **dict.fromkeys(("timeout", "time_limit", "max_time"), "timeout_seconds"),
    **dict.fromkeys(("logger", "report_to", "track", "wandb"), "tracking"),
    **dict.fromkeys(("wandb_project", "project"), "tracking.project"),
    **dict.fromkeys(("sweep", "preset", "config", "config_file"), "sweeps"),
    **dict.fromkeys(("jobs", "n_jobs", "num_workers", "concurrency"), "sweep.parallel"),
    **dict.fromkeys(("overwrite", "rerun", "again"), "force"),
}

# Keys that are no setting, each with the sentence that answers them.
NO_KEYS = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "accumulate_grad_batches", "ga_steps"),
        "it follows from train.global_batch = train.micro_batch x data-parallel ranks x accumulation, so type"
        " train.global_batch=16 train.micro_batch=1",
    ),
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs", "max_epochs"),
        "a run trains a number of steps, not of epochs, so type train.steps=20",
    ),
    **dict.fromkeys(
        ("optim", "optimizer", "optimizer_type"), "every run trains with AdamW, so leave it out or type train.lr=3e-4"
    ),
    **dict.fromkeys(
        ("lr_scheduler", "scheduler", "lr_scheduler_type"), "the learning rate stays the same, so type train.lr=3e-4"
    ),
    **dict.fromkeys(("bf16", "bfloat16"), "16 bit is a precision, so type precision=bf16_mixed"),
    **dict.fromkeys(("fp16", "float16", "half"), "16 bit is a precision, so type precision=fp16_mixed"),
    **dict.fromkeys(("fp32", "float32"), "32 bit is a precision, so type precision=fp32"),
    **dict.fromkeys(
        ("tf32", "allow_tf32"), "fp32 is computed in full precision, so type precision=bf16_mixed for speed"
    ),
    **dict.fromkeys(("slurm", "sbatch", "cluster_type"), "a launcher submits jobs, so type hydra/launcher=slurm"),
    **dict.fromkeys(
        ("dry_run", "dryrun", "print_config"), "to print the configuration and run nothing, type --cfg job"
    ),
    **dict.fromkeys(
        ("deepspeed", "deepspeed_config", "ds_config", "fsdp", "fsdp_config", "ddp", "zero3", "zero2", "zero1"),
        "it is a strategy, so type strategy=zero3 or strategy=fsdp_full_shard, which `harness ls strategies` explains",
    ),
    **dict.fromkeys(("verbose", "v", "debug", "quiet", "log_level"), "a run's logs are in its folder, so leave it out"),
}

BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

# Values of groups by other names: one or several names of the group, or with `=` what to type instead.
VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "strategy": {
        **dict.fromkeys(
            ("fsdp", "fsdp1", "fsdp2", "full_shard", "fully_shard", "fully_sharded", "fully_sharded_data_parallel"),
            ("fsdp_full_shard",),
        ),
        **dict.fromkeys(("shard_grad_op", "fsdp_zero2"), ("fsdp_shard_grad_op",)),
        **dict.fromkeys(("hybrid_shard", "hsdp", "fsdp_hybrid"), ("fsdp_hybrid_shard",)),
        **dict.fromkeys(("no_shard",), ("fsdp_no_shard",)),
        **dict.fromkeys(("deepspeed", "ds", "zero"), ("zero1", "zero2", "zero3")),
        **{
            f"{prefix}{stage}": (f"zero{stage}",)
            for stage in "123"
            for prefix in ("", "stage", "stage_", "zero_", "zero_stage_", "deepspeed_", "deepspeed_stage_", "ds_zero")
        },
        **dict.fromkeys(("offload", "zero_infinity", "zero2_offload", "deepspeed_offload"), ("zero_offload",)),
        **dict.fromkeys(("zero_redundancy_optimizer", "zero1_pytorch"), ("zero1_torch",)),
        **dict.fromkeys(("distributed", "distributed_data_parallel", "ddp2", "allreduce"), ("ddp",)),
        **dict.fromkeys(("data_parallel", "dataparallel"), ("ddp", "dp")),
        **dict.fromkeys(("tensor", "tensor_parallel", "megatron", "mp", "model_parallel"), ("tp",)),
        **dict.fromkeys(("sp", "sequence_parallel"), ("tp_sp",)),
        **dict.fromkeys(("pp", "pipe", "pipeline", "pipeline_parallel", "1f1b", "pipedream"), ("pp_1f1b",)),
        **dict.fromkeys(("gpipe",), ("pp_gpipe",)),
        **dict.fromkeys(("interleaved", "interleaved_1f1b"), ("pp_interleaved",)),
        **dict.fromkeys(("zero_bubble", "zb", "zbv", "zbh1", "dualpipe"), ("pp_zero_bubble",)),
        **dict.fromkeys(("ring", "ring_attention", "context_parallel", "ulysses"), ("cp",)),
        **dict.fromkeys(("2d", "fsdp_tensor_parallel", "tp_fsdp"), ("fsdp_tp",)),
        **dict.fromkeys(("none", "null", "no", "baseline", "1gpu", "single_gpu", "single_device", "auto"), ("single",)),
    },
    "model": {
        **dict.fromkeys(("gpt", "gpt2", "gpt2_small", "gpt_2"), ("gpt_125m",)),
        "gpt2_medium": ("gpt_350m",),
        "gpt2_large": ("gpt_760m",),
        "gpt2_xl": ("gpt_1.3b",),
        **dict.fromkeys(("gpt3", "gpt_3"), ("gpt_175b",)),
        **dict.fromkeys(("llama", "llama2", "llama_2"), ("7b", "13b")),
        **dict.fromkeys(("llama3", "llama_3", "llama3_1", "llama_3_1"), ("8b", "70b", "405b")),
        **dict.fromkeys(("llama3_2", "llama_3_2"), ("1b", "3b")),
        **dict.fromkeys(("small", "base"), ("125m",)),
    },
    "precision": {
        **dict.fromkeys(("bf16_amp", "mixed_bf16", "mixed", "amp", "true", "16_bit", "bf16_fp32"), ("bf16_mixed",)),
        **dict.fromkeys(("16_mixed", "fp16", "float16", "half", "f16", "mixed_fp16", "16_true"), ("fp16_mixed",)),
        **dict.fromkeys(("16",), ("bf16_mixed", "fp16_mixed")),
        **dict.fromkeys(("bfloat16", "bf16_true", "bf", "torch_bfloat16"), ("bf16_mixed", "bf16")),
        **dict.fromkeys(("32", "float32", "float", "full", "single", "32_true", "tf32", "none", "false"), ("fp32",)),
        **dict.fromkeys(("fp8", "8", "int8", "float8", "fp4", "4"), ("bf16_mixed", "fp16_mixed")),
    },
    "checkpointing": {
        **dict.fromkeys(("true", "yes", "on", "1", "all", "activation", "gradient", "block", "uniform"), ("full",)),
        **dict.fromkeys(("false", "no", "off", "0", "null", "disabled"), ("none",)),
        "sac": ("selective",),
        **dict.fromkeys(  # torchtitan's mode and its option
            ("op", "selective_op", "torchtitan", "every_second"),
            ("selective checkpointing.saved_products=every_second",),
        ),
        **dict.fromkeys(("attn", "core_attention"), ("attention",)),
        **dict.fromkeys(("every", "layers", "every_2", "every_layer"), ("every_n checkpointing.every=2",)),
        **dict.fromkeys(("offload", "cpu", "cpu_offload"), ("checkpointing.offload_activations=true",)),
    },
    "data": {
        **dict.fromkeys(("random", "dummy", "fake", "rand", "mock", "none"), ("synthetic",)),
        **dict.fromkeys(("wikitext", "c4", "shakespeare", "openwebtext", "corpus", "file"), ("data.path=FILE",)),
    },
    "cluster": {
        **dict.fromkeys(("gpu", "cuda", "gpus"), ("cluster.device=cuda",)),
        **dict.fromkeys(("cpu",), ("cluster.device=cpu",)),
        **dict.fromkeys(("sbatch", "hpc", "multinode", "multi_node"), ("slurm",)),
        **dict.fromkeys(("none", "laptop", "single", "localhost"), ("local",)),
    },
    "tracking": {
        **dict.fromkeys(("false", "no", "off", "null", "disabled", "0"), ("none",)),
        **dict.fromkeys(("true", "yes", "on", "1", "wb", "w_b", "weights_and_biases"), ("wandb",)),
        **dict.fromkeys(("online", "offline"), ("tracking.mode=online", "tracking.mode=offline")),
        **dict.fromkeys(("tensorboard", "mlflow", "comet", "neptune"), ("wandb", "none")),
    },
    "proof": {
        **dict.fromkeys(("false", "no", "off", "none", "null", "0"), ("proof.reference=false",)),
        **dict.fromkeys(("true", "yes", "on", "1"), ("default",)),
    },
    "sweeps": {**dict.fromkeys(("quick", "start", "default", "demo", "example"), ("quickstart",))},
}

# Values of keys by other names.
KEY_VALUES: dict[str, dict[str, str]] = {
    "world_size": dict.fromkeys(("all", "auto", "max", "none"), "null"),
    "train.micro_batch": {"auto": "max"},
    "cluster.device": dict.fromkeys(("gpu", "nvidia", "hip", "rocm", "cuda:0", "cuda_0"), "cuda"),
    "model.attention": dict.fromkeys(("sdpa", "flash_attention_2", "flash_attn", "fa2", "fused", "true"), "flash"),
    "strategy.offload": {"cpu": "parameters", "true": "parameters", "none": "none", "false": "none"},
    "strategy.schedule": {
        "interleaved": "interleaved_1f1b",
        "zb": "zero_bubble",
        "zbh1": "zero_bubble",
        "pipedream": "1f1b",
    },
    "strategy.engine": {"pytorch": "torch", "native": "torch", "ds": "deepspeed", "hf": "accelerate"},
}
