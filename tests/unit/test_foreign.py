"""Configurations of other programs: public examples, the way there and back, and the keys that their programs know."""

import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from accelerate.commands.launch import launch_command_parser
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import example as example_of
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from harness.cli.main import main
from harness.config.mistakes import known_keys
from harness.engines.deepspeed.compatibility import FLAGS, SIZES
from harness.engines.torch.compatibility import DDP_FLAGS, DDP_SIZES
from harness.export.planned_run import plan_run
from harness.export.recorded_run import RecordedRun
from harness.export.script import file_text, refusals
from harness.foreign.overrides import Imported, import_configuration, text_of
from harness.foreign.read import FOLDER, is_known, table
from harness.foreign.rules import GROUPS, WORD
from harness.layout.partition import split_into_stages
from harness.planner.plan import plans
from harness.util.text import UserError
from tests.support.commands import ROOT, compose_config
from tests.support.foreign_options import PROGRAMS, line

EXAMPLES = yaml.safe_load((ROOT / "tests" / "data" / "foreign" / "examples.yaml").read_text())

TABLES = sorted({path.stem for path in FOLDER.glob("*.toml")} - {"derived"})


def example_name(example: dict[str, Any]) -> str:
    return example.get("name") or example["address"].rpartition("/")[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has the files of all examples, some of which name others."""
    for example in EXAMPLES:
        if "name" in example:
            (tmp_path / example["name"]).write_text(example["text"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments_of(example: dict[str, Any]) -> list[str]:
    """Return the arguments of `harness import` for an example."""
    file = [example["name"]] if "name" in example else []
    line = ["--", *shlex.split(example["line"])] if "line" in example else []
    return [*file, *example.get("settings", "").split(), *line]


def imported(example: dict[str, Any]) -> Imported:
    file = Path(example["name"]) if "name" in example else None
    return import_configuration(file, shlex.split(example.get("line", "")), example.get("settings", "").split())


# Those whose memory is checked by hand, one of each kind, are tried at every change.
EXAMPLE_CASES = [
    pytest.param(example, id=example_name(example), marks=() if "state" in example else pytest.mark.long)
    for example in EXAMPLES
]


@pytest.mark.parametrize("example", EXAMPLE_CASES)
def test_a_public_example_is_answered_and_planned(
    example: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", *arguments_of(example)]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "Traceback" not in printed.out
    (command,) = re.findall(r"^harness plan (.+)$", printed.out, re.MULTILINE)
    facts = imported(example).translation.facts  # a preset may have them
    settings = {
        *shlex.split(command),
        *(f"{name.removesuffix('.name')}={text_of(value)}" for name, value in facts.items()),
    }
    assert [word for word in example["words"] if word not in settings] == [], command
    assert [text for text in example.get("says", ()) if text not in printed.out] == [], printed.out
    assert "It cannot be planned" not in printed.out, printed.out
    assert ("which the plan has" in printed.out) == ("precision.accumulate=" in command), printed.out
    (plan,) = plans([*shlex.split(command), "plan.simulate=false"])
    memory = plan.predictions[0].memory
    state = [size / 2**30 for size in (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes)]
    assert state == pytest.approx(example.get("state", state), rel=0.005)


def test_files_of_an_import_are_a_strategy_and_a_sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are found by their name, and a second import changes them only on request."""
    words = ["import", "axolotl_zero3_bf16.json", "model=1b", "world_size=8", "--name", "mine"]
    assert main(words) == 0 and main(words) == 0
    capsys.readouterr()
    (plan,) = plans(["strategy=mine", "model=1b", "cluster=8xh100", "precision=bf16_mixed", "train.global_batch=8"])
    (same,) = plans([*import_configuration(Path("axolotl_zero3_bf16.json"), settings=words[2:4]).words])
    ours, theirs = plan.predictions[0].config.strategy, same.predictions[0].config.strategy
    assert dataclasses.replace(theirs, name="mine") == ours and ours.options["reduce_bucket_size"] == 2048**2
    assert len(plans(["sweeps=mine", "cluster=8xh100", "plan.simulate=false"])) == 6
    assert main([*words, "train.global_batch=128"]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*words, "train.global_batch=128", "--overwrite"]) == 0
    assert main(["import", "axolotl_zero1.json", "--name", "zero1"]) == 2
    assert main(["ls", "strategies"]) == 0 and "Imported from axolotl_zero3_bf16.json" in capsys.readouterr().out


