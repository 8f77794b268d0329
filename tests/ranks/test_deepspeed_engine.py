"""DeepSpeed and Accelerate on real ranks over gloo: unusual layouts, tensor-parallel layers, and options."""

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from harness.config.schema import RunConfig
from harness.engines import accelerate as accelerate_engine
from harness.engines.base import load_engine
from harness.engines.deepspeed import state
from harness.engines.deepspeed.compatibility import FLAGS, QUANTIZED, SIZES
from harness.engines.deepspeed.shards import ParamSlice
from harness.engines.torch.compatibility import DDP_FLAGS, DDP_SIZES
from harness.hardware.machine import Machine
from harness.launcher.launch import launch
from harness.layout.layout import resolve_layout
from harness.layout.model_profile import model_profile, parameter_count
from harness.proof.layout import _overlap, box_numel
from harness.records.schema import Record
from harness.worker import main as worker_main
from tests.support import accelerate_entries, row_invariants
from tests.support.commands import (
    SMALL,
    Entry,
    assert_ok,
    compose_config,
    compose_layout,
    long,
    read_rows,
    run_folder,
    run_with,
)
from tests.support.processes import ROOT, run_python


def test_without_deepspeed_its_strategies_are_refused_and_the_others_run(tmp_path: Path) -> None:
    """Every process of the command fails to import it, with the libraries that look for it themselves."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    overrides = ("strategy=ddp,zero2", "strategy.engine=accelerate", "world_size=2", "proof.reference=false", *SMALL)
    command = ("-m", "harness", "-m", *overrides, "name=without", f"results_dir={tmp_path}", "tracking=none")
    done = run_python(ROOT, *command, PYTHONPATH=str(tmp_path))
    trained, refused = read_rows(tmp_path, "without").itertuples()
    assert (trained.status, refused.status) == ("ok", "refused"), done.stderr
    assert "pip install 'training-harness[deepspeed]'" in refused.reason and "Traceback" not in done.stderr


# The gradients of a step fill several of these buckets, and some of the buckets end inside a parameter.
SMALL_BUCKETS = "strategy.options.reduce_bucket_size=20000 train.gradient_clipping=0.1 model.tie_word_embeddings=true"

TWO_LAYERS = "model.num_hidden_layers=2"

TWO = "strategy.tp=2 strategy.vocabulary_parallel=false"

# Two replicas of a model in two parts have ZeRO shards that begin inside the rows of column-parallel matrices.
FOUR_RANKS = "world_size=4 train.gradient_clipping=0.5"

LONG = (
    f"strategy=zero_offload {TWO} checkpointing=full",
    f"strategy=zero2 {TWO} precision=bf16_mixed",
    "strategy=zero1_tp precision=bf16_mixed model.attention=eager",
    f"strategy=zero1_defaults {TWO} precision=bf16_mixed",
    "strategy=zero1_tp strategy.offload=optimizer precision=bf16_mixed",
    "strategy=zero1_tp model.tie_word_embeddings=true checkpointing.offload_activations=true",
)


def extensions(run_dir: Path) -> Path:
    """Return the folder in which torch compiles operators, if any rank needs one."""
    return run_dir / "extensions"


def train(run_dir: str) -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions(Path(run_dir)))
    worker_main.main(run_dir)


@pytest.mark.parametrize(
    "overrides",
    [
        long(f"strategy=zero1 {SMALL_BUCKETS} {TWO_LAYERS}"),
        *(f"strategy={strategy} {SMALL_BUCKETS} {TWO_LAYERS}" for strategy in ("zero2", "zero3")),
        f"strategy=zero2 precision=bf16_mixed strategy.options.reduce_bucket_size=1000 {TWO_LAYERS}",
        f"strategy=zero1_defaults precision=bf16_mixed {TWO_LAYERS}",
        long(f"strategy=zero1_tp {FOUR_RANKS}"),
        *(long(f"{overrides} {FOUR_RANKS}") for overrides in LONG),
    ],
)
def test_an_unusual_layout_is_proven_and_explained(results: Path, overrides: str) -> None:
    record = run_with(results, *overrides.split(), entry=train)
    row, folder = record.row, run_folder(results, record)
    assert_ok(row)
    assert not extensions(folder.path).exists()
    if row["precision"] == "fp32":
        assert row["loss_deviation"] < 1e-5 and row["grad_deviation"] < 1e-4
    assert row["activation_bytes"] == pytest.approx(row["predicted_activation_bytes"], rel=0.03)
    if row["offload"] != "none":  # what goes back and forth is this rank's part of each matrix
        assert row["peak_allocated_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.06)
    row_invariants.check_memory(row, folder.read_rank_reports(row["world_size"]))
    row_invariants.check_bytes(record)


@pytest.mark.parametrize(
    "overrides",
    [
        long(
            "strategy=zero2 precision=bf16_mixed strategy.options.reduce_bucket_size=20000 train.loss_chunks=16"
            " train.seq_len=256 train.global_batch=4 model.hidden_size=256 model.intermediate_size=1024"
        ),
        f"strategy=zero3 precision=bf16 model.vocab_size=65536 train.seq_len=16 train.global_batch=1 {TWO_LAYERS}",
    ],
)
def test_the_peak_of_one_rank_is_planned(results: Path, overrides: str) -> None:
    """Large gradients are kept one after another; and the norm takes a copy in fp64 of a tall vocabulary's.

    On a busy machine gloo's thread frees a matrix late, 0.14 % of the first peak.
    """
    row = run_with(results, "world_size=1", "train.micro_batch=1", *overrides.split()).row
    assert_ok(row)
    assert row["peak_allocated_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=2e-3)


@pytest.mark.parametrize(
    "overrides",
    [
        long("strategy=zero1 precision=bf16"),
        f"strategy=zero1 precision=bf16_mixed train.global_batch=4 {TWO_LAYERS}",
        long(
            "strategy=zero2 precision=fp32 model.tie_word_embeddings=true train.global_batch=4 checkpointing=selective"
        ),
    ],
)
def test_the_peak_of_a_tall_vocabulary_is_planned(results: Path, overrides: str) -> None:
    """A rank copies the gradients that it owns, and a tied matrix has three of them."""
    shape = ["train.micro_batch=1", "train.global_batch=2", "train.seq_len=16", "model.vocab_size=20001"]
    row = run_with(results, "world_size=2", *shape, *overrides.split()).row
    assert_ok(row)
    assert row["peak_allocated_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=1e-3)


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16_mixed", 2)])
def test_offload_buffers_have_the_size_of_a_ranks_part(precision: str, width: int) -> None:
    """On four ranks the embedding is whole and the layers' matrices are halves, and ZeRO divides both by two."""
    config, layout = compose_layout(4, "strategy=zero_offload", *TWO.split(), f"precision={precision}")
    widths = load_engine("deepspeed").state_widths(config, layout)
    shapes = model_profile(config.model).parameter_shapes
    halved = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers") and len(shape) == 2)
    own = parameter_count(config.model) - halved // 2
    table = config.model.vocab_size * config.model.hidden_size
    half_matrix = config.model.intermediate_size * config.model.hidden_size // 2
    assert widths.host_buffer_bytes == width * (max(table, half_matrix) + own // 2)
    whole = dataclasses.replace(layout, tp=1)
    assert load_engine("deepspeed").state_widths(config, whole).host_buffer_bytes > widths.host_buffer_bytes


MACHINE = Machine("cpu", "cpu", nodes=1, ranks_per_node=2, devices=0, free_bytes=(2**34,), cores=2)


def refusals(config: RunConfig, **changes: Any) -> list[str]:
    """Return why an engine does not support a run with these changes of its strategy."""
    changed = dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, **changes))
    layout = resolve_layout(changed.strategy, changed.world_size)
    return list(load_engine(layout.engine).unsupported(changed, layout, MACHINE))


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
    config = compose_config(f"strategy={strategy}", "world_size=2")
    of_any_stage = [name for name in names if name not in QUANTIZED or value is not True]
    for name in of_any_stage:
        problems = refusals(config, engine=engine, options={name: value})
        least = (SIZES | DDP_SIZES).get(name)
        numbers = [number for number in (0, 1, 5e8) if least is not None and number >= least]
        fits = value is True if least is None else value is not True and value in numbers
        assert len(problems) == (not fits)
        assert all(problem.startswith(f"strategy.options.{name}={value} is ") for problem in problems)


