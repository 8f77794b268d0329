"""DeepSpeed on real ranks over gloo, where its options and layouts are unusual, and the options that it refuses."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from harness.engines.base import load_engine
from harness.engines.deepspeed.compatibility import FLAGS, SIZES
from harness.engines.torch.compatibility import DDP_FLAGS, DDP_SIZES
from harness.hardware.machine import Machine
from harness.layout.layout import resolve_layout
from harness.worker import main as worker_main
from tests.support import row_invariants
from tests.support.commands import compose_config, run_folder, run_with

# The gradients of a step fill several of these buckets, and some of the buckets end inside a parameter.
SMALL_BUCKETS = "strategy.options.reduce_bucket_size=20000 train.gradient_clipping=0.1"


def extensions(run_dir: Path) -> Path:
    """Return the folder in which torch compiles operators, if any rank needs one."""
    return run_dir / "extensions"


def train(run_dir: str) -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions(Path(run_dir)))
    worker_main.main(run_dir)


@pytest.mark.parametrize(
    "overrides",
    [
        f"strategy=zero1 model.tie_word_embeddings=true {SMALL_BUCKETS}",
        f"strategy=zero2 {SMALL_BUCKETS}",
        f"strategy=zero3 model.tie_word_embeddings=true {SMALL_BUCKETS}",
        "strategy=zero2 precision=bf16_mixed strategy.options.reduce_bucket_size=1000",
        "strategy=zero1_defaults precision=bf16_mixed",
    ],
)
def test_unusual_buckets_and_tied_weights_are_proven(results: Path, overrides: str) -> None:
    record = run_with(results, train, *overrides.split())
    assert (record.status, record.row["reason"]) == ("ok", "")
    folder = run_folder(results, record)
    assert not extensions(folder.path).exists()
    row_invariants.check_memory(record.row, folder.read_rank_reports(2))
    row_invariants.check_bytes(record)


MACHINE = Machine("cpu", "cpu", nodes=1, ranks_per_node=2, devices=0, free_bytes=(2**34,), cores=2)


def refusals(strategy: str, **changes: Any) -> list[str]:
    """Return why an engine does not support a strategy with these changes on two ranks."""
    config = compose_config(f"strategy={strategy}", "world_size=2")
    changed = dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, **changes))
    layout = resolve_layout(changed.strategy, 2)
    return list(load_engine(layout.engine).unsupported(changed, layout, MACHINE))


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        ({"dp_replicate": 2, "dp_shard": 1}, "dp_replicate=2", "choose 1, and -1 for strategy.dp_shard"),
        ({"zero_stage": 0}, "zero_stage=0", "choose 1, 2 or 3"),
        ({"dp_shard": 1, "cp": 2}, "cp=2", "choose 1"),
        (
            {"options": {"reduce_scater": True}},
            "options.reduce_scater=True",
            f"choose among {', '.join(sorted({*FLAGS, *SIZES}))}",
        ),
        ({"options": {"stage": 3}}, "options.stage=3", f"choose among {', '.join(sorted({*FLAGS, *SIZES}))}"),
    ],
)
def test_unsupported_strategies_are_refused(changes: dict[str, Any], key: str, remedy: str) -> None:
    assert refusals("zero2", **changes) == [f"strategy.{key} is not supported by strategy.engine=deepspeed: {remedy}"]


def test_supported_options_are_deepspeeds_own() -> None:
    types = {field.alias or name: field.annotation for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert {types[name] for name in FLAGS} == {bool, bool | None}
    assert {types[name] for name in SIZES} == {int}
    DeepSpeedZeroConfig.model_validate(SIZES)


@pytest.mark.parametrize("value", ("auto", "true", [1], {"a": 1}, None, -1, 0.5, float("inf"), True, 5e8, 0, 1))
@pytest.mark.parametrize(
    ("strategy", "engine", "names"),
    [
        ("zero2", "deepspeed", (*FLAGS, *SIZES)),
        ("ddp", "torch", (*DDP_FLAGS, *DDP_SIZES)),
        ("ddp", "accelerate", (*DDP_FLAGS, *DDP_SIZES)),
    ],
)
def test_an_option_is_refused_in_one_line_or_is_what_the_library_reads(
    strategy: str, engine: str, names: tuple[str, ...], value: Any
) -> None:
    """DeepSpeed's "auto" is a word of transformers alone, and stands in most of its files."""
    for name in names:
        problems = refusals(strategy, engine=engine, options={name: value})
        least = (SIZES | DDP_SIZES).get(name)
        numbers = [number for number in (0, 1, 5e8) if least is not None and number >= least]
        fits = value is True if least is None else value is not True and value in numbers
        assert len(problems) == (not fits)
        assert all(problem.startswith(f"strategy.options.{name}={value} is ") for problem in problems)
