"""Exported files train as the run did: each is started as its user would start it, and its losses equal the run's."""

import ast
import itertools
import json
import math
import re
import statistics
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import DistributedType
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from peft import PeftModel
from safetensors.torch import load_file

from harness.cli.main import main
from harness.config.strategy import DEGREES
from harness.export.runtime import Batches, base_model, initial_value, materialize
from harness.models.build import build_model
from harness.planner.plan import plans
from harness.records.run_folder import read_run_spec
from harness.runner import resolve
from harness.runner.launch_run import write_row
from harness.runner.plan import make_plan
from tests.support.commands import SMALL_BATCH, compose, compose_config, long
from tests.support.exports import RECOMMENDED, exported, of_the_run, output, recorded, settings_of, written

TORCHRUN = ("sh", "torchrun.sh")

ACCELERATE = ("accelerate", "launch", "--config_file", "accelerate.yaml", "train_accelerate.py")


def losses(folder: Path, launch: tuple[str, ...]) -> list[float]:
    """Return the losses of every step as the exported script in a folder prints them."""
    steps = [line.split() for line in output(folder, launch).splitlines() if line.startswith("step ")]
    assert [int(words[1]) for words in steps] == list(range(len(steps)))
    return [float(words[3]) for words in steps]


BY_TORCHRUN = (
    *("strategy=ddp", "strategy=zero1", "strategy=single world_size=1"),
    "strategy=ddp checkpointing=full model=gpt_tiny train.fused_optimizer=false",
    "strategy=zero1_torch",
    "strategy=zero2 checkpointing=every_n",
    *("strategy=zero3", "strategy=zero_offload"),
    "strategy=fsdp_full_shard checkpointing=full",
    "strategy=fsdp_full_shard model.tie_word_embeddings=true",
    "strategy=fsdp_shard_grad_op",
    "strategy=fsdp_no_shard train.gradient_clipping=0",
    "strategy=fsdp_hybrid_shard strategy.dp_replicate=2 world_size=4",
    *("strategy=tp", "strategy=tp model=gpt_tiny"),
    "strategy=tp_sp checkpointing=full",
    "strategy=fsdp_tp world_size=4",
    "strategy=pp_gpipe checkpointing=full",
    *("strategy=pp_interleaved model.tie_word_embeddings=true", "strategy=pp_zero_bubble"),
    *(
        f"strategy={strategy} precision=bf16_mixed"
        for strategy in ("zero1", "zero2", "zero3", "fsdp_full_shard", "ddp")
    ),
    "strategy=zero1 precision=bf16",
    "strategy=fsdp_full_shard precision=fp8_mixed precision.float8_all_gather=true checkpointing=full",
    *(f"strategy={strategy} precision=fp8_mixed precision.recipe=rowwise" for strategy in ("ddp", "zero2")),
    "strategy=tp precision=fp8_mixed model.num_key_value_heads=4",
    "strategy=fsdp_full_shard checkpointing=selective checkpointing.saved_products=every_second",
    "strategy=fsdp_full_shard strategy.offload=parameters",
    "strategy=zero3 checkpointing=selective",
    "strategy=cp checkpointing=attention",
    "strategy=cp_ulysses",
    "strategy=ddp train.compile=true train.loss_chunks=2",
    "strategy=tp_sp model=gpt_tiny",
    *(
        f"strategy={strategy} adapter=lora"
        for strategy in (
            *("single world_size=1", "ddp checkpointing=full model=gpt_tiny", "zero1_torch", "cp checkpointing=full"),
            *("zero1", "zero2 precision=bf16_mixed", "zero3"),
            "ddp checkpointing=selective",
            *("fsdp_full_shard precision=bf16_mixed", "fsdp_shard_grad_op model.tie_word_embeddings=true"),
            "fsdp_hybrid_shard strategy.dp_replicate=2 world_size=4",
        )
    ),
    "strategy=tp_sp strategy.pp=2 precision=bf16_mixed train.loss_chunks=2 world_size=4",
    "strategy=tp_pp model.tie_word_embeddings=true world_size=4",
    *(f"strategy=ddp_pp precision={precision} world_size=4" for precision in ("fp32", "bf16_mixed")),
    "strategy=fsdp_pp strategy.schedule=zero_bubble checkpointing=full world_size=4",
    *("strategy=pp_zbv", "strategy=pp_dualpipev checkpointing=full"),
    *("strategy=fsdp_full_shard strategy.secondary_shards=2 world_size=4", "strategy=zero3_hpz world_size=4"),
    *(
        f"strategy={strategy} model=moe_tiny"
        for strategy in (
            *("ddp", "ep", "zero2 precision=bf16_mixed", "fsdp_full_shard checkpointing=selective", "tp"),
            *("ep precision=bf16_mixed", "fsdp_ep precision=bf16_mixed", "tp_sp precision=bf16_mixed", "pp_1f1b"),
            *("fsdp_ep strategy.tp=2 world_size=4", "ep strategy.pp=2 world_size=4", "ep strategy.cp=2 world_size=4"),
            *(
                "fsdp_ep model.num_experts=2 world_size=4",
                "ep model.shared_expert_intermediate_size=96 model.router_aux_loss_coef=0.01",
                "fsdp_full_shard model.num_experts=1 model.num_experts_per_tok=1 model.norm_topk_prob=false",
            ),
            *("fsdp_ep strategy.dp_replicate=2 world_size=4", "fsdp_ep strategy.zero_stage=2 world_size=4"),
        )
    ),
)

