"""Files that are exported to torchtitan, the Trainer and axolotl: known keys, the layout, and the losses of the run."""

import ast
import collections
import functools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch.distributed.pipelining.schedules import get_schedule_class
from transformers.integrations.fsdp import update_fsdp_plugin_peft

from harness.cli.export import FILES
from harness.engines.torch.pipeline_parallel import SCHEDULES
from harness.export.planned_run import plan_run
from harness.export.recorded_run import RecordedRun
from harness.export.script import file_text, refusals
from tests.support.commands import ROOT, long
from tests.support.exports import RECOMMENDED, exported, of_the_run, output, settings_of

FORMATS = {"torchtitan": "torchtitan.toml", "trainer": "trainer_arguments.py", "axolotl": "axolotl.yaml"}

KEYS = tomllib.loads((ROOT / "tests" / "support" / "trainer_keys.toml").read_text())

SMALL = ("model=tiny", "cluster=8xh100", "data=synthetic", "train.seq_len=64", "train.global_batch=16")


def planned(*settings: str) -> RecordedRun:
    """Return the run of a plan, of which nothing is written."""
    return plan_run(settings, Path("nowhere"), lambda line: None)


SEQUENCE = "strategy=fsdp_tp strategy.sequence_parallel=true"

FLOAT8 = "precision=fp8_mixed"

FOUR_HEADS = "model.num_key_value_heads=4"  # whose parts of two ranks are multiples of 16

ULYSSES = "strategy.context_parallel=ulysses"


@functools.cache
def small(overrides: str) -> RecordedRun:
    """Return the run of a plan of a small model on eight GPUs, in fp32 unless the overrides say otherwise."""
    return planned(*SMALL, "precision=fp32", "train.micro_batch=1", *overrides.split())


def nearest_change(reason: str) -> list[str]:
    """Return the settings that a reason ends with, the first of several ways."""
    change = reason.rpartition(": rerun with ")[2]
    return re.split(", | or ", change)[0].split()


def parsed(run: RecordedRun, kind: str) -> dict[str, Any]:
    """Return the settings of an exported file of torchtitan or axolotl, by their own parsers."""
    text = file_text(run, FORMATS[kind])
    return tomllib.loads(text) if kind == "torchtitan" else yaml.safe_load(text)