@pytest.mark.parametrize("box", [((0, 5), (0, 6)), ((2, 5), (0, 6)), ((0, 5), (0, 3)), ((0, 5), (3, 6))])
def test_a_range_of_a_shard_is_at_most_three_boxes(box: tuple[tuple[int, int], ...]) -> None:
    """Every [start, stop) of the flattened shard belongs exactly where its boxes say."""
    whole = np.arange(30).reshape(5, 6)
    shard = ParamSlice("w", (5, 6), box)
    flat = whole[tuple(slice(*edges) for edges in box)].reshape(-1)
    for start, stop in itertools.combinations(range(flat.size + 1), 2):
        parts = list(shard.boxes(start, stop))
        assert len(parts) <= 3 and [parts[0][0], parts[-1][1]] == [start, stop]
        for first, end, shape, target in parts:
            assert np.array_equal(
                whole.reshape(shape)[tuple(slice(*edges) for edges in target)].reshape(-1), flat[first:end]
            )
        assert sum(box_numel(target) for *_, target in parts) == stop - start


def test_overlapping_boxes_are_detected_in_any_order() -> None:
    apart = [((0, 3), (0, 2)), ((0, 3), (2, 4)), ((3, 4), (0, 4))]
    assert not _overlap(apart)
    assert _overlap([((0, 4), (0, 1)), ((0, 1), (1, 4)), ((3, 4), (0, 4))])  # the first and the last alone


