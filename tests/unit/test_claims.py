"""The literature beside measurements: every kind of claim on figures of real runs, and activations by micro-batch."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from jinja2 import meta
from markdown_it import MarkdownIt

from harness.config.schema import RunConfig
from harness.cost_model.flops import executed_flops
from harness.cost_model.pipeline import bubble_ratio
from harness.layout.layout import Layout, resolve_layout
from harness.metrics.derivations import DERIVATIONS
from harness.metrics.formulas import ENVIRONMENT
from harness.records.columns import COLUMN_TYPES
from harness.records.schema import Record
from harness.report import markdown
from harness.report.batches import batches
from harness.report.claim_peers import TABLE, Claim
from harness.report.claims import claims, literature
from harness.report.document import Section
from harness.report.lines import lines_of
from harness.report.view import View
from harness.runner.config_columns import config_columns
from tests.support.commands import compose, compose_config

N = 455520  # parameters of the tiny model

HOSTILE = "<script>alert(1)</script> | **b** [l](http://x) `c`\n# h"

# Bytes as measured on CPU with the tiny model at two ranks in fp32, micro-batches of one sequence: parameters,
# gradients, optimizer, activations, sent. DeepSpeed's optimizer is without its fp32 masters, as the paper counts.
MEASURED = {
    "single": (4 * N, 4 * N, 8 * N, 4190788, 0),
    "ddp": (4 * N, 4 * N, 8 * N, 4186660, 1822080),
    "zero1": (4 * N, 4 * N, 4 * N, 4186660, 1822084),
    "zero2": (4 * N, 2 * N, 4 * N, 4186660, 4555204),
    "zero3": (2 * N, 2 * N, 4 * N, 4186660, 10932488),
    "fsdp_full_shard": (2 * N, 2 * N, 4 * N, 4186660, 10981828),
    "tp": (912768, 912768, 1825536, 2778820, 7090180),
    "tp_sp": (912768, 912768, 1825536, 2334148, 7093636),
    "pp_gpipe": (911232, 911232, 1822464, 17952800, 393224),
    "pp_1f1b": (911232, 911232, 1822464, 3936256, 393224),
    "pp_interleaved": (911232, 911232, 1822464, 4979712, 1179656),
    "pp_zero_bubble": (911232, 911232, 1822464, 4363268, 393224),
}

CHECKPOINTED = {"ddp": 1145888, "tp_sp": 633472, "pp_zero_bubble": 2055168}  # activations

IN_FLIGHT = {"pp_gpipe": 8, "pp_1f1b": 2, "pp_interleaved": 5, "pp_zero_bubble": 2}

COLUMNS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "communication_bytes")


@cache
def run_of(*overrides: str) -> tuple[RunConfig, Layout]:
    config = compose_config(*overrides)
    return config, resolve_layout(config.strategy, config.world_size or 2)


def record_of(strategy: str, /, *overrides: str, **columns: Any) -> Record:
    config, layout = run_of(f"strategy={strategy}", *overrides)
    row = config_columns(config, layout) | {
        **dict(zip(COLUMNS, MEASURED.get(strategy, (None,) * 5), strict=True)),
        "run_id": f"{strategy}-{'-'.join(overrides)}",
        "status": "ok",
        "measured_on": "cpu",
        "max_in_flight_micro_batches": IN_FLIGHT.get(strategy, 1),
        "executed_flops": executed_flops(config, layout),
        "tokens_per_second": 1000.0,
        "step_seconds_iqr_ratio": 0.05,
    }
    if layout.pp > 1:
        formula = bubble_ratio(layout, layout.grad_accumulation_steps(config.train))
        row |= {"pipeline_bubble": 1.1 * formula, "pipeline_bubble_theory": formula}
    row |= {"predicted_activation_bytes": row["activation_bytes"]}
    return Record.from_json({"row": row | columns, "config": config.to_dict(), "layout": layout.to_dict()})


def sweep() -> list[Record]:
    """Return the rows as measured except for bubbles, which on a CPU's shared cores are far from the formula."""
    plain = [record_of(strategy) for strategy in MEASURED]
    full = [
        record_of(strategy, "checkpointing=full", activation_bytes=size, predicted_activation_bytes=size)
        for strategy, size in CHECKPOINTED.items()
    ]
    return plain + full