# A CPU shows that fully_shard's file is read and the losses are right, but not that anything is sharded.
BY_ACCELERATE = (
    *("strategy=ddp", "strategy=zero1", "strategy=zero3"),
    *(
        "strategy=zero2 precision=bf16_mixed",
        "strategy=zero2 precision=fp8_mixed",
        "strategy=fsdp_full_shard",
        "strategy=ddp adapter=lora",
    ),
)


@pytest.mark.parametrize(
    ("launch", "overrides"),
    [
        (TORCHRUN, "strategy=pp_1f1b"),
        long(TORCHRUN, "strategy=fsdp_ep model=moe_tiny world_size=4"),
        long(TORCHRUN, "strategy=ddp precision=bf16_mixed adapter=lora"),
        *(long(TORCHRUN, overrides) for overrides in BY_TORCHRUN),
        *(long(ACCELERATE, overrides) for overrides in BY_ACCELERATE),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_an_exported_script_trains_as_the_run_did(results: Path, launch: tuple[str, ...], overrides: str) -> None:
    """In mixed precision compute is in 16 bit over fp32 masters that start from the fp32 values, as in the run."""
    directory = exported(results, overrides)
    bound = 1e-3 if "bf16" in overrides or "fp8" in overrides else 1e-4
    assert losses(directory / "export", launch) == pytest.approx(of_the_run(directory), rel=bound)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        ("ddp", "model = DistributedDataParallel("),
        ("ddp", "torch.nn.utils.clip_grad_norm_("),
        ("fsdp_shard_grad_op", "fully_shard("),
        ("cp", "apply_context_parallel("),
        ("cp_ulysses", "exchange_heads("),
    ],
)
def test_a_script_that_lost_a_line_trains_otherwise(results: Path, strategy: str, lost: str) -> None:
    """The comparison detects ranks that do not synchronize, and gradients that are not clipped."""
    directory = exported(results, f"strategy={strategy} train.micro_batch={8 if strategy.startswith('cp') else 4}")
    lose_line(directory / "export" / "train.py", lost)
    assert losses(directory / "export", TORCHRUN) != pytest.approx(of_the_run(directory), rel=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        "single world_size=1 model.num_hidden_layers=2",
        *(long(each) for each in ("ddp precision=bf16_mixed", "single world_size=1", "fsdp_full_shard", "zero1_torch")),
    ],
)
def test_a_script_saves_its_adapters_for_peft(results: Path, overrides: str) -> None:
    """They are those of the end of the training: with them, the frozen model has the loss of the step that follows."""
    directory = exported(results, f"strategy={overrides} adapter=lora")
    last = len(of_the_run(directory)) - 1
    script = directory / "export" / "train.py"
    script.write_text(re.sub(r"^STEPS = .*$", f"STEPS = {last}", script.read_text(), flags=re.MULTILINE))
    losses(directory / "export", TORCHRUN)
    spec, device = read_run_spec(directory), torch.device("cpu")
    model = base_model(spec.config.model)
    materialize(model, spec.config.model, spec.config.train.seed, device, torch.float32)
    trained = PeftModel.from_pretrained(model, str(directory / "export" / "adapter"))
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:  # names, from which values are drawn, have changed
            parameter.data = initial_value(name, parameter.shape, spec.config.model, spec.config.train.seed, device)
    ranks = (Batches(spec.corpus, spec.config, spec.layout, rank, device) for rank in range(spec.layout.dp))
    with torch.no_grad():
        of_micro_batches = [trained(*batch).item() for batches in ranks for batch in batches(last)]
    bound = 1e-3 if "bf16" in overrides else 1e-5
    assert statistics.mean(of_micro_batches) == pytest.approx(of_the_run(directory)[last], rel=bound)
    saved = load_file(directory / "export" / "adapter" / "adapter_model.safetensors")
    assert saved and all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in saved)