def sections(settings: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted name of every section of a file of torchtitan, with its keys that are no sections."""
    plain = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    if plain:
        yield path.removesuffix("."), plain
    for key in settings.keys() - plain.keys():
        yield from sections(settings[key], f"{path}{key}.")


def unknown_keys(kind: str, settings: dict[str, Any]) -> list[str]:
    """Return the keys that the target does not know."""
    known = KEYS[kind]
    if kind == "torchtitan":
        return [f"{name}.{key}" for name, keys in sections(settings) for key in keys if key not in known[name]]
    inner = [key for key in settings.get("fsdp_config", {}) if key not in known["fsdp_config"]]
    return [key for key in settings if key not in known["settings"]] + inner


@pytest.mark.long
def test_so_many_recommended_layouts_are_said_by_each_format() -> None:
    """As they are, and after the nearest changes, which the reasons name; the guide has both numbers.

    Without the other parallelisms, 16384 ranks are more than the sequences of a step.
    """
    said: collections.Counter[str] = collections.Counter()
    said_after: collections.Counter[str] = collections.Counter()
    for row in RECOMMENDED:
        for kind in FORMATS:
            settings, changes = settings_of(row), 0
            while True:
                run = planned(*settings)
                reasons = refusals(run, kind)
                if not reasons:
                    said[kind] += not changes
                    said_after[kind] += 1
                    check_file(run, kind)
                    break
                if row["world_size"] == "16384" and kind != "torchtitan":
                    break
                settings, changes = [*settings, *nearest_change(reasons[0])], changes + 1
                assert changes < 8, reasons
    assert said == {"torchtitan": 7, "trainer": 2, "axolotl": 2}
    assert said_after == {"torchtitan": 37, "trainer": 35, "axolotl": 35}
    guide = (ROOT / "docs" / "guides" / "export.md").read_text()
    for kind, name in FORMATS.items():
        assert f"| `{name}` | {said[kind]} | {said_after[kind]} |" in guide


def check_file(run: RecordedRun, kind: str) -> None:
    """Check that a file's keys are known, and that its degrees and batches are the run's."""
    layout, train = run.layout, run.config.train
    if layout.uses_deepspeed_zero:
        assert not refusals(run, "deepspeed")  # the file that both others name
    if kind == "trainer":
        arguments = arguments_of(run)
        assert arguments.max_steps == train.total_steps
        per_rank = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        assert per_rank * layout.dp == train.global_batch
        return
    settings = parsed(run, kind)
    assert unknown_keys(kind, settings) == []
    if kind == "axolotl":
        per_rank = settings["micro_batch_size"] * settings["gradient_accumulation_steps"]
        assert (per_rank * layout.dp, settings["sequence_len"]) == (train.global_batch, train.seq_len)
        return
    degrees = [value for key, value in settings["parallelism"].items() if key.endswith("_degree")]
    assert len(degrees) == 5 and torch.tensor(degrees).prod() == layout.world_size
    batches = settings["training"]
    assert (batches["global_batch_size"], batches["seq_len"]) == (train.global_batch, train.seq_len)
    micro_batch = settings["parallelism"].get("pipeline_parallel_microbatch_size", batches["local_batch_size"])
    assert micro_batch == train.micro_batch


def test_a_misspelt_key_is_noticed() -> None:
    assert unknown_keys("torchtitan", {"training": {"seq_length": 1, "steps": 1}}) == ["training.seq_length"]
    assert unknown_keys("axolotl", {"seq_len": 1, "fsdp_config": {"reshard": True}}) == ["seq_len", "reshard"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("strategy=fsdp_full_shard", {"data_parallel_shard_degree": 8, "fsdp_reshard_after_forward": "always"}),
        ("strategy=fsdp_shard_grad_op", {"data_parallel_replicate_degree": 1, "fsdp_reshard_after_forward": "never"}),
        (
            "strategy=fsdp_hybrid_shard strategy.dp_replicate=2",
            {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4},
        ),
        ("strategy=ddp", {"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1}),
        (
            "strategy=fsdp_tp strategy.sequence_parallel=true strategy.cp=2",
            {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "context_parallel_degree": 2},
        ),
        (
            "strategy=tp_sp strategy.tp=2 strategy.pp=4",
            {"pipeline_parallel_degree": 4, "data_parallel_shard_degree": 1},
        ),
        ("strategy=ddp checkpointing=full", {"mode": "full", "early_stop": True}),
        ("strategy=ddp checkpointing=every_n", {"mode": "selective", "selective_ac_option": "2"}),
        (
            "strategy=ddp checkpointing=selective checkpointing.saved_products=every_second",
            {"mode": "selective", "selective_ac_option": "op"},
        ),
        ("strategy=ddp train.gradient_clipping=0 train.compile=true", {"max_norm": float("inf"), "enable": True}),
        (
            "strategy=fsdp_full_shard strategy.offload=parameters precision=bf16_mixed",
            {"enable_cpu_offload": True, "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"},
        ),
        (
            f"strategy=fsdp_full_shard {FLOAT8} precision.float8_all_gather=true",
            {
                "converters": ["quantize.linear.float8"],
                "enable_fsdp_float8_all_gather": True,
                "filter_fqns": ["output"],
            },
        ),
        (f"strategy=fsdp_full_shard {FLOAT8} precision.recipe=rowwise", {"recipe_name": "rowwise"}),
    ],
)
def test_torchtitan_is_given_the_layout(overrides: str, expected: dict[str, Any]) -> None:
    run = small(overrides)
    assert refusals(run, "torchtitan") == []
    check_file(run, "torchtitan")
    settings = {key: value for _, keys in sections(parsed(run, "torchtitan")) for key, value in keys.items()}
    assert expected.items() <= settings.items()


@pytest.mark.parametrize("strategy", ["pp_gpipe", "pp_1f1b", "pp_interleaved", "pp_zero_bubble"])
def test_torchtitan_is_given_the_stages_of_a_pipeline(strategy: str) -> None:
    """The modules of every stage are named, and torch finds the schedule by its name."""
    run = small(f"strategy={strategy} strategy.pp=2 world_size=2")
    settings = parsed(run, "torchtitan")
    stages = settings["parallelism"]["module_fqns_per_model_part"]
    assert len(stages) == run.layout.num_stages
    assert [module for stage in stages for module in stage] == [
        "tok_embeddings",
        *(f"layers.{layer}" for layer in range(4)),
        "norm",
        "output",
    ]
    assert get_schedule_class(settings["parallelism"]["pipeline_parallel_schedule"]) is SCHEDULES[run.layout.schedule]
    assert settings["training"]["local_batch_size"] == run.micro_batches == 16


@pytest.mark.parametrize("model", ["tiny", "1b", "7b", "8b", "70b", "405b", "mistral_7b"])
def test_torchtitan_is_given_the_sizes_of_the_model(model: str) -> None:
    """The lines of the file's head make the inner size of the MLP by the rule of torchtitan 0.2.1 (FeedForward)."""
    run = planned("strategy=fsdp_full_shard", *SMALL[1:], f"model={model}", "train.micro_batch=1")
    text = file_text(run, "torchtitan.toml")
    lines = [line[6:] for line in text.splitlines() if line == "#" or line.startswith("#     ")]
    (assignment,) = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.Assign)]
    models: dict[str, dict[str, Any]] = {}
    names = {"llama3_args": models, "TransformerModelArgs": dict, "RoPEScalingArgs": dict}
    exec(compile(ast.Module([assignment], []), "run_sizes.py", "exec"), names)
    sizes = models[tomllib.loads(text)["model"]["flavor"]]
    inner = int(sizes["ffn_dim_multiplier"] * int(2 * (4 * sizes["dim"]) / 3))
    assert sizes["multiple_of"] * -(-inner // sizes["multiple_of"]) == run.config.model.intermediate_size
    assert sizes["rope_scaling_args"] == {"scaling_factor": 1.0}


def arguments_of(run: RecordedRun) -> transformers.TrainingArguments:
    """Return the real TrainingArguments of a run, without DeepSpeed, which would change this process."""
    code = file_text(run, "trainer_arguments.py")
    names: dict[str, Any] = {"__file__": "trainer_arguments.py"}
    exec(compile(code, "trainer_arguments.py", "exec"), names)
    arguments = {key: value for key, value in names["ARGUMENTS"].items() if key != "deepspeed"}
    return transformers.TrainingArguments(use_cpu=True, **arguments)


def test_the_trainer_takes_the_layout() -> None:
    """Its own class, which refuses unknown arguments, resolves them."""
    run = small("strategy=fsdp_hybrid_shard strategy.dp_replicate=2 strategy.cp=2 checkpointing=selective")
    arguments = arguments_of(run)
    assert arguments.fsdp_plugin_args["fsdp_version"] == 2 and arguments.fsdp_plugin_args["reshard_after_forward"]
    sizes = arguments.parallelism_config
    assert (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.cp_size) == (2, 2, 2)
    assert arguments.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert arguments.gradient_checkpointing_kwargs["context_fn"]
    plain = arguments_of(small("strategy=fsdp_shard_grad_op train.fused_optimizer=false"))
    assert not plain.fsdp_plugin_args["reshard_after_forward"] and plain.parallelism_config is None
    assert (plain.optim, plain.lr_scheduler_type, plain.adam_beta2) == ("adamw_torch", "constant", 0.95)
    assert (plain.bf16, plain.warmup_steps, plain.gradient_checkpointing) == (False, 0, False)
    assert arguments_of(small("strategy=fsdp_shard_grad_op precision=bf16_mixed precision.reduce=bfloat16")).bf16


def test_the_trainer_reduces_in_16_bit_as_the_refusal_says() -> None:
    """Accelerate gives all of fully_shard's dtypes the width of mixed precision; no argument has others."""
    arguments = arguments_of(small("strategy=fsdp_full_shard precision=bf16_mixed precision.reduce=bfloat16"))
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    plugin.set_mixed_precision(arguments.mixed_precision)
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16
    assert (
        "reduces gradients of precision=bf16_mixed in bfloat16"
        in refusals(small("strategy=fsdp_full_shard precision=bf16_mixed"), "trainer")[0]
    )


def test_the_trainer_makes_no_groups_beside_adapters_as_the_refusal_says() -> None:
    """The Trainer replaces the policy by which Accelerate finds layers by peft's, which Accelerate does not read."""
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    plain = transformers.LlamaForCausalLM(config)
    arguments = arguments_of(small("strategy=fsdp_full_shard"))
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    assert fsdp2_prepare_auto_wrap_policy(plugin, plain) is not None
    model = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj"]))
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    update_fsdp_plugin_peft(model, accelerator)
    assert fsdp2_prepare_auto_wrap_policy(plugin, model) is None


def test_a_model_of_the_user_needs_no_decoder_of_this_project() -> None:
    """The Trainer takes dropout and other layers, with DeepSpeed's file beside its own."""
    run = small("strategy=zero2 model=gpt_tiny model.dropout=0.1")
    assert refusals(run, "train") and not refusals(run, "trainer")
    check_file(run, "trainer")
    assert "MODEL" not in file_text(run, "trainer_arguments.py")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("strategy=ddp", {"bf16": False, "ddp_broadcast_buffers": False, "ddp_find_unused_parameters": False}),
        ("strategy=zero2 precision=bf16_mixed", {"bf16": True, "deepspeed": "deepspeed.json"}),
        (
            "strategy=ddp adapter=lora",
            {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True, "lora_qkv_kernel": False},
        ),
        (
            "strategy=ddp adapter=lora model.adapter.target_modules=[v_proj,q_proj]",
            {"lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0},
        ),
        (
            "strategy=fsdp_hybrid_shard strategy.dp_replicate=2 precision=bf16",
            {"bf16": True, "fsdp_version": 2, "dp_shard_size": 4, "dp_replicate_size": 2},
        ),
        ("strategy=fsdp_shard_grad_op checkpointing=full", {"gradient_checkpointing": True, "adam_epsilon": 1e-8}),
        (
            "strategy=zero3_tuned checkpointing=full checkpointing.offload_activations=true",
            {"activation_offloading": "hidden_states"},
        ),
    ],
)
def test_axolotl_is_given_the_layout(overrides: str, expected: dict[str, Any]) -> None:
    run = small(overrides)
    assert refusals(run, "axolotl") == []
    check_file(run, "axolotl")
    settings = parsed(run, "axolotl")
    assert expected.items() <= settings.items()
    if "fsdp_config" in settings:
        assert settings["fsdp_config"]["reshard_after_forward"] == (run.layout.zero_stage == 3)