def claims_on(records: list[Record]) -> list[Claim]:
    return claims(lines_of(records))


def claim_of(claims: list[Claim], label: str, words: str) -> Claim:
    (claim,) = [claim for claim in claims if claim.label == label and claim.claim.startswith(words)]
    return claim


# The label, the claim's first words, the literature's figure at two ranks, a part of its limit, and the columns of the
# row and of the peer whose ratio is compared with that figure.
EXPECTED = [
    ("zero1", "model state", 16 / 12, "2× as N grows, 4× at", "optimizer_bytes", "ddp"),
    ("zero2", "model state", 16 / 10, "4× as N grows, 8× at", "optimizer_bytes", "ddp"),
    ("zero3", "model state", 2, "N× = 2×", "optimizer_bytes", "ddp"),
    ("fsdp_full_shard", "model state", 2, "N× = 2×", "optimizer_bytes", "ddp"),
    ("zero2", "bytes sent", 2.5, "(k + 1)/2×", "communication_bytes", "ddp"),
    ("zero3", "bytes sent", 6, "3k/2×", "communication_bytes", "ddp"),
    ("fsdp_full_shard", "bytes sent", 6, "3k/2×", "communication_bytes", "ddp"),
    ("tp", "parameters", 1.996, "t× = 2×", "parameter_bytes", "ddp"),
    ("tp_sp", "activations: tensor", 1.19, "1.29×", "activation_bytes", "tp"),
    ("tp", "activations: of the whole", 1.507, "1.55×", "activation_bytes", "ddp"),
    (
        "tp_sp",
        "activations: of the whole",
        1.794,
        "2× for the paper's block (34sbh over 34sbh/t)",
        "activation_bytes",
        "ddp",
    ),
    ("ddp + full checkpointing", "activations: without", 3.65, "17×", "activation_bytes", "ddp"),
    ("tp_sp + full checkpointing", "activations: without", 3.68, "17×", "activation_bytes", "tp_sp"),
    ("pp_zero_bubble + full checkpointing", "activations: without", 2.12, "17×", "activation_bytes", "pp_zero_bubble"),
    ("ddp + full checkpointing", "operations", 1.248, "1.33×", "executed_flops", "ddp"),
    ("pp_zero_bubble + full checkpointing", "operations", 1.372, "1.33×", "executed_flops", "pp_zero_bubble"),
    ("pp_1f1b", "parameters", 2, "p× = 2×", "parameter_bytes", "ddp"),
]

CASES = pytest.mark.parametrize(("label", "words", "expected", "limit", "column", "peer"), EXPECTED)


@CASES
def test_claims_agree_and_differ_where_their_ratio_is_inverted(
    label: str, words: str, expected: float, limit: str, column: str, peer: str
) -> None:
    records = sweep()
    claim = claim_of(claims_on(records), label, words)
    assert claim.agrees and claim.expected == pytest.approx(expected, rel=2e-3)
    assert limit in claim.limit and claim.source
    rows = {line.label: line.row for line in lines_of(records)}
    rows[label][column], rows[peer][column] = rows[peer][column], rows[label][column]
    if column == "optimizer_bytes":
        for name in ("parameter_bytes", "gradient_bytes"):
            rows[label][name], rows[peer][name] = rows[peer][name], rows[label][name]
    swapped = claim_of(claims_on(records), label, words)
    assert not swapped.agrees and swapped.expected == claim.expected
    assert swapped.measured == pytest.approx(1 / claim.measured)


def test_all_claims_of_the_sweep_and_equal_volumes_agree() -> None:
    results = claims_on(sweep())
    assert [claim for claim in results if not claim.agrees] == []
    assert claim_of(results, "zero1", "bytes sent").expected == 1.0
    assert {claim.label for claim in results} == {
        *MEASURED,
        *(f"{name} + full checkpointing" for name in CHECKPOINTED),
    } - {
        "single",
        "ddp",
    }