def lose_line(script: Path, lost: str) -> None:
    """Replace the line of a script that begins so."""
    changed, number = re.subn(rf"^( *){re.escape(lost)}.*$", r"\1pass", script.read_text(), flags=re.MULTILINE)
    assert number == 1
    script.write_text(changed)


# Runs a script and prints how often each operator was called. The script itself would end the process.
COUNT = """
import collections, runpy, torch
from torch.utils._python_dispatch import TorchDispatchMode
class Counter(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        counts[str(operator)] += 1
        return operator(*arguments, **(keywords or {}))
counts = collections.Counter()
main = runpy.run_path("train.py", run_name="script")["main"]
with Counter():
    main()
names = ("aten.silu.default", "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.mm.default")
print("counted", *(counts[name] for name in names))
"""

# How often layers run activation function and attention, and how many of their seven products they run again. The last
# product is not needed a second time.
FORWARDS = {
    "none": (1, 1, 0),
    "full": (2, 2, 6),
    "every_n": (1.5, 1.5, 3),
    "attention": (1, 2, 0),
    "selective": (2, 1, 0),
    "selective checkpointing.saved_products=every_second": (2, 1, 3),
}


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", FORWARDS)
def test_a_script_computes_again_what_its_checkpointing_says(results: Path, checkpointing: str) -> None:
    """Without the line that applies it, nothing is computed again, which losses would not tell."""
    folder = written(results, f"strategy=single world_size=1 checkpointing={checkpointing}")
    heads = 4 * 6  # micro-batches of all steps
    layers = 4 * heads
    activation, attention, products = FORWARDS[checkpointing]
    plain = 3 * (7 * layers + heads)  # a forward's product needs two in backward
    assert operator_counts(folder) == [layers * activation, layers * attention, plain + layers * products]
    if checkpointing in ("selective", "full"):
        lose_line(folder / "train.py", "layer.forward = functools.partial(checkpoint")
        assert operator_counts(folder) == [layers, layers, plain]


def operator_counts(folder: Path) -> list[int]:
    """Return how often the script in a folder calls the activation function, attention and products of matrices."""
    (folder / "count.py").write_text(COUNT)
    text = output(folder, ("torchrun", "--standalone", "--nproc-per-node=1", "count.py"))
    return [int(word) for word in text.partition("counted ")[2].split()]