def test_axolotl_saves_what_the_run_saves() -> None:
    """The names of operators are torch's, by which axolotl compares them."""
    settings = parsed(small("strategy=ddp checkpointing=selective"), "axolotl")
    saved = settings["selective_checkpointing"]["save"]
    assert {torch.ops.aten.mm.default.name(), torch.ops.aten.addmm.default.name()} <= set(saved)


@pytest.mark.parametrize(
    ("kind", "overrides", "change"),
    [
        ("torchtitan", "strategy=ddp precision=bf16_mixed", "precision=fp32"),
        ("torchtitan", "strategy=tp strategy.tp=2 world_size=2", "strategy.sequence_parallel=true"),
        ("torchtitan", "strategy=cp", "strategy=fsdp_full_shard"),
        ("torchtitan", "strategy=ddp_pp", "strategy=fsdp_full_shard"),
        ("torchtitan", "strategy=fsdp_no_shard", "strategy=ddp"),
        ("torchtitan", "strategy=zero1_torch", "strategy=fsdp_shard_grad_op"),
        ("torchtitan", "strategy=ddp checkpointing=attention", "checkpointing=full"),
        ("torchtitan", "strategy=pp_1f1b strategy.pp=2 world_size=2 checkpointing=every_n", "checkpointing=full"),
        ("torchtitan", "strategy=pp_zero_bubble strategy.pp=2 world_size=2 checkpointing=full", "checkpointing=none"),
        (
            "torchtitan",
            "strategy=ddp checkpointing=full checkpointing.offload_activations=true",
            "checkpointing.offload_activations=false",
        ),
        ("torchtitan", "strategy=ddp train.loss_chunks=2", "train.loss_chunks=1"),
        ("torchtitan", "strategy=ddp model=gpt_tiny", "model=7b"),
        ("torchtitan", "strategy=ddp model.attention=eager", "model.attention=flash"),
        ("torchtitan", "strategy=ddp adapter=lora", "adapter=none"),
        ("torchtitan", "strategy=fsdp_full_shard precision=bf16", "precision=bf16_mixed"),
        *(
            (kind, f"strategy=fsdp_full_shard strategy.cp=2 {ULYSSES}", "strategy.context_parallel=gather")
            for kind in ("torchtitan", "trainer", "axolotl")
        ),
        (
            "torchtitan",
            f"{SEQUENCE} {FLOAT8} {FOUR_HEADS}",
            "precision.recipe=rowwise",
        ),
        ("trainer", f"strategy=zero2 {FLOAT8}", "precision=bf16_mixed precision.recipe=none"),
        ("axolotl", f"strategy=zero2 {FLOAT8}", "precision=bf16_mixed precision.recipe=none"),
        ("trainer", "strategy=ddp precision=bf16_mixed", "precision=fp32"),
        ("trainer", "strategy=ddp checkpointing=every_n", "checkpointing=full"),
        ("trainer", "strategy=zero3 checkpointing=selective", "checkpointing=full"),
        ("trainer", "strategy=ddp checkpointing.offload_activations=true", "checkpointing=full"),
        ("trainer", "strategy=ddp train.compile=true", "train.compile=false"),
        ("trainer", "strategy=cp", "strategy.data_parallel=fsdp strategy.zero_stage=3"),
        (
            "trainer",
            "strategy=fsdp_full_shard strategy.cp=2 strategy.dp_replicate=-1 strategy.dp_shard=1",
            "strategy.dp_replicate=1 strategy.dp_shard=-1",
        ),
        ("trainer", "strategy=fsdp_full_shard strategy.offload=parameters", "strategy.offload=none"),
        ("trainer", "strategy=fsdp_full_shard adapter=lora", "strategy=zero2"),
        ("trainer", "strategy=zero1_torch", "strategy=zero1"),
        ("trainer", "strategy=zero1 precision=bf16_mixed", "strategy=zero2"),
        ("axolotl", "strategy=ddp precision=bf16", "precision=fp32"),
        ("axolotl", "strategy=fsdp_full_shard adapter=lora", "strategy=zero2"),
        ("axolotl", "strategy=fsdp_full_shard precision=bf16_mixed", "precision=bf16"),
        ("axolotl", "strategy=fsdp_full_shard strategy.cp=2", "strategy.cp=1"),
        (
            "accelerate",
            f"strategy=fsdp_full_shard strategy.cp=2 {ULYSSES}",
            "strategy.tp=1 strategy.cp=1 strategy.context_parallel=gather",
        ),
        (
            "axolotl",
            "strategy=fsdp_full_shard strategy.cp=2 strategy.dp_replicate=-1 strategy.dp_shard=1",
            "strategy.cp=1 strategy.dp_replicate=1 strategy.dp_shard=-1",
        ),
        (
            "axolotl",
            "strategy=ddp checkpointing=selective checkpointing.saved_products=every_second",
            "checkpointing.saved_products=all",
        ),
    ],
)
def test_what_a_format_cannot_say_is_refused_with_the_nearest_change(kind: str, overrides: str, change: str) -> None:
    """After this change the reason is gone; another one may follow, and in the end the file is written."""
    settings = overrides
    reason, *_ = refusals(small(settings), kind)
    assert nearest_change(reason) == change.split()
    settings = f"{settings} {change}"
    while reasons := refusals(small(settings), kind):
        assert reasons[0] != reason
        settings = f"{settings} {' '.join(nearest_change(reasons[0]))}"
    run = small(settings)
    file_text(run, next(name for name, of in FILES.items() if of == kind))
    if kind == "trainer":
        arguments_of(run)


