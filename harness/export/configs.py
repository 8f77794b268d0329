"""Files that other programs read: Accelerate's YAML, DeepSpeed's JSON and the torchrun command."""

import json

import torch

from harness.engines.deepspeed.config import deepspeed_config
from harness.export.recorded_run import RecordedRun


def deepspeed_json(run: RecordedRun) -> str:
    """Return what the run passed to deepspeed.initialize, with the global batch that follows from it."""
    values = deepspeed_config(run.config, run.layout, torch.device(run.device))
    return json.dumps({"train_batch_size": run.config.train.global_batch} | values, indent=2) + "\n"


def torchrun_sh(run: RecordedRun) -> str:
    """Return a shell script that starts train.py on as many ranks as the run had."""
    nodes = run.config.cluster.nodes
    if nodes == 1:
        rendezvous = "--standalone"
    else:
        rendezvous = '--rdzv-backend=c10d --rdzv-endpoint="${HEAD:?set HEAD to host:port of the first machine}"'
    lines = [
        "#!/bin/sh",
        f"# The run's {run.layout.world_size} ranks: {nodes} x {run.ranks_per_node}. Start it on every machine.",
        'cd "$(dirname "$0")" || exit',
        f"export OMP_NUM_THREADS={run.threads}  # the cores divided among the ranks, as in the run",
    ]
    if run.device == "cpu" and run.layout.uses_deepspeed_zero:
        lines.append("export DS_ACCELERATOR=cpu  # otherwise DeepSpeed decides; it compiles its CPU collective once")
    lines.append(f'exec torchrun --nnodes={nodes} --nproc-per-node={run.ranks_per_node} {rendezvous} train.py "$@"')
    return "\n".join(lines) + "\n"


def accelerate_yaml(run: RecordedRun) -> str:
    """Return the configuration file of `accelerate launch`."""
    kind = (
        "DEEPSPEED"
        if run.layout.uses_deepspeed_zero
        else {"ddp": "MULTI_GPU", "fsdp": "FSDP"}[run.layout.data_parallel]
    )
    lines = ["# accelerate launch --config_file accelerate.yaml train_accelerate.py, in this folder"]
    if run.device == "cpu":
        lines.append("# The run was on a CPU. This type starts processes there too; MULTI_CPU does so by mpirun alone.")
    lines += [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        f"num_machines: {run.config.cluster.nodes}",
        f"num_processes: {run.layout.world_size}",
        "machine_rank: 0",
        "rdzv_backend: static" if run.config.cluster.nodes == 1 else "rdzv_backend: c10d",
        "main_process_port: 0  # any free port",
        *PARTS[kind](run),
    ]
    return "\n".join(lines) + "\n"


def ddp_part(run: RecordedRun) -> list[str]:
    """Return the lines of distributed_type MULTI_GPU."""
    return [NO_AUTOCAST]


def fsdp_part(run: RecordedRun) -> list[str]:
    """Return the lines of distributed_type FSDP, version 2."""
    layout = run.layout
    lines = [
        NO_AUTOCAST,
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_reshard_after_forward: {str(layout.zero_stage == 3).lower()}  # FULL_SHARD; false is SHARD_GRAD_OP",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_transformer_layer_cls_to_wrap: {WRAPPED_CLASSES}  # yours: every class that is a group of its own",
        "  fsdp_offload_params: false",
        "  fsdp_cpu_ram_efficient_loading: false",
        "  fsdp_sync_module_states: false",
        "  fsdp_activation_checkpointing: false  # the script applies it",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
    ]
    if layout.dp_replicate > 1:
        lines += [
            "parallelism_config:  # HYBRID_SHARD",
            f"  parallelism_config_dp_replicate_size: {layout.dp_replicate}",
            f"  parallelism_config_dp_shard_size: {layout.dp_shard}",
        ]
    return lines


def deepspeed_part(run: RecordedRun) -> list[str]:
    """Return the lines of distributed_type DEEPSPEED."""
    return [
        "# There is no mixed_precision here: deepspeed.json has it, and Accelerate refuses both at once.",
        "deepspeed_config:",
        "  deepspeed_config_file: deepspeed.json",
        "  zero3_init_flag: false  # true makes transformers build its models sharded",
    ]


NO_AUTOCAST = 'mixed_precision: "no"  # Accelerate uses autocast, which keeps 16-bit copies of weights for backward'

WRAPPED_CLASSES = "Block,Embedding,Head"

PARTS = {"MULTI_GPU": ddp_part, "FSDP": fsdp_part, "DEEPSPEED": deepspeed_part}