def test_every_recommended_layout_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is exported from its plan, with a script that compiles."""
    assert len(RECOMMENDED) > 30
    for number, row in enumerate(RECOMMENDED):
        folder = tmp_path / str(number)
        assert main(["export", "--plan", *settings_of(row), "--to", str(folder)]) == 0
        assert f"train.py: {folder}/train.py" in capsys.readouterr().out
        compile((folder / "train.py").read_text(), "train.py", "exec")
        spec = read_run_spec(folder)
        assert (spec.layout.world_size, spec.config.precision.name) == (int(row["world_size"]), "bf16_mixed")
        assert (spec.config.checkpointing.name, spec.layout.offload) == (row["checkpointing"], row["offload"])


def small_kinds() -> list[str]:
    """Return the recommended layouts with a degree of 2 for each larger one, and so many ranks, each kind once."""
    kinds = {}
    for row in RECOMMENDED:
        words = [word for word in row["overrides"].split() if not word.startswith("train.")]
        small = [re.sub(r"^(strategy\.(?:tp|cp|pp|dp_replicate|virtual_stages))=\d+$", r"\1=2", word) for word in words]
        degrees = [min(2, int(row[axis])) for axis in DEGREES if axis != "ep"]
        kinds[" ".join([*small, f"world_size={min(8, math.prod(degrees))}"])] = None
    return list(kinds)


@pytest.mark.long
@pytest.mark.parametrize("overrides", small_kinds())
def test_every_kind_of_recommended_layout_trains(results: Path, tmp_path: Path, overrides: str) -> None:
    """A script from the plan of a small model has the losses of a run of one process."""
    directory = recorded(results, "strategy=single world_size=1")
    settings = ("model=tiny", "cluster=8xh100", "precision=bf16_mixed", *SMALL_BATCH, *overrides.split())
    assert main(["export", "--plan", *settings, "--to", str(tmp_path)]) == 0
    assert losses(tmp_path, TORCHRUN) == pytest.approx(of_the_run(directory), rel=1e-3)


def test_a_plan_without_a_strategy_exports_the_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        "model=1b",
        "cluster=8xl40s",
        "train.seq_len=4096",
        "train.global_batch=128",
        "checkpointing=none",
        *("strategy.tp=1", "strategy.cp=1"),
        "plan.simulate=false",
    )
    assert main(["export", "--plan", *settings, "data=synthetic", "--to", str(tmp_path)]) == 0
    (plan,) = plans(settings)
    spec = read_run_spec(tmp_path)
    assert spec.layout == plan.predictions[0].layout
    assert spec.config.train == plan.predictions[0].config.train
    assert capsys.readouterr().err.splitlines() == [plan.predictions[0].label()]
    assert "\n# zero1: 8 ranks, bf16_mixed, checkpointing none.\n" in (tmp_path / "train.py").read_text()


def test_a_file_that_cannot_express_the_run_is_not_written(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file that is left out is one line of output, and its earlier export is removed."""
    directory = recorded(results, "strategy=pp_1f1b")
    (directory / "export").mkdir(exist_ok=True)
    (directory / "export" / "accelerate.yaml").write_text("old")
    assert main(["export", str(directory)]) == 0
    notes = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert notes["accelerate.yaml"].startswith("not written, Accelerate has no pipelines for strategy.pp=2: ")
    assert notes["deepspeed.json"].startswith("not written, strategy=pp_1f1b does not use DeepSpeed")
    assert notes["train.py"] == str(directory.resolve() / "export" / "train.py")
    assert {path.name for path in (directory / "export").iterdir()} == {"train.py", "torchrun.sh", "torchtitan.toml"}