# The user's part of a training by the Trainer: the run's initial values and batches, on CPUs.
TRAINER = """
import os, sys
from pathlib import Path
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
import transformers
import trainer_arguments
from trainer_arguments import ARGUMENTS, MODEL
from harness.export.runtime import Batches, initial_value, read_run_spec

run = read_run_spec(Path(sys.argv[1]))
config, device = run.config, torch.device("cpu")
ranks = [Batches(run.corpus, config, run.layout, rank, device) for rank in range(run.layout.dp)]
batches = (batch for step in range(config.train.total_steps) for rank in ranks for batch in rank(step))
pairs = (pair for batch in batches for pair in zip(*batch))
data = [{"input_ids": inputs, "labels": targets, "shift_labels": targets} for inputs, targets in pairs]
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL, attn_implementation="sdpa"))
if hasattr(trainer_arguments, "LORA"):
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(**trainer_arguments.LORA), autocast_adapter_dtype=False)

def value(name, parameter):
    shape = getattr(parameter, "ds_shape", parameter.shape)
    own_name = name.removeprefix("base_model.model.").removeprefix("model.")
    return initial_value(own_name, shape, config.model, config.train.seed, device)

for name, parameter in model.named_parameters():
    parameter.data = value(name, parameter)
if "deepspeed" in ARGUMENTS:
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

class Masters(transformers.TrainerCallback):
    def on_train_begin(self, *arguments, **keywords):
        if "deepspeed" in ARGUMENTS and ARGUMENTS["bf16"]:
            for name, parameter in trainer.model_wrapped.module.named_parameters():
                safe_set_full_fp32_param(parameter, value(name, parameter))

arguments = transformers.TrainingArguments(
    "trained", use_cpu=True, ddp_backend="gloo", train_sampling_strategy="sequential", save_strategy="no",
    remove_unused_columns=False, **ARGUMENTS,
)
collator = transformers.default_data_collator
trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collator, callbacks=[Masters()])
trainer.train()
if trainer.is_world_process_zero():
    print(f"\\nlosses {[entry['loss'] for entry in trainer.state.log_history if 'loss' in entry]}", flush=True)
torch.distributed.destroy_process_group()
os._exit(0)
"""