def test_a_foreign_file_is_planned_with_settings_in_the_place_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--from", "llama3_8b.toml", "world_size=8", "train.micro_batch=2", "format=csv"]) == 0
    header, row = (line.split(",") for line in capsys.readouterr().out.splitlines())
    cells = dict(zip(header, row, strict=False))
    assert (cells["model"], cells["micro_batch"], cells["stack"]) == ("8b", "2", "torchtitan")


@pytest.mark.parametrize(("size", "head_dim"), [(64, 64), (128, None)])
def test_heads_of_another_size_are_the_models(size: int, head_dim: int | None) -> None:
    """The fault was a sentence that the size of a head follows from others. The usual size needs no setting."""
    sizes = "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 64 --vocab-size 512"
    line = f"torchrun --nproc_per_node 2 pretrain_gpt.py {sizes} --micro-batch-size 1 --kv-channels {size}"
    (plan,) = plans([*import_configuration(None, shlex.split(line)).words, "plan.simulate=false"])
    assert plan.predictions[0].config.model.head_dim == head_dim


# What the Trainer makes of values that are auto, in a process of its own: it takes over the state of torch.distributed.
FINALIZE = """
import argparse, json, sys, transformers
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
for values, hidden_size in json.loads(sys.argv[1]):
    theirs = HfTrainerDeepSpeedConfig({"zero_optimization": values, "train_batch_size": "auto"})
    model = argparse.Namespace(config=transformers.LlamaConfig(hidden_size=hidden_size, num_attention_heads=8))
    theirs.trainer_config_finalize(transformers.TrainingArguments(use_cpu=True, report_to="none"), model, 10)
    print(json.dumps(theirs.config["zero_optimization"]))
"""