@pytest.mark.parametrize(("strategy", "passes", "formula"), [("pp_gpipe", 8, "m"), ("pp_1f1b", 2, "min(p, m)")])
def test_micro_batches_in_flight_follow_the_schedule(strategy: str, passes: int, formula: str) -> None:
    claim = claim_of(claims_on(sweep()), strategy, "most passes")
    assert (claim.expected, claim.measured, claim.limit, claim.agrees) == (passes, passes, formula, True)
    other = claim_of(claims_on([record_of(strategy, max_in_flight_micro_batches=10 - passes)]), strategy, "most passes")
    assert not other.agrees and other.measured == 10 - passes


@pytest.mark.parametrize(
    ("strategy", "formula"),
    [("pp_gpipe", 1 / 8), ("pp_1f1b", 1 / 8), ("pp_interleaved", 1 / 16), ("pp_zero_bubble", 1 / 24)],
)
def test_bubbles_agree_within_a_fifth_and_shared_cores_explain_the_rest(strategy: str, formula: float) -> None:
    near = claim_of(claims_on([record_of(strategy, pipeline_bubble=1.19 * formula)]), strategy, "bubble")
    assert near.agrees and near.expected == pytest.approx(formula) and not near.reason
    record = dataclasses.replace(
        record_of(strategy, pipeline_bubble=1.21 * formula), environment={"cores": 2, "threads": 1}
    )
    far = claim_of(claims_on([record]), strategy, "bubble")
    assert not far.agrees and far.reason == "sending takes time, and stages are not equal"
    far = claim_of(claims_on([dataclasses.replace(record, environment={"cores": 1, "threads": 1})]), strategy, "bubble")
    assert "share the processor" in far.reason
    fast = claim_of(claims_on([record_of(strategy, pipeline_bubble=0.5 * formula)]), strategy, "bubble")
    assert not fast.agrees and not fast.reason  # no cause known
    alone = claim_of(
        claims_on([record_of(strategy, pipeline_bubble=2 * formula, measured_on="NVIDIA H200")]), strategy, "bubble"
    )
    assert not alone.agrees and "share" not in alone.reason and alone.reason
    disturbed = claims_on([record_of(strategy, pipeline_bubble=formula, noise_warning="busy")])
    assert not any(claim.claim.startswith("bubble") for claim in disturbed)


def of_state(claims: list[Claim]) -> list[Claim]:
    return [claim for claim in claims if claim.claim.startswith("model state")]


def test_volume_in_mixed_precision_depends_on_the_dtypes() -> None:
    """The volumes are those of DDP's fp32 all-reduce, two of 4 bytes, by data type.

    They are 4 + 2 for stage 1, 4k + 2 for stage 2, and k (4 + 2 + 2) for stage 3, with k = 4.
    """
    mixed, shares = "precision=bf16_mixed", {"zero1": 0.75, "zero2": 18 / 8, "zero3": 4.0, "fsdp_full_shard": 4.0}
    rows = [record_of(name, mixed, communication_bytes=round(8e6 * share)) for name, share in shares.items()]
    results = claims_on([record_of("ddp", mixed, communication_bytes=8_000_000), *rows])
    volumes = {claim.label: claim for claim in results if claim.claim.startswith("bytes sent")}
    assert {label: claim.expected for label, claim in volumes.items()} == pytest.approx(shares)
    assert all(claim.agrees and claim.required for claim in volumes.values())