def losses(directory: Path) -> list[float]:
    """Return the losses of a run's exported arguments in the Trainer on two CPU processes."""
    folder = directory / "export"
    (folder / "mine.py").write_text(TRAINER)
    text = output(folder, ("torchrun", "--standalone", "--nproc-per-node=2", "mine.py", str(directory)))
    return json.loads(text.partition("\nlosses ")[2].splitlines()[0])


@pytest.mark.parametrize(
    "overrides",
    [
        "strategy=ddp checkpointing=selective",
        long("strategy=ddp adapter=lora model.adapter.r=4 model.adapter.target_modules=[q_proj,v_proj]"),
        long("strategy=ddp checkpointing=selective checkpointing.saved_products=every_second"),
        long("strategy=zero1"),
        long("strategy=zero2 precision=bf16_mixed checkpointing=full"),
        long("strategy=zero3_tuned strategy.offload=optimizer precision=bf16_mixed"),
    ],
)
def test_the_trainer_has_the_losses_of_the_run(results: Path, overrides: str) -> None:
    """Without weight decay, which the Trainer applies to fewer parameters."""
    directory = exported(results, f"{overrides} train.weight_decay=0")
    bound = 1e-3 if "bf16" in overrides else 1e-5
    assert losses(directory) == pytest.approx(of_the_run(directory), rel=bound)


@pytest.mark.long
def test_an_argument_that_is_lost_trains_otherwise(results: Path) -> None:
    directory = exported(results, "strategy=ddp checkpointing=full train.weight_decay=0")
    path = directory / "export" / "trainer_arguments.py"
    path.write_text(re.sub(r"^    adam_beta2=.*\n", "", path.read_text(), flags=re.MULTILINE))
    assert losses(directory) != pytest.approx(of_the_run(directory), rel=1e-5)