def test_sizes_that_are_auto_are_those_of_transformers() -> None:
    """Its own code computes them from a model."""
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    sizes = {2: 96, 3: 160}  # by stage
    values = [({"stage": stage, **dict.fromkeys(keys, "auto")}, size) for stage, size in sizes.items()]
    command = [sys.executable, "-c", FINALIZE, json.dumps(values)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for (stage, hidden_size), text in zip(sizes.items(), done.stdout.splitlines()[-2:], strict=True):
        theirs = json.loads(text)
        options = [f"+strategy.options.{key}=auto" for key in keys]
        ours = compose_config(
            f"strategy=zero{stage}_defaults",
            f"model.hidden_size={hidden_size}",
            "model.num_attention_heads=2",
            *options,
        )
        assert ours.strategy.options | {"stage": stage} == theirs


# ----- The way there and back ----------------------------------------------------------------------------------------

FORMATS = {
    "deepspeed": "deepspeed.json",
    "accelerate": "accelerate.yaml",
    "torchtitan": "torchtitan.toml",
    "trainer": "trainer_arguments.py",
    "axolotl": "axolotl.yaml",
}

LAYOUTS = (
    *("ddp", "zero1", "zero2", "zero3", "zero1_tuned", "zero2_tuned", "zero3_tuned", "zero2_defaults", "zero_offload"),
    *(
        "fsdp_full_shard",
        "fsdp_shard_grad_op",
        "fsdp_hybrid_shard strategy.dp_replicate=2",
        "fsdp_full_shard strategy.cp=2",
    ),
    *(
        "tp_sp strategy.tp=2 world_size=2",
        "fsdp_tp strategy.sequence_parallel=true",
        "pp_1f1b strategy.pp=4 world_size=4",
        "pp_gpipe strategy.pp=2 world_size=2",
    ),
    *(
        "pp_interleaved strategy.pp=2 world_size=2",
        "pp_zero_bubble strategy.pp=2 world_size=2",
        "tp_sp strategy.tp=2 strategy.pp=4",
    ),
    *("fsdp_full_shard strategy.offload=parameters", "zero3_tuned strategy.offload=parameters"),
)

CHECKPOINTING = (
    *("none", "full", "every_n", "selective", "selective checkpointing.saved_products=every_second"),
    "full checkpointing.offload_activations=true",
)

PRECISIONS = (
    *("fp32", "bf16_mixed", "bf16", "bf16_mixed precision.reduce=bfloat16"),
    *("fp8_mixed precision.recipe=rowwise", "fp8_mixed precision.float8_all_gather=true"),
)

# What the keys of a format say of a run: of the others it has nothing.
BATCH = ("global_batch", "micro_batch")
OPTIMIZER = ("lr", "betas", "eps", "weight_decay", "gradient_clipping", "fused_optimizer", "seed")
SAID = {
    "deepspeed": (*BATCH, "gradient_clipping"),
    "accelerate": (),
    "torchtitan": (*BATCH, *OPTIMIZER, "seq_len", "compile"),
    "trainer": (*BATCH, *OPTIMIZER),
    "axolotl": (*BATCH, *OPTIMIZER, "seq_len"),
}


def planned(*words: str) -> RecordedRun:
    return plan_run(words, Path("nowhere"), lambda line: None)


def differences(run: RecordedRun, kind: str, folder: Path) -> list[str]:
    """Return what of a run changes by its export to a format and the import of that file."""
    for name in {kind, *(("deepspeed",) if run.layout.uses_deepspeed_zero else ())}:
        (folder / FORMATS[name]).write_text(file_text(run, FORMATS[name]))
    world = f"world_size={run.layout.world_size}"
    (plan,) = plans(
        [*import_configuration(folder / FORMATS[kind], settings=[world, "model=tiny"]).words, "plan.simulate=false"]
    )
    back = plan.predictions[0]
    layouts, stages = (
        (run.layout, back.layout),
        (split_into_stages(run.config.model, run.layout), split_into_stages(back.config.model, back.layout)),
    )
    pairs: dict[str, tuple[Any, Any]] = {
        "layout": tuple(dataclasses.replace(layout, layers_per_stage=None) for layout in layouts),
        "stages": stages,
        "options": (run.config.strategy.options, back.config.strategy.options),
    }
    pairs |= {key: (getattr(run.config.train, key), getattr(back.config.train, key)) for key in SAID[kind]}
    if kind != "accelerate" and not (kind == "trainer" and run.config.precision.master == "bfloat16"):
        widths = (
            "compute",
            "master",
            "accumulate",
            "reduce",
            *(("recipe", "float8_all_gather") if kind == "torchtitan" else ()),
        )
        pairs |= {key: (getattr(run.config.precision, key), getattr(back.config.precision, key)) for key in widths}
    if kind not in ("accelerate", "deepspeed"):
        pairs["checkpointing"] = (run.config.checkpointing, back.config.checkpointing)
    return [f"{key}: {before} became {after}" for key, (before, after) in pairs.items() if before != after]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    kind=st.sampled_from(list(FORMATS)),
    layout=st.sampled_from(LAYOUTS),
    checkpointing=st.sampled_from(CHECKPOINTING),
    precision=st.sampled_from(PRECISIONS),
    batch=st.sampled_from((16, 32)),
    train=st.sampled_from(
        ("", "train.lr=1e-4 train.betas=[0.9,0.99]", "train.gradient_clipping=0 train.fused_optimizer=false")
    ),
)
@example_of("torchtitan", "fsdp_full_shard", "none", PRECISIONS[-1], 16, "train.compile=true")
def test_an_exported_file_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    layout: str,
    checkpointing: str,
    precision: str,
    batch: int,
    train: str,
) -> None:
    words = f"strategy={layout} checkpointing={checkpointing} precision={precision} {train}".split()
    words += ["model=tiny", "cluster=8xh100", "data=synthetic", "train.seq_len=64", f"train.global_batch={batch}"]
    try:
        run = planned(*words)
    except UserError:
        assume(False)
    assume(not refusals(run, kind))
    assert differences(run, kind, tmp_path_factory.mktemp("export")) == []


@pytest.mark.long
@pytest.mark.parametrize(("kind", "layout"), list(itertools.product(FORMATS, LAYOUTS)), ids=str)
def test_every_layout_comes_back_as_it_was(tmp_path: Path, kind: str, layout: str) -> None:
    """Where the format has it, in fp32, or in 16 bit where that is all that it has."""
    small = ("model=tiny", "cluster=8xh100", "data=synthetic", "train.seq_len=64", "train.global_batch=16")
    runs = (
        planned(*small, *f"strategy={layout} precision={precision}".split()) for precision in ("fp32", "bf16_mixed")
    )
    written = [run for run in runs if not refusals(run, kind)]
    assert [differences(run, kind, tmp_path) for run in written] == [[] for _ in written]


