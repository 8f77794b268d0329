"""Every combination of the table, every product of axes, and ten million parameters are proven rows."""

from pathlib import Path

import pytest

from harness.config.command import read_run_config
from harness.cost_model.memory import saved_bytes
from harness.engines import torch as torch_engine
from harness.launcher.forkserver import start_forkserver
from harness.layout.layout import resolve_layout
from harness.records.schema import Record
from tests.support import replayed_faults, row_invariants
from tests.support.combinations import COMBINATIONS, LONG, TWO_LAYERS, Combination, data_parallel
from tests.support.commands import assert_not_proven, assert_ok, compose_config, long, run_folder, run_with
from tests.support.derived import check_derivations

LONG_CASES = [long(combination) for combination in LONG]


@pytest.mark.parametrize("combination", [*COMBINATIONS, *LONG_CASES], ids=str)
def test_every_combination_is_a_proven_row(results: Path, combination: Combination) -> None:
    record = combination.record(results)
    row = record.row
    assert (row["status"], row["reason"], record.proof["layout"]) == ("ok", "", "proven")
    assert record.proof["reference"].startswith("compared with single")
    if row["precision"] == "fp32":
        assert 0 <= row["loss_deviation"] < 1e-4 and row["grad_deviation"] < 1e-4
    if row["precision"] == "fp32" and row["world_size"] > 1 and row["pp"] == 1:
        assert row["grad_deviation"] > 0  # another order of sums: it was compared with the reference, not copied
    ranks = run_folder(results, record).read_rank_reports(row["world_size"])
    row_invariants.check_memory(row, ranks)
    row_invariants.check_bytes(record)
    row_invariants.check_time(row)
    row_invariants.check_steps(run_folder(results, record), record)
    check_derivations(record)


FSDP = "strategy.data_parallel=fsdp"

# Every product that has a name, and some made by overrides, by world size.
PRODUCTS = {
    4: (
        "fsdp_hybrid_shard strategy.dp_replicate=2",
        "fsdp_tp",
        "ddp_pp",
        "fsdp_pp strategy.zero_stage=3 checkpointing=full",
        "tp_pp strategy.sequence_parallel=true precision=bf16_mixed",
        "cp",
    ),
    8: (
        "3d model.num_hidden_layers=2",
        f"cp {FSDP} strategy.zero_stage=3 strategy.cp=2 strategy.tp=2 strategy.sequence_parallel=true strategy.pp=2",
    ),
}

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b strategy.virtual_stages=2", "zero_bubble")

# The rest of the grid: every product by every schedule it has, plain in fp32, under full checkpointing in bf16_mixed.
MORE = [
    f"{product} checkpointing={checkpointing} precision={precision}"
    for product in (
        "fsdp_tp strategy.sequence_parallel=true",
        "fsdp_hybrid_shard strategy.dp_replicate=2 strategy.tp=2",
        f"cp {FSDP} strategy.cp=4 strategy.dp_shard=2 strategy.zero_stage=2",
        "cp strategy.cp=2 strategy.dp_replicate=4",
        *(
            f"{layout} strategy.schedule={schedule}"
            for layout in (
                "tp_pp strategy.pp=4 model.num_hidden_layers=8",
                "3d",
                "3d strategy.dp_replicate=1 strategy.dp_shard=-1 strategy.zero_stage=2",
                "fsdp_pp",
            )
            for schedule in SCHEDULES
        ),
        *(f"ddp_pp strategy.schedule={schedule}" for schedule in SCHEDULES if schedule != "zero_bubble"),
    )
    for checkpointing, precision in (("none", "fp32"), ("full", "bf16_mixed"))
]