@pytest.mark.parametrize(
    ("overrides", "kind", "expected"),
    [
        ("strategy=ddp", DistributedType.MULTI_GPU, {}),
        (
            "strategy=fsdp_full_shard",
            DistributedType.FSDP,
            {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        ),
        ("strategy=fsdp_shard_grad_op", DistributedType.FSDP, {"fsdp_version": 2, "fsdp_reshard_after_forward": False}),
        ("strategy=zero3", DistributedType.DEEPSPEED, {"deepspeed_config_file": "deepspeed.json"}),
    ],
)
def test_accelerate_reads_the_exported_file(
    results: Path, overrides: str, kind: DistributedType, expected: dict[str, object]
) -> None:
    """Accelerate's own classes, which refuse unknown keys, read the file; the wrapped classes are the model's."""
    values = load_config_from_file(str(written(results, overrides) / "accelerate.yaml"))
    assert isinstance(values, ClusterConfig)
    assert (values.distributed_type, values.num_processes, values.num_machines) == (kind, 2, 1)
    assert values.mixed_precision == (None if kind == DistributedType.DEEPSPEED else "no")
    assert expected.items() <= (values.fsdp_config | values.deepspeed_config).items()
    if kind == DistributedType.FSDP:
        groups = values.fsdp_config["fsdp_transformer_layer_cls_to_wrap"].split(",")
        model = build_model(compose_config(overrides).model)
        modules = itertools.chain(model.layers_by_index().values(), *model.embedding_and_head_groups())
        assert set(groups) == {type(module).__name__ for module in modules if module is not model.norm}


def test_deepspeed_reads_the_exported_file(results: Path) -> None:
    """DeepSpeed's own configuration class, which raises on unknown keys, reads the stage and every option."""
    values = json.loads((written(results, "strategy=zero3 precision=bf16_mixed") / "deepspeed.json").read_text())
    config = compose_config("strategy=zero3")
    read = DeepSpeedZeroConfig(**values["zero_optimization"])
    assert read.stage == 3 and read.param_persistence_threshold == 0
    assert config.strategy.options.items() <= values["zero_optimization"].items()
    assert values["bf16"] == {"enabled": True} and values["data_types"] == {"grad_accum_dtype": "fp32"}
    accumulation = values["gradient_accumulation_steps"]
    assert values["train_batch_size"] == 2 * values["train_micro_batch_size_per_gpu"] * accumulation == 8


def test_no_name_adds_code_to_a_script(results: Path) -> None:
    """The names of a run and of its folder stand in comments of one line; the shell gets numbers alone."""
    planted = 'x"""\nimport planted\n"""\r#\x0b\\N{'
    folder = written(results, "strategy=ddp", f"strategy.name='{planted}'", "name=planted")
    moved = folder.parent.rename(folder.parent.with_name(planted))
    assert main(["export", str(moved), "--to", str(folder)]) == 0
    for script in folder.glob("*.py"):
        code = ast.parse(script.read_text())
        assert "planted" in script.read_text()
        assert "planted" not in [
            name.name for node in ast.walk(code) if isinstance(node, ast.Import) for name in node.names
        ]
    assert "planted" not in (folder / "torchrun.sh").read_text()
    for settings in (
        tomllib.loads((folder / "torchtitan.toml").read_text()),
        yaml.safe_load((folder / "axolotl.yaml").read_text()),
    ):
        assert "planted" not in str(settings | {"model": None})
    assert "planted" in (folder / "torchtitan.toml").read_text() and "planted" in (folder / "axolotl.yaml").read_text()


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        ("strategy=ddp precision=fp16_mixed", "precision=bf16_mixed"),
        ("strategy=tp model=gpt_tiny model.dropout=0.1", "model.dropout=0"),
        ("strategy=zero1_tp strategy.tp=2", "strategy=fsdp_tp"),
        ("strategy=tp adapter=lora", "strategy=fsdp_full_shard"),
    ],
)
def test_a_run_of_which_nothing_is_exported_is_one_line(
    results: Path, overrides: str, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the reason and the nearest change, which can be exported; the exit status is 1."""
    target = written(results, overrides, status=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nothing is written: ") and line.endswith(f": rerun with {change}")
    assert not target.exists()
    written(results, f"{overrides} {change}")


def test_an_error_of_export_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No run, a missing one, one that is not `ok` and a plan without a folder end with status 2, and leave nothing."""
    assert main(["export", str(tmp_path / "nope")]) == 2
    assert main(["export"]) == main(["export", "--plan", "strategy=ddp"]) == 2
    config, command_config = compose(f"results_dir={tmp_path}", "name=refused", "world_size=2", *SMALL_BATCH)
    planned = make_plan(config, resolve.detect_machine(config.cluster), command_config)
    write_row(planned, {"status": "refused", "reason": "it does not fit"})
    assert main(["export", str(planned.folder.path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    first, neither, no_folder, last = printed.err.splitlines()
    assert "is not the folder of a run: choose one" in first and "has status=refused, and only what ran" in last
    assert "the folder of one run, or --plan" in neither and "add --to DIR" in no_folder
    assert not (planned.folder.path / "export").exists()


def test_a_script_in_another_folder_names_the_run(results: Path, tmp_path: Path) -> None:
    directory = recorded(results, "strategy=pp_1f1b")
    assert main(["export", str(directory), "--to", str(tmp_path / "mine")]) == 0
    assert f"read_run_spec(Path('{directory.resolve()}'))" in (tmp_path / "mine" / "train.py").read_text()
