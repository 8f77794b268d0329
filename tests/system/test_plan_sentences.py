"""The text of harness plan, worked out again from its rows for many models, clusters and stacks."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.planner.plan import against_words
from tests.support.commands import long
from tests.support.plan_sentences import (
    AXES,
    GIB,
    PARTS,
    Row,
    columns_of_step,
    label,
    longer,
    needed,
    parts_of_step,
    size_text,
    unexplained,
)

LAYOUTS = (
    "model=7b strategy=fsdp_full_shard cluster=8xh100",
    "model=7b strategy=ddp cluster=8xh100",
    "model=7b strategy=zero3 cluster=8xa100_80 cluster.nodes=4 train.global_batch=64",
    "model=7b strategy=zero_offload cluster=8xh100",
    "model=7b strategy=zero2 cluster=8xrtx4090",
    "model=70b strategy=3d strategy.tp=8 strategy.pp=4 cluster=8xh100 cluster.nodes=8 train.global_batch=256",
    "model=70b strategy=fsdp_tp strategy.tp=8 cluster=8xh200 cluster.nodes=8",
    "model=70b strategy=fsdp_hybrid_shard cluster=8xb200 cluster.nodes=8 checkpointing=full",
    "model=70b strategy=pp_interleaved strategy.pp=8 cluster=8xh100 checkpointing=selective",
    "model=405b strategy=3d strategy.tp=8 strategy.pp=16 cluster=8xh100 cluster.nodes=2048",
    "model=405b strategy=fsdp_pp strategy.pp=9 strategy.zero_stage=2 cluster=8xmi300x cluster.nodes=2043",
    "model=gpt_175b strategy=fsdp_tp strategy.tp=8 cluster=8xh100 cluster.nodes=8",
    "model=gpt_1.3b strategy=zero1 cluster=8xl40s",
    "model=7b strategy=cp cluster=8xh100 train.seq_len=4096",
    "model=7b strategy=ddp stack=megatron cluster=8xh100",
    "model=13b strategy=tp_pp strategy.tp=4 strategy.pp=2 stack=nanotron cluster=8xh100 precision=bf16_mixed",
    "model=mpt_7b strategy=fsdp_full_shard stack=llm_foundry cluster=8xa100_40 cluster.nodes=2",
    "model=7b strategy=fsdp_shard_grad_op stack=modalities cluster=8xa100_80 checkpointing=full",
    "model=tiny strategy=ddp cluster=cpu train.global_batch=8",
    "model=tiny strategy=pp_zero_bubble cluster=cpu train.global_batch=8",
    "model=8b strategy=fsdp_full_shard cluster=8xb200 precision=fp8_mixed precision.recipe=nvfp4 train.compile=true",
)

EXPLAINED = ("predicted_peak_bytes", "predicted_step_seconds", "tokens_per_second", "mfu", "communication_bytes")

SEARCHES = (
    "model=7b cluster=8xh100 checkpointing=full train.global_batch=64",
    "model=70b cluster=8xh100 cluster.nodes=8 train.micro_batch=1 checkpointing=selective train.global_batch=64",
    "model=1b cluster=8xrtx4090 stack=megatron train.global_batch=32 plan.tokens=3e11"
    " cluster.hardware.price_per_device_hour=0.4",
    "model=70b cluster=8xrtx4090 checkpointing=none train.global_batch=8 train.micro_batch=1",
)


CPU = """
name: cpu
gpus_per_node: 4
device: cpu
hardware:
  device_name: cpu
  memory: 16GiB
  memory_bandwidth: 2.0e+10
  intra_node_bandwidth: 5.0e+9
  inter_node_bandwidth: 1.0e+9
  peak_flops: 1.0e+11
  sources: [a test]
  fitted_to: a test
  fitted: {matmul_efficiency: 0.5, attention_efficiency: 0.3, cudnn_attention_efficiency: 0.3,
    attention_backward_ratio: 1.0, memory_efficiency: 0.7,
    kernel_seconds: 1.0e-6, launch_seconds: 5.0e-6, intra_node_efficiency: 0.5, intra_node_latency: 1.0e-5,
    inter_node_efficiency: 0.5, inter_node_latency: 1.0e-4, overlap_slowdown: 0.5}