# One example at eight ranks of each product that other tests prove at two and four.
WIDE = (
    "zero1_torch",
    "zero_offload",
    "zero1_tp checkpointing=full",
    "zero3 strategy.engine=accelerate precision=bf16_mixed",
    "fsdp_full_shard strategy.offload=parameters checkpointing=every_n",
    "fsdp_hybrid_shard checkpointing.offload_activations=true",
    "fsdp_tp checkpointing=attention precision=bf16",
    "3d model=gpt_tiny checkpointing=selective",
    "tp_pp strategy.pp=4 train.loss_chunks=2 train.fused_optimizer=false precision=fp16_mixed",
    f"cp {FSDP} strategy.zero_stage=2 strategy.dp_shard=2 strategy.cp=4 checkpointing=selective",
)

COMPILED = ("fsdp_hybrid_shard", "fsdp_pp checkpointing=full", "cp", "ddp_pp strategy.schedule=1f1b")

SIZES = ("train.micro_batch=1", "train.global_batch=8", "train.seq_len=32")


def record_of(results: Path, world: int, overrides: str) -> Record:
    start_forkserver("cpu")
    return run_with(results, f"world_size={world}", *SIZES, *f"strategy={overrides}".split())


REPEATED_IN_THE_GRID = ("cp", "tp_pp strategy", "fsdp_hybrid_shard", "fsdp_tp", "ddp_pp", "fsdp_pp")


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        *(
            pytest.param(world, each, marks=[pytest.mark.long] if each.startswith(REPEATED_IN_THE_GRID) else [])
            for world, all_ in PRODUCTS.items()
            for each in all_
        ),
        *(long(8, each) for each in (*MORE, *WIDE)),
    ],
)
def test_a_product_is_proven(results: Path, world: int, overrides: str) -> None:
    """The activations are as planned on every rank, and the parts of memory and volume add up."""
    record = record_of(results, world, overrides)
    row = record.row
    assert_ok(row)
    assert 0 < row["grad_deviation"] < {"fp32": 1e-4, "bf16": 0.2}.get(row["precision"], 0.1)
    ranks, config = run_folder(results, record).read_rank_reports(world), read_run_config(record.config)
    layout = resolve_layout(config.strategy, world)
    for rank in ranks:
        predicted = saved_bytes(config, layout, "cpu", layout.coordinates(rank.rank)["pp"])[0]
        assert rank.profiled.activation_bytes == pytest.approx(predicted, rel=0.03), rank.rank
    if overrides not in WIDE:
        row_invariants.check_memory(row, ranks)
    row_invariants.check_bytes(record)


@pytest.mark.long
@pytest.mark.parametrize("overrides", COMPILED)
def test_a_compiled_product_is_proven(results: Path, overrides: str) -> None:
    row = record_of(results, 4, f"{overrides} train.compile=true").row
    assert (row["status"], row["reason"], row["compile"]) == ("ok", "", True)