def test_shards_of_a_gradient_are_cached_for_each_buffer() -> None:
    """A profiled step asks for them very often."""
    parameter, flat = torch.zeros(3, 4), torch.zeros(20)
    owned = state.OwnedSlice(parameter, 12, 6, 12, 0, 0)  # the second of two ranks' parts
    slices = {id(parameter): ParamSlice.whole("weight", (3, 4))}
    cache: state.ShardCache = {}
    buffers = flat.narrow(0, 2, 8), flat.narrow(0, 10, 8)
    first, again, another = (state.cached_shards(cache, owned, slices, buffers[at]) for at in (0, 0, 1))
    assert first is again and another is not first
    for (shard,), offset in ((first, 2), (another, 10)):
        assert (shard.box, shard.local.storage_offset(), shard.local.numel()) == (((6, 12),), offset, 6)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fully_shard through Accelerate start on a CPU."""
    monkeypatch.setattr(accelerate_engine, "fsdp_unsupported", lambda *arguments: iter(()))


def run_accelerate(results: Path, entry: Entry, overrides: str) -> Record:
    return run_with(results, "strategy.engine=accelerate", *overrides.split(), entry=entry)


@pytest.mark.parametrize(
    ("entry", "overrides"),
    [
        (worker_main.main, f"strategy=zero1 {TWO_LAYERS}"),
        (accelerate_entries.sharded_on_cpu, f"strategy=fsdp_full_shard {TWO_LAYERS}"),
        *(
            long(entry, overrides)
            for entry, overrides in (
                (worker_main.main, "strategy=zero3"),
                (worker_main.main, "strategy=zero2 checkpointing=full"),
                (worker_main.main, "strategy=zero2 precision=bf16_mixed"),
                (worker_main.main, "strategy=zero3 precision=bf16_mixed"),
                (worker_main.main, "strategy=zero3_defaults"),
                (accelerate_entries.sharded_on_cpu, "strategy=fsdp_shard_grad_op"),
                (
                    accelerate_entries.sharded_on_cpu,
                    "strategy=fsdp_full_shard precision=bf16_mixed checkpointing=full",
                ),
                (accelerate_entries.sharded_on_cpu, "strategy=fsdp_full_shard model=gpt_tiny"),
                (
                    accelerate_entries.sharded_on_cpu,
                    "world_size=4 strategy=fsdp_hybrid_shard strategy.dp_replicate=2",
                ),
            )
        ),
    ],
)
@pytest.mark.usefixtures("allowed")
def test_sharding_through_accelerate_is_proven_on_a_cpu(results: Path, entry: Entry, overrides: str) -> None:
    """DeepSpeed runs there, and Accelerate's own prepare shards over gloo; every proof applies to the row."""
    record = run_accelerate(results, entry, overrides)
    row = record.row
    assert (row["status"], row["reason"], row["engine"]) == ("ok", "", "accelerate")
    assert record.proof["layout"] == "proven"
    bound = 1e-4 if row["precision"] == "fp32" else 0.05
    assert row["loss_deviation"] < bound and row["grad_deviation"] < bound


@pytest.mark.parametrize(
    ("fault", "strategy", "reason"),
    [
        (
            accelerate_entries.sharding_ignored,
            "fsdp_full_shard",
            "Accelerate dropped its plugin for FSDP2",
        ),
        long(
            *(accelerate_entries.one_group, "fsdp_full_shard", "groups of 4 layers, embedding and head"),
        ),
        long(
            *(accelerate_entries.root_left_gathered, "fsdp_full_shard", "Accelerate does not reshard as"),
        ),
        (accelerate_entries.other_stage, "zero2", "Accelerate built DeepSpeed with (stage, ranks,"),
    ],
)
@pytest.mark.usefixtures("allowed")
def test_another_layout_than_configured_is_an_error(results: Path, fault: Entry, strategy: str, reason: str) -> None:
    row = run_accelerate(results, fault, f"strategy={strategy} proof.reference=false").row
    assert row["status"] == "error" and reason in row["reason"]


def test_accelerate_drops_sharding_on_a_cpu(tmp_path: Path) -> None:
    """Accelerate on a CPU makes DistributedDataParallel with all of the model on every rank, so it is refused there."""
    outcome = launch(accelerate_entries.prepare_linear, tmp_path, 2, device="cpu", timeout_seconds=180)
    assert outcome.status == "ok", outcome.reason
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result == {"wrapper": "DistributedDataParallel", "elements": 4 * 4 + 4, "ranks": 2}