def test_a_lost_rule_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(
        "model=tiny",
        "cluster=8xh100",
        "data=synthetic",
        "train.seq_len=64",
        "strategy=fsdp_hybrid_shard",
        "strategy.dp_replicate=2",
        "precision=fp32",
        "train.global_batch=16",
    )
    assert differences(run, "torchtitan", tmp_path) == []
    monkeypatch.delitem(table("torchtitan")["rules"], "parallelism.data_parallel_replicate_degree")
    with pytest.raises(UserError, match="world_size=8 is not the product"):
        differences(run, "torchtitan", tmp_path)


# ----- The tables ----------------------------------------------------------------------------------------------------


def words_of(name: str) -> list[str]:
    """Return all words of a table's rules, and of its defaults."""
    rules = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    texts = [text for rule in rules["rules"].values() for text in ([rule] if isinstance(rule, str) else rule.values())]
    return [word for text in (*texts, rules.get("defaults", "")) for word in text.partition("|")[0].split()]


@pytest.mark.parametrize("name", TABLES)
def test_every_rule_leads_to_a_setting(name: str) -> None:
    options = {f"strategy.options.{key}" for key in (*FLAGS, *SIZES, *DDP_FLAGS, *DDP_SIZES)}
    names = {WORD.fullmatch(word)[1].removeprefix("planned.") for word in words_of(name)}
    known = {*known_keys(), *GROUPS, *options, *(f"@{entry}" for entry in TABLES)}
    assert [key for key in sorted(names) if key not in known and not key.startswith("_")] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_row_that_says_other_names_all_further_values(name: str) -> None:
    """A reader takes any value that is not in the row for an other one."""
    rules = {option: rule for option, rule in table(name)["rules"].items() if "*" in rule and isinstance(rule, dict)}
    unnamed = [
        (option, value)
        for option, rule in rules.items()
        for value in rule
        if f"`{value}`" not in line(option, rule) and value != "*"
    ]
    assert rules and unnamed == []


def test_every_fact_is_set_and_used() -> None:
    rules = table("derived")
    texts = [
        *rules["derived"].values(),
        *rules["differences"].values(),
        *rules["notes"].values(),
        *rules["notes"],
        *(entry["when"] for entry in rules["neighbours"]),
    ]
    words = [word for name in TABLES for word in words_of(name)]
    used = set(re.findall(r"\b_[a-z_0-9]+", " ".join(texts)))
    set_by = {key for key in rules["derived"] if key.startswith("_")} | {
        key for word in words if (key := WORD.fullmatch(word)[1].partition(".")[0]).startswith("_")
    }
    assert sorted(used ^ set_by) == []


@pytest.mark.parametrize("name", TABLES)
def test_every_difference_says_what_it_changes(name: str) -> None:
    rules = table(name)["rules"].values()
    texts = [text for rule in rules for text in ([rule] if isinstance(rule, str) else rule.values()) if "|" in text]
    effects = r"(nothing|((memory|speed|numbers)(, (?!:))?)+): .+"
    assert [text for text in texts if not re.fullmatch(effects, text.partition("|")[2].strip())] == []


def known_to_programs() -> dict[str, list[str]]:
    """Return the keys that the programs themselves know, by the table that has to know them."""
    lists = tomllib.loads((ROOT / "tests" / "support" / "trainer_keys.toml").read_text())
    fields = DeepSpeedZeroConfig.model_fields.items()
    launch = [action.dest for action in launch_command_parser()._actions]
    return {
        "deepspeed": [f"zero_optimization.{entry.alias or key}" for key, entry in fields],
        "accelerate": launch,
        "torchrun": [action.dest for action in get_args_parser()._actions],
        "trainer": [entry.name for entry in dataclasses.fields(transformers.TrainingArguments)],
        "torchtitan": [f"{name}.{key}" for name, keys in lists["torchtitan"].items() for key in keys],
        "axolotl": [*lists["axolotl"]["settings"]],
    }


