"""A figure opens its arithmetic: the printed terms make it; and runs of schema version 1 are still read."""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from harness.cli.main import main
from harness.config.command import read_run_config
from harness.cost_model.memory import estimate_memory
from harness.layout.state_widths import StateKind
from harness.metrics.columns import throughput_columns
from harness.metrics.formulas import derive, quantities, state_formula, value_of
from harness.records.derivation import Derivation, Term
from harness.records.rank_report import RankReport
from harness.records.schema import RENAMED_COLUMNS, SCHEMA_VERSION, Record, with_current_names
from harness.records.store import read_all, read_runs_csv, write_record
from harness.report.claims import TABLE
from harness.report.derivations import derivation_lines, derive_line, pack
from harness.report.view import merge_repeats
from tests.support.derived import check_derivation, check_derivations, recomputed
from tests.support.example_records import record_of
from tests.support.example_records import row as row_of

REPOSITORY = Path(__file__).parents[2]

EXAMPLE = REPOSITORY / "tests" / "data" / "schema_1" / "all"


@pytest.fixture(scope="module")
def recorded() -> list[Record]:
    """Return two recorded runs on four ranks: checkpointed ddp, and a pipeline."""
    return read_all(EXAMPLE).records


def repeats(record: Record, *rows: dict[str, Any]) -> Record:
    """Return the line of repeats of a run with these changes of its row."""
    runs = [
        record.with_row(run_id=f"{record.run_id}-{number}", repeat=number, **row) for number, row in enumerate(rows)
    ]
    (line,) = merge_repeats(runs)
    return line


def test_printed_terms_make_every_figure(recorded: list[Record]) -> None:
    for record in recorded:
        check_derivations(record)
    pipeline = derive(recorded[1] if recorded[1].pipeline else recorded[0])
    assert pipeline["peak_allocated_bytes"].rule == "arithmetic" and len(pipeline["peak_allocated_bytes"].terms) > 3
    assert "pipeline_bubble" in pipeline and "1 × " not in pipeline["communication_bytes"].sentence


def test_a_term_that_is_wrong_is_noticed(recorded: list[Record]) -> None:
    """The property above would notice each term that is left out or changed."""
    for record in recorded:
        for derivation in derive(record).values():
            if derivation.rule == "arithmetic" and len(derivation.terms) > 1:
                for position, term in enumerate(derivation.terms):
                    doubled = dataclasses.replace(term, value=2 * term.value)
                    terms = [*derivation.terms[:position], doubled, *derivation.terms[position + 1 :]]
                    with pytest.raises(AssertionError):
                        check_derivation(dataclasses.replace(derivation, terms=terms), derivation.value)


def test_formulas_in_sentences_are_the_counted_figures(recorded: list[Record]) -> None:
    """These runs are the literature's, without padding: what the formula gives is what was counted."""
    for record in recorded:
        derivations = derive(record)
        for column in ("parameter_bytes", "optimizer_bytes", "gradient_bytes", "executed_flops"):
            formula = re.search(r"By formula .*?([\d,]+)(?: B| of the model)?\.$", derivations[column].sentence)
            assert formula and float(formula[1].replace(",", "")) == record.row[column], derivations[column]
        volumes = re.findall(r"([\d,]+) B(?:,|\.$)", derivations["communication_bytes"].sentence)
        counted = sum(entry["bytes"] for entry in record.traffic)
        assert sum(float(volume.replace(",", "")) for volume in volumes) == pytest.approx(counted, abs=len(volumes))