"""


@pytest.fixture(autouse=True)
def cpu_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that describes a machine of four ranks on a CPU."""
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    (tmp_path / "conf" / "cluster" / "cpu.yaml").write_text(CPU)
    monkeypatch.chdir(tmp_path)


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the lines that a plan prints."""
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def check_table(lines: list[str], rows: list[Row]) -> list[str]:
    """Check the table and the labels of a plan, and return the lines above and below."""
    decided, lines = lines[: lines.index("")], lines[lines.index("") + 1 :]
    heads, end = [*re.finditer(r"\S+(?: \S+)*", lines[0])], lines.index("")
    spans = itertools.pairwise([1, *(head.end() for head in heads)])
    columns = {head[0]: slice(*span) for head, span in zip(heads, spans, strict=True)}
    for number, (line, row) in enumerate(zip(lines[1:end], rows, strict=True), 1):
        cells = {"": line.split()[0]} | {head: line[column].strip() for head, column in columns.items()}
        seconds = row["predicted_step_seconds"]
        rate = row["global_batch"] * row["seq_len"] / seconds
        expected = {
            "": str(number),
            "step s": f"{seconds:.4g}",
            "nine of ten": f"{row['predicted_step_low_seconds']:.3g} to {row['predicted_step_high_seconds']:.3g}",
            "tokens/s": f"{rate:,.0f}",
            "per device": f"{rate / row['world_size']:,.0f}",
            "allocated": size_text(row["predicted_peak_bytes"]),
            "fits": row["fits"],
        }
        parts = {head: f"{part:.3g}" for head, part in columns_of_step(row).items()}
        assert (expected | parts).items() <= (dict.fromkeys(parts, "0") | cells).items()
    labels = lines[end + 1 : end + 1 + len(rows)]
    assert labels == [f"{number}  {label(row)}" for number, row in enumerate(rows, 1)]
    return decided + lines[end + 1 + len(rows) :]


@pytest.mark.parametrize("settings", LAYOUTS)
def test_the_text_of_a_layout_follows_from_its_row(settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*settings.split(), "plan.simulate=false"]
    rows: list[Row] = json.loads("\n".join(text_of(capsys, "format=json", *words)))
    lines = check_table(text_of(capsys, "--explain", *words), rows)
    assert unexplained(lines, rows) == []
    (row,) = rows
    assert {line.partition(" = ")[0] for line in lines} >= {f"1: {name}" for name in EXPLAINED}
    assert any("datasheet-only" in line for line in lines) is row["datasheet_only"]
    parts = [row[f"exposed_{axis}_seconds"] for axis in AXES if row[axis] == 1]
    assert not any(parts), "an axis of one rank communicates nothing"
    if needed(row) > row["memory_limit_bytes"]:
        check_offers(next(line for line in lines if " would fit." in line), words, capsys)


def check_offers(line: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that each offer of a layout that does not fit, typed as it stands, fits in the bytes that it names."""
    for offer in line.rpartition("; a device has ")[2].partition(": ")[2].removesuffix(" would fit.").split(", or "):
        match = re.fullmatch(r"(.+?)(?: on more such machines)? \((.+) a rank\)", offer)
        if match is None:
            assert offer == "a smaller model or a larger cluster"
            continue
        changes = match[1].replace(" and ", " ").split()
        keys = {change.partition("=")[0] for change in changes}
        if "world_size" in keys:
            continue  # it needs more nodes
        others = [word for word in words if word.partition("=")[0] not in keys]
        assert main(["plan", "format=json", *others, *changes]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert size_text(needed(row)) == match[2] and needed(row) <= row["memory_limit_bytes"]


@pytest.mark.parametrize("settings", [SEARCHES[0], long(SEARCHES[1]), *SEARCHES[2:]])
def test_the_text_of_a_search_follows_from_its_rows(
    settings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    lines = text_of(capsys, "--explain", "--report", str(page), *settings.split(), "plan.simulate=false")
    data: dict[str, Any] = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text())[1])["rows"]  # type: ignore[index]
    rows = data["choices"]
    lines = check_table(lines, rows) if rows else lines
    assert unexplained(lines, rows, settings.split(), data) == []
    for faster, slower in itertools.pairwise(data["front"]):
        assert faster["predicted_step_seconds"] <= slower["predicted_step_seconds"]
        assert faster["predicted_peak_bytes"] > slower["predicted_peak_bytes"]
    assert all(needed(row) <= row["memory_limit_bytes"] for row in rows)