def test_a_refused_pair_would_train_something_else(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused pair would run to its end without averaging its gradients, and the proof would make it an error."""
    monkeypatch.setattr(torch_engine, "unsupported", lambda *_: iter(()))
    assert_not_proven(record_of(results, 4, f"ddp_pp strategy.schedule=zero_bubble {TWO_LAYERS}"), "gradient deviates")


ONES = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "pp": 1}


@pytest.mark.parametrize(
    ("overrides", "world", "degrees"),
    [
        ("cp", 8, {"cp": 8}),
        ("fsdp_tp", 8, {"dp_shard": 4, "tp": 2}),
        ("tp_pp", 4, {"tp": 2, "pp": 2}),
        ("3d", 8, {"dp_replicate": 2, "tp": 2, "pp": 2}),
        ("ddp_pp", 8, {"dp_replicate": 4, "pp": 2}),
        ("fsdp_pp", 8, {"dp_shard": 4, "pp": 2}),
        ("fsdp_hybrid_shard", 8, {"dp_replicate": 2, "dp_shard": 4}),
        ("fsdp_hybrid_shard cluster.nodes=4", 16, {"dp_replicate": 4, "dp_shard": 4}),  # it shards inside a node
    ],
)
def test_default_degrees_of_named_strategies(overrides: str, world: int, degrees: dict[str, int]) -> None:
    layout = resolve_layout(compose_config(*f"strategy={overrides}".split()).strategy, world)
    assert {axis: getattr(layout, axis) for axis in ONES} == ONES | degrees


TEN_MILLION = (
    # 11.0 million parameters: most of them in the embedding and the head, whose odd number of rows no world divides.
    *("model.hidden_size=384", "model.intermediate_size=1024", "model.num_hidden_layers=2", "model.vocab_size=10001"),
    *("model.num_attention_heads=6", "model.num_key_value_heads=2"),
    # Four micro-batches on each of two data-parallel ranks, or eight.
    *("train.seq_len=32", "train.global_batch=8", "train.micro_batch=1", "train.steps=1", "train.warmup_steps=1"),
)

# The model that tests of ranks share, of a quarter of a million parameters, and the large one.
OPTIONS = {"0.3M": data_parallel("zero2").options, "11M": TEN_MILLION}


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp_full_shard",
        *(long(strategy) for strategy in ("zero1", "zero2", "zero3", "fsdp_shard_grad_op", "tp")),
    ],
)
def test_ten_million_parameters_are_proven(strategy: str, results: Path) -> None:
    """Bytes are the formula's and its padding exactly, which the odd number of rows of the vocabulary needs."""
    record = Combination(strategy, 2, TEN_MILLION).record(results)
    assert_ok(record.row)
    assert record.row["grad_deviation"] < 2e-5
    for entry in record.traffic:
        assert entry["bytes"] == pytest.approx(entry["padded_bytes"], abs=0.5), entry
        assert entry["formula_bytes"] <= entry["padded_bytes"] < entry["formula_bytes"] * 1.001, entry
    if strategy == "fsdp_full_shard":
        assert any(entry["padded_bytes"] > entry["formula_bytes"] for entry in record.traffic)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        *((strategy, "0.3M") for strategy in ("zero2", "zero3", "fsdp_full_shard")),
        ("fsdp_full_shard", "11M"),
        *(long(strategy, "11M") for strategy in ("zero2", "zero3")),
    ],
)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [(replayed_faults.gathered_once_more, "gather"), (replayed_faults.reduced_once_less, "reduce")],
)
def test_one_small_tensor_too_many_or_too_few_is_an_error(
    fault: replayed_faults.Fault, kind: str, strategy: str, size: str, results: Path
) -> None:
    """A final norm's weight is 384 bytes of a step's millions."""
    problems = replayed_faults.problems_of(results, Combination(strategy, 2, OPTIONS[size]), fault)
    assert any(f"bytes a step along dp_shard {kind}, which is" in problem for problem in problems), problems


@pytest.mark.parametrize("strategy", ["zero1", long("zero2")])
def test_padding_behind_the_last_parameter_is_no_gradient(strategy: str, results: Path) -> None:
    """Five ranks do not divide the elements of this vocabulary, so that DeepSpeed pads the last rank's partition."""
    batch = ("train.global_batch=5", "train.micro_batch=1", "train.seq_len=32", "train.steps=1", "train.warmup_steps=1")
    overrides = (f"strategy={strategy}", "world_size=5", "model.vocab_size=257", TWO_LAYERS, *batch)
    record = run_with(results, *overrides)
    assert_ok(record.row)


def test_rows_that_are_divided_unevenly_and_once_more_are_those_of_their_ranks(results: Path) -> None:
    """Two ranks have 129 and 128 rows of this vocabulary, each in four parts: torch says 31 of the last one."""
    batch = ("train.global_batch=4", "train.micro_batch=1", "train.seq_len=32", "train.steps=1", "train.warmup_steps=1")
    sizes = ("strategy.dp_shard=4", "world_size=8", "model.vocab_size=257", "model.num_hidden_layers=1")
    record = run_with(results, "strategy=fsdp_tp", *sizes, *batch)
    assert_ok(record.row)