@pytest.mark.parametrize(("zero_stage", "data_parallel"), [(0, "ddp"), (1, "ddp"), (2, "fsdp"), (3, "fsdp")])
def test_state_formulas_are_the_cost_models(recorded: list[Record], zero_stage: int, data_parallel: str) -> None:
    shards = 4 if zero_stage else 1
    sharding: dict[str, Any] = {"zero_stage": zero_stage, "data_parallel": data_parallel}
    sharding |= {"dp_replicate": 4 // shards, "dp_shard": shards}
    record = next(record for record in recorded if record.row["pp"] == 1)
    config = record.config | {"strategy": record.config["strategy"] | sharding}
    known = quantities(dataclasses.replace(record, config=config, layout=(record.layout or {}) | sharding), {})
    setting = (known["config"], known["layout"], known["widths"])
    estimate = estimate_memory(*setting, "cpu")
    for kind in get_args(StateKind):
        size = getattr(estimate, f"{kind.removesuffix('s')}_bytes")
        assert state_formula(*setting, kind).endswith(f" = {size:,} B.")


def test_utilization_names_the_datasheet(recorded: list[Record]) -> None:
    record = recorded[0]
    entries = [rank | {"device_name": "NVIDIA H200"} for rank in record.rank_entries]
    on_gpu = dataclasses.replace(record, rank_entries=entries)
    columns = throughput_columns(read_run_config(record.config), on_gpu.ranks, record.row["step_seconds"])
    assert columns["mfu"] and columns["hfu"]
    on_gpu = on_gpu.with_row(**columns)
    check_derivations(on_gpu)
    mfu = derive(on_gpu)["mfu"]
    assert mfu.terms[-1].value == 4 * 67e12 and "datasheet of NVIDIA H200" in mfu.terms[-1].source


def test_a_median_lists_undisturbed_repeats_and_names_the_others(recorded: list[Record]) -> None:
    tokens = recorded[0].row["global_batch"] * recorded[0].row["seq_len"]
    quiet = {"step_seconds_iqr_ratio": 0.01, "noise_warning": ""}
    rows: list[dict[str, Any]] = [
        quiet | {"tokens_per_second": float(speed), "step_seconds": tokens / speed} for speed in (3, 1, 2, 9)
    ]
    rows[3]["noise_warning"] = "other processes took 1.0 of 2 cores"
    rows[1]["peak_allocated_bytes"] = recorded[0].row["peak_allocated_bytes"] - 1
    line = repeats(recorded[0], *rows)
    derivations = derive_line(line)
    speed = derivations["tokens_per_second"]
    assert [term.value for term in speed.terms] == [3, 1, 2] and speed.value == line.row["tokens_per_second"] == 2
    assert speed.sentence.endswith("left out as disturbed or barely timed: repeat 3.")
    assert derivations["peak_allocated_bytes"].sentence.startswith("The most of 4 repeats.")
    for column, derivation in derivations.items():
        check_derivation(derivation, line.row[column])


def test_a_figure_whose_terms_are_not_all_recorded_has_none(recorded: list[Record]) -> None:
    for record in recorded:
        bare = [{"rank": 0, "peak_allocated_bytes": record.row["peak_allocated_bytes"]}]
        row = {key: value for key, value in record.row.items() if not key.startswith("at_peak") and key != "peak_rank"}
        old = dataclasses.replace(record, row=row, rank_entries=bare, config={}, layout=None)
        assert set(derive(old)) <= {"peak_allocated_bytes", "communication_bytes", "pipeline_bubble"}
        moved = record.with_row(peak_allocated_bytes=1, step_seconds=9.0)
        assert derive(moved).keys().isdisjoint({"peak_allocated_bytes", "step_seconds", "tokens_per_second"})
    assert not derive(record_of(row_of(1, "ddp", "torch", 0))).keys() - {"peak_allocated_bytes", "communication_bytes"}


def test_the_page_gets_every_text_once(recorded: list[Record]) -> None:
    packed = json.loads(json.dumps(pack([derive(record) for record in recorded])))
    texts = packed["texts"]
    assert len(texts) == len(set(texts))
    for record, row in zip(recorded, packed["rows"], strict=True):
        for column, derivation in derive(record).items():
            rule, value, unit, sentence, terms = row[column]
            unpacked = [
                Term(texts[name], value, texts[source], texts[unit], texts[operator])
                for operator, value, unit, name, source in terms
            ]
            again = Derivation(column, value, texts[unit], texts[sentence], unpacked, texts[rule])
            assert again == dataclasses.replace(
                derivation, terms=[dataclasses.replace(term, detail="") for term in derivation.terms]
            )


def test_the_command_prints_all_or_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = next(EXAMPLE.glob("pp_1f1b*"))
    assert main(["explain", str(run)]) == 0
    blocks = capsys.readouterr().out.strip().split("\n\n")
    (record,) = [entry for entry in read_all(EXAMPLE).records if entry.run_id == run.name]
    expected = derive(record)
    assert [block.split(" = ")[0] for block in blocks] == list(expected)
    assert [block.splitlines() for block in blocks] == [list(derivation_lines(entry)) for entry in expected.values()]
    assert recomputed(blocks[0].splitlines(), "median") == pytest.approx(record.row["step_seconds"])
    assert main(["explain", str(run), "mfu"]) == 2 and "choose step_seconds" in capsys.readouterr().err
    assert main(["explain", str(tmp_path)]) == 2 and "results/NAME/RUN" in capsys.readouterr().err
    write_record(tmp_path / "failed", record.with_row(status="oom", reason="rank 1"))
    assert main(["explain", str(tmp_path / "failed")]) == 2 and "its status is oom" in capsys.readouterr().err


def deep(record: Record, layers: int, seq_len: int) -> Record:
    """Return the record of a run of so many layers, with the peak that is predicted for it."""
    sizes = {"model": record.config["model"] | {"num_hidden_layers": layers}}
    sizes["train"] = record.config["train"] | {"seq_len": seq_len}
    changed = dataclasses.replace(record, config=record.config | sizes)
    known = quantities(changed, {})
    predicted = estimate_memory(*(known[name] for name in ("config", "layout", "widths", "device")))
    return changed.with_row(predicted_peak_bytes=predicted.peak_bytes)


def test_a_deep_model_is_derived_as_fast_as_a_shallow_one(recorded: list[Record]) -> None:
    """The fault was a walk over every parameter of every layer, and a new balance of stages, for each line."""
    for record in recorded:
        shallow, steep = (
            min(seconds_of_derivation(deep(record, layers, seq_len)) for seq_len in range(16, 112, 16))
            for layers in (8, 80)
        )
        assert steep < 3 * shallow, record.row["strategy"]


def seconds_of_derivation(record: Record) -> float:
    """Return the processor time that the derivations of a run take."""
    started = time.process_time()
    assert "predicted_peak_bytes" in derive(record)
    return time.process_time() - started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "all"))


