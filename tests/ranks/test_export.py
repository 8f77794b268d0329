"""Exported files train as the run did: each is started as its user would start it, and its losses equal the run's."""

import ast
import itertools
import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from accelerate import DistributedType
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from harness.cli.main import main
from harness.models.build import build_model
from harness.runner import resolve
from harness.runner.launch_run import build_run_spec, write_row
from harness.runner.plan import make_plan
from tests.support.commands import ROOT, SMALL_BATCH, compose, compose_config, long, run_folder, run_with

TORCHRUN = ("sh", "torchrun.sh")

ACCELERATE = ("accelerate", "launch", "--config_file", "accelerate.yaml", "train_accelerate.py")


def recorded(results: Path, overrides: str) -> Path:
    """Return the folder of a run."""
    record = run_with(results, *overrides.split())
    assert (record.status, record.row["reason"]) == ("ok", "")
    return run_folder(results, record).path


def exported(results: Path, overrides: str) -> Path:
    """Return the folder of a run that was exported."""
    directory = recorded(results, overrides)
    assert main(["export", str(directory)]) == 0
    return directory


def losses(directory: Path, launch: tuple[str, ...]) -> list[float]:
    """Return the losses of every step as an exported script prints them."""
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        launch,
        cwd=directory / "export",
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,  # under Accelerate DeepSpeed compiles its collective for inference once
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-4000:]
    steps = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [int(words[1]) for words in steps] == list(range(len(steps)))
    return [float(words[3]) for words in steps]


def of_the_run(directory: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (directory / "steps.jsonl").read_text().splitlines()]


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
    *(f"strategy={strategy} precision=bf16_mixed" for strategy in ("zero2", "zero3", "fsdp_full_shard")),
)

# A CPU shows that fully_shard's file is read and the losses are right, but not that anything is sharded.
BY_ACCELERATE = (
    *("strategy=ddp", "strategy=zero1", "strategy=zero3"),
    *("strategy=zero2 precision=bf16_mixed", "strategy=fsdp_full_shard"),
)


@pytest.mark.parametrize(
    ("launch", "overrides"),
    [
        (TORCHRUN, "strategy=pp_1f1b"),
        *(long(TORCHRUN, overrides) for overrides in BY_TORCHRUN),
        *(long(ACCELERATE, overrides) for overrides in BY_ACCELERATE),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_an_exported_script_trains_as_the_run_did(results: Path, launch: tuple[str, ...], overrides: str) -> None:
    """In mixed precision compute is in 16 bit over fp32 masters that start from the fp32 values, as in the run."""
    directory = exported(results, overrides)
    bound = 1e-3 if "bf16" in overrides else 1e-4
    assert losses(directory, launch) == pytest.approx(of_the_run(directory), rel=bound)


@pytest.mark.long
@pytest.mark.parametrize("lost", ["model = DistributedDataParallel(", "torch.nn.utils.clip_grad_norm_("])
def test_a_script_that_lost_a_line_trains_otherwise(results: Path, lost: str) -> None:
    """The comparison detects ranks that no longer synchronize and gradients that are no longer clipped."""
    directory = exported(results, "strategy=ddp train.micro_batch=4")
    script = directory / "export" / "train.py"
    remaining = [line for line in script.read_text().splitlines(keepends=True) if not line.strip().startswith(lost)]
    script.write_text("".join(remaining))
    assert losses(directory, TORCHRUN) != pytest.approx(of_the_run(directory), rel=1e-4)


def test_a_file_that_cannot_express_the_run_is_not_written(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file that is left out is one line of output, and its earlier export is removed."""
    directory = recorded(results, "strategy=pp_1f1b")
    (directory / "export").mkdir(exist_ok=True)
    (directory / "export" / "accelerate.yaml").write_text("old")
    assert main(["export", str(directory)]) == 0
    notes = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert notes["accelerate.yaml"] == "not written, Accelerate has no pipeline parallelism for training"
    assert notes["deepspeed.json"].startswith("not written, strategy=pp_1f1b is torch's own")
    assert notes["train.py"] == str(directory.resolve() / "export" / "train.py")
    assert {path.name for path in (directory / "export").iterdir()} == {"train.py", "torchrun.sh"}


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


def written(results: Path, overrides: str, *others: str) -> Path:
    """Export a run whose files were left without training it."""
    folder = (f"results_dir={results}", "name=untrained", "proof.reference=false", "world_size=2", *SMALL_BATCH)
    config, command_config = compose(*folder, *overrides.split(), *others)
    planned = make_plan(config, resolve.detect_machine(config.cluster), command_config)
    planned.folder.path.mkdir(parents=True, exist_ok=True)
    spec, _ = build_run_spec(planned)
    spec.write(planned.folder.path)
    write_row(planned, {"status": "ok", "reason": ""})
    assert main(["export", str(planned.folder.path)]) == 0
    return planned.folder.path / "export"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ("strategy=cp", "strategy.cp=2 gathers keys and values"),
        ("strategy=ddp precision=bf16_mixed", "precision=bf16_mixed keeps fp32 masters beside 16-bit copies"),
        ("strategy=zero1 precision=bf16_mixed", "DeepSpeed left to itself runs BF16_Optimizer"),
        ("strategy=ddp checkpointing=selective", "checkpointing=selective is implemented by this project"),
        ("strategy=ddp train.loss_chunks=2", "train.loss_chunks=2 is implemented by this project's output head"),
        ("strategy=tp model.tie_word_embeddings=true", "model.tie_word_embeddings=true is tied again"),
        ("strategy=ddp precision=fp16_mixed", "precision=fp16_mixed is not exported"),
    ],
)
def test_a_script_that_would_train_otherwise_is_not_written(
    results: Path, overrides: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = written(results, overrides)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("train.py: "))
    assert line.startswith("train.py: not written, ") and reason in line
    assert not (target / "train.py").exists() and not (target / "torchrun.sh").exists()


def test_an_error_of_export_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing run and a run that is not `ok` end with exit status 2 and leave nothing on disk."""
    assert main(["export", str(tmp_path / "nope")]) == 2
    config, command_config = compose(f"results_dir={tmp_path}", "name=refused", "world_size=2", *SMALL_BATCH)
    planned = make_plan(config, resolve.detect_machine(config.cluster), command_config)
    write_row(planned, {"status": "refused", "reason": "it does not fit"})
    assert main(["export", str(planned.folder.path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    first, second = printed.err.splitlines()
    assert "is not the folder of a run: choose one" in first and "has status=refused, and only what ran" in second
    assert not (planned.folder.path / "export").exists()


def test_a_script_in_another_folder_names_the_run(results: Path, tmp_path: Path) -> None:
    directory = recorded(results, "strategy=pp_1f1b")
    assert main(["export", str(directory), "--to", str(tmp_path / "mine")]) == 0
    assert f"read_run_spec(Path('{directory.resolve()}'))" in (tmp_path / "mine" / "train.py").read_text()