@pytest.mark.parametrize(
    ("settings", "against"),
    [
        (LAYOUTS[0], "strategy=zero3 checkpointing=full"),
        (LAYOUTS[5], "strategy=fsdp_hybrid_shard"),
        (LAYOUTS[3], "strategy=ddp train.micro_batch=2"),
        (f"{SEARCHES[0]} train.micro_batch=1", "strategy=ddp"),
        (SEARCHES[3], "strategy.zero_stage=3"),  # a search against one in fewer layouts, neither with one that fits
    ],
)
def test_two_layouts_side_by_side_are_those_of_their_rows(
    settings: str, against: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*settings.split(), "plan.simulate=false", "--against", *against.split()]
    rows: list[Row] = json.loads("\n".join(text_of(capsys, "format=json", *words)))
    lines = text_of(capsys, *words)
    table, (one, two, sentence) = lines[: lines.index("")], lines[lines.index("") + 1 :][:3]
    assert [one, two] == [f"{number}  {label(row)}" for number, row in enumerate(rows, 1)]
    shown = {cells[0]: cells[1:] for cells in (re.split(r" {2,}", line.strip()) for line in table[2:])}
    assert table[1].split()[1:] == [row["fits"] for row in rows]
    columns = {
        "step s": "predicted_step_seconds",
        "tokens/s": "tokens_per_second",
        "allocated GiB": "predicted_peak_bytes",
    }
    columns |= {"reserved GiB": "peak_reserved_bytes", "sent by a rank in a step GiB": "communication_bytes"}
    columns |= {f"{part} GiB": f"at_peak_{word}_bytes" for part, word in PARTS.items()}
    figures = {name: [row[column] / (GIB if "GiB" in name else 1) for row in rows] for name, column in columns.items()}
    parts = [parts_of_step(row) for row in rows]
    figures |= {f"{name} s": [each[name] for each in parts] for name in parts[0]}
    for name, values in figures.items():
        digits = ".2f" if "GiB" in name else ",.0f" if name == "tokens/s" else ".4g"
        expected = [format(value, digits) for value in (*values, values[1] - values[0])]
        assert shown.get(name, expected) == expected and (name in shown) == any(values)
    faster, slower = sorted(rows, key=lambda row: float(row["predicted_step_seconds"]))
    if sentence != "Both take as long within 0.1 %.":
        assert sentence.startswith(f"{label(slower)} {longer(slower, faster)} than {label(faster)}: its ")
        part = max(parts[0], key=lambda name: parts_of_step(slower)[name] - parts_of_step(faster)[name])
        assert f"its {part} take" in sentence
    note = "No layout is predicted to fit without the host's memory. Offload was searched, too."
    assert set(unexplained(lines[lines.index("") + 4 :], rows, decides=False)) <= {note}


def test_settings_against_replace_those_of_their_group() -> None:
    words = against_words(["model=7b", "strategy=3d", "strategy.tp=2", "train.seq_len=4"], ["strategy=ddp"])
    assert words == ["model=7b", "train.seq_len=4", "strategy=ddp"]
    assert against_words(["strategy.tp=2", "strategy.pp=2"], ["strategy.tp=4"]) == ["strategy.pp=2", "strategy.tp=4"]
    assert main(["plan", "-m", "model=tiny", "strategy=ddp,zero1", "cluster=8xh100", "--against", "strategy=tp"]) == 2


REQUIRED = [
    # Settings, the exit statuses with --require likely and tight, and what the line says.
    (LAYOUTS[0], (0, 0), ""),
    (LAYOUTS[1], (1, 1), "has fits=no"),
    ("model=7b strategy=fsdp_full_shard cluster=8xa100_40 train.micro_batch=1", (1, 0), "has fits=tight"),
    long(SEARCHES[0], (0, 0), ""),
    (SEARCHES[3], (1, 1), "no layout fits"),
    ("-m model=7b strategy=fsdp_full_shard,ddp cluster=8xh100", (1, 1), "strategy=ddp: "),
    ("-m model=7b strategy=fsdp_tp strategy.tp=2,3 cluster=8xh100", (1, 1), "strategy.tp=3: "),
]


@pytest.mark.parametrize(("settings", "statuses", "words"), REQUIRED)
def test_what_is_required_is_the_exit_status(
    settings: str, statuses: tuple[int, int], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is what the column fits of the same plan says; output stays what it is."""
    arguments = ["plan", "format=json", *settings.split(), "plan.simulate=false"]
    assert main(arguments) == 0
    plain = capsys.readouterr()
    verdicts = [row.get("fits", "no") for row in json.loads(plain.out)]
    search = "strategy=" not in settings
    for least, enough in (("likely", {"likely"}), ("tight", {"likely", "tight"})):
        holds = [verdict in enough for verdict in verdicts]
        expected = 0 if (any(holds) if search else all(holds)) else 1
        assert main([*arguments, "--require", least]) == expected
        out, error = capsys.readouterr()
        assert out == plain.out
        own = error.removeprefix(plain.err).splitlines()
        assert all(line.startswith(f"--require {least} is not met: ") for line in own) and bool(own) == bool(expected)
        assert words in "\n".join(own) or not expected
        assert expected == statuses[least == "tight"]