def test_rows_have_the_current_names_and_the_same_values(folder: Path) -> None:
    loaded = read_all(folder)
    assert len(loaded.records) == 2 and not loaded.problems
    for record in loaded.records:
        stored = json.loads((folder / record.run_id / "record.json").read_text())
        assert stored["schema_version"] == 1 and record.schema_version == SCHEMA_VERSION
        assert record.row == with_current_names(stored["row"])
        assert not record.row.keys() & RENAMED_COLUMNS.keys()
        assert record.row["executed_flops"] == stored["row"]["hardware_flops"]


def reported(written: Any, read: Any) -> Any:
    """Return what was written without the empty values of keys that were not read, which older ranks did not report."""
    if not isinstance(read, dict):
        return written
    return {key: reported(value, read.get(key)) for key, value in written.items() if key in read or not is_empty(value)}


def is_empty(value: Any) -> bool:
    return all(map(is_empty, value)) if isinstance(value, list) else not value


def test_rank_reports_are_written_as_they_were_read() -> None:
    for path in EXAMPLE.glob("*/ranks/*.json"):
        values = json.loads(path.read_text())
        written = json.loads(json.dumps(RankReport.from_json(values).to_json()))
        assert reported(written, values) == values


def test_commands_read_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["report", folder], ["status", folder], ["diff", folder, folder]):
        assert main([*map(str, arguments)]) == 0
    assert "ddp" in capsys.readouterr().out


def test_published_comparisons_can_be_read() -> None:
    """Whatever version wrote them: every line has a status and the current names of columns."""
    tables = sorted((REPOSITORY / "results" / "published").glob("*/runs.csv"))
    assert len(tables) >= 9
    for table in tables:
        records = read_runs_csv(table)
        assert records and all(record.status for record in records), table
        assert not any(record.row.keys() & RENAMED_COLUMNS.keys() for record in records), table


@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("degree", [1, 2, 8])
def test_a_layer_keeps_what_the_paper_counts(degree: int, attention: str) -> None:
    """11 of attention, 19 of the MLP and 4 of the norms; tensor parallelism alone leaves inputs, masks and norms."""
    whole = 11 + 80 * (attention == "eager") + 19 + 4
    replicated = 2 + 1 + 2 + 1 + 4  # the inputs of attention and MLP, the masks of dropout after them, and the norms

    def layer(**row: Any) -> Any:
        known = {"adapters": "none", "t": degree, "a": 16, "s": 2, "b": 1, "h": 2, "attention": attention} | row
        formula = next(formula for holds, formula in TABLE["layer"] if value_of(holds, known))
        return value_of(formula.replace("*s*b*h", ""), known)

    alone = replicated + (whole - replicated) / degree
    assert layer(checkpointing="none", sequence_parallel=False) == pytest.approx(alone)
    assert layer(checkpointing="none", sequence_parallel=True) == pytest.approx(whole / degree)
    assert layer(checkpointing="full", sequence_parallel=False) == 2
    assert layer(checkpointing="full", sequence_parallel=True) == 2 / degree
    assert layer(checkpointing="selective") is None