def test_a_cause_is_named_only_for_the_bytes_it_explains() -> None:
    """DeepSpeed's masters explain 12 bytes of optimizer state per parameter, but not 20."""
    for size, named in ((12, True), (20, False)):
        results = claims_on([record_of("ddp"), record_of("zero1", optimizer_bytes=size * N // 2)])
        claim = claim_of(results, "zero1", "model state")
        assert not claim.agrees and ("DeepSpeed clones" in claim.reason) == named
        assert f"optimizer at {size} bytes" in claim.reason


def test_the_peer_is_a_torch_run_with_the_same_options() -> None:
    """Whatever ran first, a variant and Accelerate's DDP are no baseline while the plain one is there."""
    plain, zero3 = record_of("ddp"), record_of("zero3")
    variant = record_of("ddp", "+strategy.options.static_graph=true", parameter_bytes=8 * N)
    wrapped = record_of("ddp", "strategy.engine=accelerate", parameter_bytes=8 * N)
    expected = claim_of(claims_on([plain, zero3]), "zero3", "model state").measured
    results = claims_on([variant, wrapped, plain, zero3])
    assert [claim.measured for claim in of_state(results) if claim.label == "zero3"] == [expected]
    assert of_state(claims_on([dataclasses.replace(plain, versions={"torch": "2.0.0"}), zero3])) == []
    assert of_state(claims_on([dataclasses.replace(plain, corpus="another"), zero3])) == []


def test_mixed_precision_is_compared_with_the_papers_accounting() -> None:
    """The 16 bytes per parameter become 4 + 12/N, 2 + 14/N and 16/N; fp32 gradients are more, and the claim says so."""
    mixed, sizes = "precision=bf16_mixed", dict(zip(COLUMNS, (2 * N, 2 * N, 12 * N), strict=False))
    shares = {"zero1": (2, 2, 6), "zero2": (2, 1, 6), "zero3": (1, 1, 6)}
    rows = [
        record_of(name, mixed, **dict(zip(COLUMNS, (N * s for s in widths), strict=False)))
        for name, widths in shares.items()
    ]
    results = of_state(claims_on([record_of("ddp", mixed, **sizes), *rows]))
    assert [(claim.agrees, claim.expected, claim.limit) for claim in results] == [
        (True, pytest.approx(16 / 10), "4× as N grows"),
        (True, pytest.approx(16 / 9), "8× as N grows"),
        (True, pytest.approx(2), "N× = 2×"),
    ]
    wide = of_state(claims_on([record_of("ddp", mixed, **sizes | {"gradient_bytes": 4 * N}), *rows]))
    assert (
        not wide[0].agrees
        and wide[0].reason == "DDP's gradients at 4 bytes a parameter, not 2 (they are summed in fp32)"
    )


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_differences_of_deepspeed_from_the_paper_are_explained(engine: str) -> None:
    """The reason is given whether torch or Accelerate calls DeepSpeed."""
    sent, by = 3 * N * 2, f"strategy.engine={engine}"
    again_flops = 13 * record_of("zero3", by).row["executed_flops"] // 10
    records = [
        *(record_of("ddp"), record_of("ddp", "checkpointing=full")),
        record_of("zero1", by, optimizer_bytes=6 * N),
        record_of("zero1_defaults", by, **dict(zip(COLUMNS, (4 * N, 4 * N, 6 * N, None, sent), strict=True))),
        record_of("zero3", by),
        record_of("zero3", by, "checkpointing=full", communication_bytes=13396232, executed_flops=again_flops),
    ]
    results = claims_on(records)
    cloned, defaults = claim_of(results, "zero1", "model state"), claim_of(results, "zero1_defaults", "bytes sent")
    assert not cloned.agrees and "optimizer at 12 bytes a parameter, not 8 (DeepSpeed clones" in cloned.reason
    assert "DDP" not in cloned.reason and cloned.expected == pytest.approx(16 / 12)
    assert not defaults.agrees and defaults.reason == "DeepSpeed's defaults are not the paper's method"
    assert defaults.measured == pytest.approx(1.5)
    again = claim_of(results, "zero3 + full checkpointing", "bytes sent")
    assert not again.agrees and "second forward" in again.reason and "defaults" not in again.reason
    projection, ddps = (
        claim_of(results, "zero3 + full checkpointing", "operations"),
        claim_of(results, "ddp + full checkpointing", "operations"),
    )
    assert projection.reason.endswith("DeepSpeed's own projection runs that too")
    assert projection.expected > ddps.expected


def test_a_cost_of_recomputation_below_a_third_is_always_explained() -> None:
    results = claims_on(sweep())
    assert "head" in claim_of(results, "ddp + full checkpointing", "operations").reason
    assert "halves" in claim_of(results, "pp_zero_bubble + full checkpointing", "operations").reason


@pytest.mark.parametrize(
    "change",
    [
        *({"world_size": 4}, {"model": "other"}, {"precision": "bf16_mixed"}, {"global_batch": 16}, {"seq_len": 64}),
        *({"micro_batch": 2}, {"measured_on": "NVIDIA H200"}, {"checkpointing": "full"}, {"status": "oom"}),
    ],
)
def test_only_a_peer_of_the_same_setting_is_compared(change: dict[str, Any]) -> None:
    ddp, zero3 = record_of("ddp"), record_of("zero3")
    assert len(claims_on([ddp, zero3])) == 2
    other = copy.deepcopy(ddp)
    other.row.update(change)
    assert claims_on([other, zero3]) == []
    other = copy.deepcopy(ddp)
    other.config["model"]["attention"] = "eager"
    assert claims_on([other, zero3]) == []


def test_a_missing_column_removes_only_its_own_claims() -> None:
    every = claims_on(sweep())
    for column in {name for record in sweep() for name in record.row} - {"run_id", "status"}:
        records = sweep()
        for record in records:
            record.row.pop(column, None)
        results = claims_on(records)
        assert all(claim.agrees for claim in results), column
        assert len(results) <= len(every)
    for part in ("config", "layout"):
        records = [dataclasses.replace(record, **{part: {}}) for record in sweep()]
        results = claims_on(records)
        assert 0 < len(results) < len(every) and all(claim.agrees for claim in results)
    records = sweep()
    for record in records:
        record.config["model"]["a_key_of_another_version"] = 1
    assert claims_on(records) and claims([]) == []


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string of a table with the key that it stands under; a pair's first is a condition."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from strings(inner, name)
    elif isinstance(value, list):
        for inner in value:
            is_pair = isinstance(inner, list)
            yield from strings({"if": inner[0], key: inner[1]} if is_pair else inner, key)


NAMES = {"record", "config", "layout", "widths", "device", *COLUMN_TYPES}
CLAIM_NAMES = {"run", "peer", "size", "expected", "measured", "predicted_activation_bytes", *TABLE["quantities"]}
DERIVATION_NAMES = {"each", "position", "of", "runs", "column", "unit"}

FORMULAS = ("if", "expected", "measured", "required", "size", "paper", "value", "each")


@pytest.mark.parametrize(("table", "names"), [(TABLE, CLAIM_NAMES), (DERIVATIONS, DERIVATION_NAMES)])
def test_formulas_of_the_tables_name_nothing_unknown(table: dict[str, Any], names: set[str]) -> None:
    """A name that is nowhere is unknown in every run, so that a mistyped one would remove its figure silently."""
    in_formulas = FORMULAS if table is DERIVATIONS else (*FORMULAS, "layer", *TABLE["quantities"])
    seen = set()
    for key, text in strings(table):
        parsed = ENVIRONMENT.parse(f"{{{{ {text} }}}}" if key in in_formulas else text)
        seen |= meta.find_undeclared_variables(parsed) - set(ENVIRONMENT.globals)
    assert len(seen) > 5 and seen <= NAMES | names


def cells(text: str) -> Iterator[list[str]]:
    """Return the rows of a page's table as a Markdown parser reads them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    row: list[str] = []
    for before, token in pairwise(tokens):
        if token.type == "tr_open":
            row = []
        if token.type == "inline" and before.type in ("th_open", "td_open"):
            assert all(child.type in ("text", "strong_open", "strong_close") for child in token.children or [])
            row.append("".join(child.content for child in token.children or []))
        if token.type == "tr_close":
            yield row


def written(part: Callable[[View], list[Section]], records: list[Record]) -> str:
    """Return the section of a report as Markdown, without a title."""
    return markdown.page("", part(View("", records))).removeprefix("# \n").strip()


def test_the_section_shows_every_claim_and_hostile_names_stay_text() -> None:
    records = [record_of("ddp"), record_of("zero1", optimizer_bytes=6 * N), record_of("fsdp_full_shard")]
    records[2].row["strategy"] = HOSTILE
    text = written(literature, records)
    assert text.startswith("## Comparison with the literature\n")
    assert "1 of the 2 claims that are not marked as proven agree" in text
    header, *rows = cells(text)
    assert header == ["run", "claim", "source", "paper's figure", "verdict", "expected at this layout", "measured"]
    assert len(rows) == len(claims_on(records)) == 4 and all(len(row) == len(header) for row in rows)
    assert rows[0][4].startswith("DIFFERS: optimizer at 12") and rows[0][5:] == ["1.33", "1.14"]
    assert rows[2][0].startswith("<script>alert(1)</script> | **b**") and rows[2][4] == "agrees"
    assert rows[3][4] == "proven"
    assert "<script" not in text and written(literature, [record_of("ddp")]) == ""


def by_micro_batch(checkpointing: str, rest: int, more: int, **columns: Any) -> list[Record]:
    """Return runs with micro-batches of 1, 2 and 4 sequences that keep `rest` and `more` bytes per sequence."""
    records = []
    for size in (4, 1, 2):
        batch = (f"train.micro_batch={size}", f"train.global_batch={size}", f"checkpointing={checkpointing}")
        activations = {"activation_bytes": rest + size * more, "predicted_activation_bytes": 2 * (rest + size * more)}
        records.append(record_of("single", *batch, **activations, **columns))
    return records


def test_activations_are_tabulated_by_micro_batch() -> None:
    mib = 2**20
    alone = record_of("ddp", activation_bytes=5)  # one micro-batch makes no line
    records = [*by_micro_batch("none", mib, 8 * mib), alone, *by_micro_batch("full", mib, 2 * mib)]
    text = written(batches, records)
    header, *rows = cells(text)
    assert header == ["run", "micro-batch", "measured MiB", "predicted MiB", "measured / predicted"]
    assert rows == [
        ["single", "1", "9.00", "18.00", "0.50"],
        ["single", "2", "17.00", "34.00", "0.50"],
        ["single", "4", "33.00", "66.00", "0.50"],
        ["single + full checkpointing", "1", "3.00", "6.00", "0.50"],
        ["single + full checkpointing", "2", "5.00", "10.00", "0.50"],
        ["single + full checkpointing", "4", "9.00", "18.00", "0.50"],
    ]
    sentences = [line for line in text.splitlines() if line.startswith("- ")]
    assert sentences == [
        "- single: each further sequence in the micro-batch adds 8.00 MiB.",
        "- single + full checkpointing: each further sequence in the micro-batch adds 2.00 MiB, 25 % of the"
        " 8.00 MiB without checkpointing; at micro-batch 4, checkpointing saves 73 %.",
    ]


def test_points_of_a_curve_differ_only_in_the_batch() -> None:
    few = by_micro_batch("none", 100, 10)
    assert written(batches, few[:1]) == written(batches, [record_of("ddp")]) == ""
    for change in ({"status": "oom"}, {"activation_bytes": None}, {"precision": "bf16_mixed"}, {"seq_len": 7}):
        other = copy.deepcopy(few[:2])
        other[1].row.update(change)
        assert written(batches, other) == ""
    other = copy.deepcopy(few[:2])
    other[1].config["model"]["attention"] = "eager"
    assert written(batches, other) == ""
    both = [*few, *by_micro_batch("none", 100, 20, precision="bf16_mixed", strategy=HOSTILE)]
    del both[-1].row["predicted_activation_bytes"]
    text = written(batches, both)
    assert "<script" not in text and len(list(cells(text))) == 7
    assert "single: each further sequence in the micro-batch adds 10 B." in text


def test_a_flat_curve_does_not_divide_by_zero() -> None:
    text = written(batches, [*by_micro_batch("none", 100, 10), *by_micro_batch("full", 100, 0)])
    assert "single + full checkpointing: each further sequence in the micro-batch adds 0 B." in text


def test_the_sweep_of_the_classic_picture() -> None:
    config, command = compose("sweeps=activation_memory", "train.micro_batch=16")
    assert (config.train.global_batch, command.proof.reference, command.name) == (16, False, "activation_memory")
    assert (
        dataclasses.replace(config.train, micro_batch=1, global_batch=1)
        == compose_config("sweeps=activation_memory", "train.micro_batch=1").train
    )