@pytest.mark.parametrize(
    ("name", "keys"), known_to_programs().items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_key_that_a_program_knows_is_in_its_table(name: str, keys: list[str]) -> None:
    rules, others = table(name)["rules"], {"help", "training_script", "training_script_args"}
    unknown = [key for key in keys if not is_known(name, key) and key not in others]
    assert [key for key in unknown if not any(rule.startswith(f"{key}.") for rule in rules)] == []  # a group


# ----- Mistakes ------------------------------------------------------------------------------------------------------

MISTAKES = {
    '{"train_micro_batch_size_per_gpu": "two", "zero_optimization": {}}': "_per_gpu=two is not a whole number",
    '{"zero_optimization": {"stage": 7}}': "zero_optimization.stage=7 is not known: choose 0, 1, 2, 3",
    '{"zero_optimization": {"stage": 2}': "wrong.json is not valid json",
    '{"a": 1}': "wrong.json has no key that is known",
    "[1, 2]": "wrong.json has no keys",
    '{"model_type": "llama", "architectures": []}': "type harness plan model=wrong.json",
}


@pytest.mark.parametrize(("text", "answer"), MISTAKES.items())
def test_a_mistake_in_a_file_is_one_line(
    text: str, answer: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.json").write_text(text)
    assert main(["import", "wrong.json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and answer in printed.err
    assert not Path("conf").exists()


VALUES = (
    0,
    -1,
    2,
    1.5,
    1e30,
    True,
    False,
    "auto",
    "none",
    "",
    "x",
    "8",
    [],
    [1, "a"],
    {},
    {"a": 1},
    "{value}",
    "1e-5",
    "a=b | c",
)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_of_any_key_is_read_or_refused_in_a_line(data: st.DataObject, folder: Path) -> None:
    """In a file, and as options of a launch line."""
    keys = st.sampled_from(list(table(data.draw(st.sampled_from(TABLES)))["rules"]))
    names = [key.replace("*", "x") for key in data.draw(st.lists(keys, min_size=1, max_size=4))]
    values = {name: data.draw(st.sampled_from(VALUES)) for name in names}
    Path("any.json").write_text(json.dumps(values))
    line = ["torchrun", "train.py", *(f"--{name}={value}" for name, value in values.items())]
    for file, words in ((Path("any.json"), []), (None, line), (None, [line[0], *line[2:]])):
        try:
            answers = list(import_configuration(file, words).words)
        except UserError as error:
            answers = [f"refused={error}"]
        assert all("=" in answer and len(answer.splitlines()) == 1 for answer in answers)


def test_values_that_differ_between_file_and_line_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers refuses them."""
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}')
    words = [
        "import",
        "ds.json",
        "--",
        "torchrun",
        "train.py",
        "--deepspeed",
        "ds.json",
        "--per_device_train_batch_size",
        "4",
    ]
    assert main(words) == 2
    assert "per_device_train_batch_size and train_micro_batch_size_per_gpu differ, 4 and 2" in capsys.readouterr().err


OPTIONS = [
    ("zero3_defaults", "+strategy.options.reduce_bucket_size=auto", ""),
    ("zero3_defaults", "strategy.options.reduce_bucket_size=auto", ""),
    ("zero2_defaults", "strategy.options.stage3_prefetch_bucket_size=auto", "is not a whole number of 0 or more"),
    ("zero2_defaults", "strategy.options.reduce_bucket_size=big", "reduce_bucket_size=big is not a whole number"),
    ("zero2_defaults", "strategy.options.reduce_bucket_size=-5", "is not a whole number of 1 or more"),
    ("zero2_defaults", "strategy.options.reduce_bucket_size=[1]", "is not a whole number of 1 or more"),
    ("zero3_defaults", "strategy.options.sub_group_size=big", "is not a whole number of 1 or more"),
    ("zero3_defaults", "strategy.options.stage3_max_live_parameters=big", "is not a whole number of 0 or more"),
    ("zero3_defaults", "strategy.options.offload_param.device=cpu", "offload_param={'device': 'cpu'} is not supported"),
    ("zero2_defaults", "strategy.options={overlap_comm: true, reduce_bucket_size: 1000}", ""),
    ("ddp", "strategy.options={gradient_as_bucket_view: false}", ""),
    ("ddp", "strategy.options.bucket_cap_mb=50", ""),
    ("fsdp_full_shard", "strategy.options={a: {b: 1}}", "apply to strategy.data_parallel=ddp only"),
    ("zero1_torch", "strategy.options.static_graph=true", ""),
    ("ddp", "strategy.options=ds.json", "type harness import ds.json"),
]


@pytest.mark.parametrize(("strategy", "option", "answer"), OPTIONS)
def test_options_are_checked_before_anything_starts(
    strategy: str, option: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["plan", f"strategy={strategy}", option, "model=tiny", "precision=fp32", "cluster=8xh100"])
    printed = capsys.readouterr()
    assert (status, printed.err.count("\n")) == ((2, 1) if answer else (0, 0)), printed
    assert answer in printed.err
