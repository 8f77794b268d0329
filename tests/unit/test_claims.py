"""The literature beside measurements: every kind of claim on figures of real runs, and activations by micro-batch."""

import dataclasses
import html
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from jinja2 import meta

from harness.config.schema import RunConfig
from harness.cost_model.flops import executed_flops
from harness.cost_model.pipeline import bubble_ratio
from harness.layout.layout import Layout, resolve_layout
from harness.layout.model_profile import trained_parameter_count
from harness.metrics.formulas import DERIVATIONS, ENVIRONMENT
from harness.records.schema import COLUMNS, Record
from harness.report import markdown
from harness.report.caveats import literature
from harness.report.claims import TABLE, Claim, claims
from harness.report.document import Section
from harness.report.lines import lines_of
from harness.report.memory_sections import batches
from harness.report.view import View
from harness.runner.config_columns import config_columns
from tests.support.commands import compose, compose_config
from tests.support.tables import changed

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

CLAIMED = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "communication_bytes")


@cache
def run_of(*overrides: str) -> tuple[RunConfig, Layout]:
    config = compose_config(*overrides)
    return config, resolve_layout(config.strategy, config.world_size or 2)


def record_of(strategy: str, /, *overrides: str, **columns: Any) -> Record:
    config, layout = run_of(f"strategy={strategy}", *overrides)
    row = config_columns(config, layout) | {
        **dict(zip(CLAIMED, MEASURED.get(strategy, (None,) * 5), strict=True)),
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
    row |= columns
    predicted = {"predicted_activation_bytes": row["activation_bytes"]}
    return Record.from_json({"row": predicted | row, "config": config.to_dict(), "layout": layout.to_dict()})


# The rows as measured except for bubbles, which on a CPU's shared cores are far from the formula.
SWEEP = [record_of(strategy) for strategy in MEASURED] + [
    record_of(strategy, "checkpointing=full", activation_bytes=size) for strategy, size in CHECKPOINTED.items()
]


def claim_of(records: Sequence[Record], label: str, words: str) -> Claim:
    """Return the only claim on a row of these records that begins with these words."""
    (claim,) = [claim for claim in claims_on(records) if claim.label == label and claim.claim.startswith(words)]
    return claim


def claims_on(records: Sequence[Record], words: str = "") -> list[Claim]:
    return [claim for claim in claims(lines_of(records)) if claim.claim.startswith(words)]


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


def of_adapters(**columns: Any) -> Record:
    """Return the record of a run with adapters under DistributedDataParallel in fp32."""
    model = run_of("strategy=ddp", "adapter=lora")[0].model
    trained = trained_parameter_count(model)
    state = {"gradient_bytes": 4 * trained, "optimizer_bytes": 8 * trained}
    return record_of("ddp", "adapter=lora", parameter_bytes=4 * (N + trained), **(state | columns))


def test_adapters_are_compared_with_the_training_of_all_parameters() -> None:
    """Gradients of frozen parameters are noticed, and ZeRO's claims are not made of adapters."""
    trained = of_adapters().row["trained_parameters"]
    claim = claim_of([*SWEEP, of_adapters()], "ddp lora", "model state: that of all")
    assert claim.agrees and claim.expected == pytest.approx(4 * N / (N + 4 * trained))
    assert "4× where adapters are small" in claim.limit and not claim.reason
    assert not claim_of([*SWEEP, of_adapters(gradient_bytes=4 * N)], "ddp lora", "model state: that of all").agrees
    sharded = claims_on([*SWEEP, record_of("fsdp_full_shard", "adapter=lora")])
    assert not [claim for claim in sharded if claim.label == "fsdp_full_shard lora" and "ZeRO" in claim.source]


STATE_COLUMNS = ("optimizer_bytes", "parameter_bytes", "gradient_bytes")


@pytest.mark.parametrize(("label", "words", "expected", "limit", "column", "peer"), EXPECTED)
def test_claims_agree_and_differ_where_their_ratio_is_inverted(
    label: str, words: str, expected: float, limit: str, column: str, peer: str
) -> None:
    claim = claim_of(SWEEP, label, words)
    assert claim.agrees and claim.expected == pytest.approx(expected, rel=2e-3)
    assert limit in claim.limit and claim.source
    rows = {line.label: line.row for line in lines_of(SWEEP)}
    columns = STATE_COLUMNS if column == "optimizer_bytes" else (column,)
    others = {label: rows[peer], peer: rows[label]}
    records = [
        entry.with_row(**{name: others[line_label][name] for name in columns}) if line_label in others else entry
        for entry, line_label in zip(SWEEP, rows, strict=True)
    ]
    swapped = claim_of(records, label, words)
    assert not swapped.agrees and swapped.expected == claim.expected
    assert swapped.measured == pytest.approx(1 / claim.measured)


def test_all_claims_of_the_sweep_agree() -> None:
    results = claims_on(SWEEP)
    assert [claim for claim in results if not claim.agrees] == []
    assert claim_of(SWEEP, "zero1", "bytes sent").expected == 1.0
    full = {f"{name} + full checkpointing" for name in CHECKPOINTED}
    assert {claim.label for claim in results} == (MEASURED.keys() | full) - {"single", "ddp"}
    assert "head" in claim_of(SWEEP, "ddp + full checkpointing", "operations").reason
    assert "halves" in claim_of(SWEEP, "pp_zero_bubble + full checkpointing", "operations").reason


@pytest.mark.parametrize(("strategy", "passes", "formula"), [("pp_gpipe", 8, "m"), ("pp_1f1b", 2, "min(p, m)")])
def test_micro_batches_in_flight_follow_the_schedule(strategy: str, passes: int, formula: str) -> None:
    claim = claim_of(SWEEP, strategy, "most passes")
    assert (claim.expected, claim.measured, claim.limit, claim.agrees) == (passes, passes, formula, True)
    other = claim_of([record_of(strategy, max_in_flight_micro_batches=10 - passes)], strategy, "most passes")
    assert not other.agrees and other.measured == 10 - passes


SENDING = "sending takes time, and stages are not equal"


@pytest.mark.parametrize(
    ("strategy", "formula"),
    [("pp_gpipe", 1 / 8), ("pp_1f1b", 1 / 8), ("pp_interleaved", 1 / 16), ("pp_zero_bubble", 1 / 24)],
)
@pytest.mark.parametrize(
    ("times", "cores", "measured_on", "reason"),
    [
        (1.19, 2, "cpu", None),
        (1.21, 2, "cpu", SENDING),
        (1.21, 1, "cpu", "share the processor"),
        (0.5, 2, "cpu", ""),  # no cause known
        (2, 1, "NVIDIA H200", SENDING),
    ],
)
def test_bubbles_agree_within_a_fifth_and_shared_cores_explain_the_rest(
    strategy: str, formula: float, times: float, cores: int, measured_on: str, reason: str | None
) -> None:
    record = record_of(strategy, pipeline_bubble=times * formula, measured_on=measured_on)
    record = dataclasses.replace(record, environment={"cores": cores, "threads": 1})
    claim = claim_of([record], strategy, "bubble")
    assert claim.expected == pytest.approx(formula) and claim.agrees == (reason is None)
    assert (reason or "") in claim.reason and bool(claim.reason) == bool(reason)
    assert not claims_on([record.with_row(noise_warning="busy")], "bubble")


MIXED = "precision=bf16_mixed"


def test_volume_in_mixed_precision_depends_on_the_dtypes() -> None:
    """The volumes are those of DDP's fp32 all-reduce, two of 4 bytes, by data type.

    They are 4 + 2 for stage 1, 4k + 2 for stage 2, and k (4 + 2 + 2) for stage 3, with k = 4.
    """
    shares = {"zero1": 0.75, "zero2": 18 / 8, "zero3": 4.0, "fsdp_full_shard": 4.0}
    records = [record_of(name, MIXED, communication_bytes=round(8e6 * s)) for name, s in ({"ddp": 1} | shares).items()]
    volumes = claims_on(records, "bytes sent")
    assert {claim.label: claim.expected for claim in volumes} == pytest.approx(shares)
    assert all(claim.agrees and claim.required for claim in volumes)


GATHERED = ("precision=fp8_mixed", "precision.float8_all_gather=true")


def test_volume_of_float8_gathers_is_a_byte_for_each_element_of_a_projection() -> None:
    """The bytes are those that both ranks of a run sent: of stage 3, two gathers and an fp32 reduction."""
    records = [record_of("ddp", "precision=fp8_mixed", communication_bytes=8 * N)]
    vectors, tables = 9 * 96, 2 * 256 * 96
    gathered = 2 * (N - vectors - tables) + 2 * 2 * (vectors + tables)
    parameters = record_of("fsdp_full_shard", "train.micro_batch=4").row["parameters"]
    assert parameters == N
    sizes = (4 * (4 * N + gathered), 4 * (4 * N + 4 * N))  # in float8, and in bfloat16, each of four micro-batches
    records += [record_of("fsdp_full_shard", *GATHERED, communication_bytes=sizes[0])]
    records += [record_of("fsdp_full_shard", "precision=fp8_mixed", communication_bytes=sizes[1])]
    volumes = claims_on(records, "bytes sent")
    assert len(volumes) == 2 and all(claim.agrees and claim.required for claim in volumes), volumes


def of_widths(strategy: str, *widths: float, options: Sequence[str] = (), **columns: Any) -> Record:
    """Return a run with these bytes of parameters, gradients and optimizer for each parameter of the model."""
    return record_of(strategy, *options, **dict(zip(CLAIMED, (N * width for width in widths), strict=False)), **columns)


def test_mixed_precision_is_compared_with_the_papers_accounting() -> None:
    """The 16 bytes per parameter become 4 + 12/N, 2 + 14/N and 16/N; fp32 gradients are more, and the claim says so."""
    shares = {"zero1": (2, 2, 6), "zero2": (2, 1, 6), "zero3": (1, 1, 6)}
    rows = [of_widths(name, *widths, options=[MIXED]) for name, widths in shares.items()]
    results = claims_on([of_widths("ddp", 2, 2, 12, options=[MIXED]), *rows], "model state")
    assert [(claim.agrees, claim.expected, claim.limit) for claim in results] == [
        (True, pytest.approx(16 / 10), "4× as N grows"),
        (True, pytest.approx(16 / 9), "8× as N grows"),
        (True, pytest.approx(2), "N× = 2×"),
    ]
    wide = claims_on([of_widths("ddp", 2, 4, 12, options=[MIXED]), *rows], "model state")[0]
    assert not wide.agrees
    assert wide.reason == "DDP's gradients at 4 bytes a parameter, not 2 (they are summed in fp32)"


@pytest.mark.parametrize("size", [12, 20])
def test_a_cause_is_named_only_for_the_bytes_it_explains(size: int) -> None:
    """DeepSpeed's masters explain 12 bytes of optimizer state per parameter, but not 20."""
    claim = claim_of([record_of("ddp"), record_of("zero1", optimizer_bytes=size * N // 2)], "zero1", "model state")
    assert not claim.agrees and f"optimizer at {size} bytes" in claim.reason
    assert ("DeepSpeed clones" in claim.reason) == (size == 12)


def test_the_peer_is_a_torch_run_with_the_same_options() -> None:
    """Whatever ran first, a variant and Accelerate's DDP are no baseline while the plain one is there."""
    plain, zero3 = record_of("ddp"), record_of("zero3")
    variant = record_of("ddp", "+strategy.options.static_graph=true", parameter_bytes=8 * N)
    wrapped = record_of("ddp", "strategy.engine=accelerate", parameter_bytes=8 * N)
    expected = claim_of([plain, zero3], "zero3", "model state").measured
    assert claim_of([variant, wrapped, plain, zero3], "zero3", "model state").measured == expected


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_differences_of_deepspeed_from_the_paper_are_explained(engine: str) -> None:
    """The reason is given whether torch or Accelerate calls DeepSpeed."""
    by, full = f"strategy.engine={engine}", "checkpointing=full"
    again_flops = 13 * record_of("zero3", by).row["executed_flops"] // 10
    records = [
        *(record_of("ddp"), record_of("ddp", full)),
        record_of("zero1", by, optimizer_bytes=6 * N),
        of_widths("zero1_defaults", 4, 4, 6, options=[by], communication_bytes=6 * N),
        record_of("zero3", by),
        record_of("zero3", by, full, communication_bytes=13396232, executed_flops=again_flops),
    ]
    names = (("zero1", "model state"), ("zero1_defaults", "bytes sent"), ("zero3 + full checkpointing", "bytes sent"))
    cloned, defaults, again = (claim_of(records, label, words) for label, words in names)
    assert not any(claim.agrees for claim in (cloned, defaults, again))
    assert "optimizer at 12 bytes a parameter, not 8 (DeepSpeed clones" in cloned.reason and "DDP" not in cloned.reason
    assert cloned.expected == pytest.approx(16 / 12) and defaults.measured == pytest.approx(1.5)
    assert defaults.reason == "DeepSpeed's defaults are not the paper's method"
    assert "second forward" in again.reason and "defaults" not in again.reason
    projection, ddps = (claim_of(records, f"{name} + full checkpointing", "operations") for name in ("zero3", "ddp"))
    assert projection.reason.endswith("DeepSpeed's own projection runs that too")
    assert projection.expected > ddps.expected


@pytest.mark.parametrize(
    "parts",
    [
        *({"row": {"world_size": 4}}, {"row": {"model": "other"}}, {"row": {"precision": "bf16_mixed"}}),
        *({"row": {"global_batch": 16}}, {"row": {"seq_len": 64}}, {"row": {"micro_batch": 2}}),
        *({"row": {"measured_on": "NVIDIA H200"}}, {"row": {"checkpointing": "full"}}, {"row": {"status": "oom"}}),
        {"config": {"model": record_of("ddp").config["model"] | {"attention": "eager"}}},
        {"versions": {"torch": "2.0.0"}},
    ],
    ids=str,
)
def test_only_a_peer_of_the_same_setting_is_compared(parts: dict[str, Any]) -> None:
    ddp, zero3 = record_of("ddp"), record_of("zero3")
    assert len(claims_on([ddp, zero3])) == 2
    assert claims_on([*changed([ddp], parts=parts), zero3]) == []
    assert claims_on([dataclasses.replace(ddp, corpus="another"), zero3], "model state") == []


def test_what_is_missing_removes_only_its_own_claims() -> None:
    every = len(claims_on(SWEEP))
    columns = {name for record in SWEEP for name in record.row} - {"run_id", "status"}
    views = {name: changed(SWEEP, **{name: None}) for name in columns}
    views |= {part: [dataclasses.replace(record, **{part: {}}) for record in SWEEP] for part in ("config", "layout")}
    for name, records in views.items():
        results = claims_on(records)
        assert all(claim.agrees for claim in results) and len(results) <= every, name
        assert 0 < len(results) < every or name not in ("config", "layout")
    newer = [of_model(record, a_key_of_another_version=1) for record in SWEEP]
    assert claims_on(newer) and claims([]) == []


def of_model(record: Record, **values: Any) -> Record:
    """Return a run with these values in the configuration of its model."""
    return dataclasses.replace(record, config=record.config | {"model": record.config["model"] | values})


def strings(value: Any, key: str = "") -> list[tuple[str, str]]:
    """Return every string of a table with the key that it stands under; a pair's first is a condition."""
    if isinstance(value, dict):
        return [entry for name, inner in value.items() for entry in strings(inner, name)]
    if not isinstance(value, list):
        return [(key, value)] if isinstance(value, str) else []
    parts = [{"if": inner[0], key: inner[1]} if isinstance(inner, list) else inner for inner in value]
    return [entry for inner in parts for entry in strings(inner, key)]


NAMES = {"record", "config", "layout", "widths", "device", *COLUMNS}
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


def cells(text: str) -> list[list[str]]:
    """Return the rows of a page's table, as text."""
    lines = [line for line in html.unescape(text).splitlines() if line.startswith("| ") and "---" not in line]
    return [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def written(part: Callable[[View], list[Section]], records: Sequence[Record]) -> str:
    """Return the section of a report as Markdown, without a title."""
    return markdown.page("", part(View("", list(records)))).removeprefix("# \n").strip()


def test_the_section_shows_every_claim_and_hostile_names_stay_text() -> None:
    sharded = record_of("fsdp_full_shard").with_row(strategy=HOSTILE)
    records = [record_of("ddp"), record_of("zero1", optimizer_bytes=6 * N), sharded]
    text = written(literature, records)
    assert text.startswith("## Comparison with the literature\n") and "<script" not in text
    assert "1 of the 2 claims that are not marked as proven agree" in text
    header, first, _, agreeing, proven = cells(text)
    assert header == ["run", "claim", "source", "paper's figure", "verdict", "expected at this layout", "measured"]
    assert first[4].startswith("DIFFERS: optimizer at 12") and first[5:] == ["1.33", "1.14"]
    assert agreeing[0].startswith("<script>alert(1)</script> | **b**") and agreeing[4] == "agrees"
    assert proven[4] == "proven" and len(claims_on(records)) == 4
    assert written(literature, [record_of("ddp")]) == ""


def by_micro_batch(checkpointing: str, rest: int, more: int, **columns: Any) -> list[Record]:
    """Return runs with micro-batches of 1, 2 and 4 sequences that keep `rest` and `more` bytes per sequence."""
    return [
        record_of(
            *("single", f"train.micro_batch={size}", f"train.global_batch={size}", f"checkpointing={checkpointing}"),
            activation_bytes=rest + size * more,
            **{"predicted_activation_bytes": 2 * (rest + size * more)} | columns,
        )
        for size in (4, 1, 2)
    ]


def test_activations_are_tabulated_by_micro_batch() -> None:
    mib = 2**20
    alone = record_of("ddp", activation_bytes=5)  # one micro-batch makes no line
    text = written(batches, [*by_micro_batch("none", mib, 8 * mib), alone, *by_micro_batch("full", mib, 2 * mib)])
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
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        "- single: each further sequence in the micro-batch adds 8.00 MiB.",
        "- single + full checkpointing: each further sequence in the micro-batch adds 2.00 MiB, 25 % of the"
        " 8.00 MiB without checkpointing; at micro-batch 4, checkpointing saves 73 %.",
    ]


FEW = by_micro_batch("none", 100, 10)


@pytest.mark.parametrize(
    "records",
    [
        *(FEW[:1], [record_of("ddp")]),
        *(
            [FEW[0], FEW[1].with_row(**change)]
            for change in ({"status": "oom"}, {"activation_bytes": None}, {"precision": "bf16_mixed"}, {"seq_len": 7})
        ),
        [FEW[0], of_model(FEW[1], attention="eager")],
    ],
)
def test_points_of_a_curve_differ_only_in_the_batch(records: list[Record]) -> None:
    assert written(batches, records) == ""


def test_curves_may_be_flat_and_without_predictions() -> None:
    other = by_micro_batch("none", 100, 20, precision="bf16_mixed", strategy=HOSTILE)
    text = written(batches, [*FEW, *other[:2], other[2].with_row(predicted_activation_bytes=None)])
    assert "<script" not in text and len(cells(text)) == 7
    assert "single: each further sequence in the micro-batch adds 10 B." in text
    flat = written(batches, [*FEW, *by_micro_batch("full", 100, 0)])
    assert "single + full checkpointing: each further sequence in the micro-batch adds 0 B." in flat


def test_the_sweep_of_the_classic_picture() -> None:
    config, command = compose("sweeps=activation_memory", "train.micro_batch=16")
    single = compose_config("sweeps=activation_memory", "train.micro_batch=1").train
    assert (config.train.global_batch, command.proof.reference, command.name) == (16, False, "activation_memory")
    assert dataclasses.replace(config.train, micro_batch=1, global_batch=1) == single
