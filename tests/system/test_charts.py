"""The report's charts draw what was measured, as read back from the SVG independently of the code that drew it."""

import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.cost_model.parts import PEAK_TITLES
from harness.records.provenance import versions
from harness.records.rank_report import MEMORY_ROLES
from harness.records.schema import Record
from harness.report.charts import expected, first, memory, render, speed, style, tradeoffs
from harness.report.charts.bars import MOST
from harness.report.charts.curves import select
from harness.report.charts.marks import Rows, numbers
from harness.report.charts.marks import axis as scale
from harness.report.charts.points import Points
from harness.report.charts.series import by_world
from harness.report.document import Chart
from harness.report.labels import STEP_TITLES
from harness.report.lines import Item
from harness.report.view import View, truncate

GIB, MIB = 2**30, 2**20

HOSTILE = "\"]}' {datum.x} </svg><script>alert(1)</script> \x00\x1b[31m \u202e Übermaß && %s ${y}"

PARTS = {role: PEAK_TITLES[role] for role in MEMORY_ROLES}

TIMES = dict(list(STEP_TITLES.items())[:5])

PICTURES: dict[str, Callable[[View], Chart | None]] = {
    "first": first.first_picture,
    "peak": memory.peak,
    "throughput": speed.throughput,
    "trade": tradeoffs.trade,
    "step": speed.step,
    "exposed": speed.exposed_communication,
    "traffic": expected.traffic,
    "scaling": speed.scaling,
    "checkpointing": tradeoffs.checkpointing,
    "predicted": expected.predicted,
    "batches": memory.batches,
    "losses": lambda view: next(iter(expected.losses(view)), None),
    "wall": memory.memory_wall,
    "largest": memory.largest_model,
}


def record(number: int, strategy: str, gibs: float, tokens_per_second: float, **changes: Any) -> Record:
    """Return an ok run on 2 ranks with this peak in GiB, whose parts and times all have different sizes."""
    share = dict(zip(PARTS, (1 / 8, 1 / 4, 1 / 16, 1 / 32, 7 / 16, 1 / 64, 5 / 64), strict=True))
    seconds = 1024 / tokens_per_second
    row = {
        "run_id": f"{number:010x}",
        "name": "demo",
        "status": "ok",
        "reason": None,
        "model": "tiny",
        "parameters": MIB,
        "strategy": strategy,
        "engine": "torch",
        "checkpointing": "none",
        "precision": "fp32",
        "world_size": 2,
        "zero_stage": 0,
        "micro_batch": 4,
        "grad_accumulation": 1,
        "global_batch": 8,
        "seq_len": 128,
        "tokens_per_second": tokens_per_second,
        "step_seconds": seconds,
        "step_seconds_iqr_ratio": 0.2,
        "peak_allocated_bytes": int(gibs * GIB),
        "activation_bytes": int(gibs * GIB / 2),
        "predicted_peak_bytes": int(gibs * GIB * (1 + number / 100)),
        "predicted_activation_bytes": int(gibs * GIB / 2.1),
        "measured_on": "cuda",
        "launch": "processes",
        "repeat": 0,
        "started_at": f"2026-01-02T03:{number:02d}:00Z",
        **{f"at_peak_{part}_bytes": int(gibs * GIB * fraction) for part, fraction in share.items()},
        **dict(zip(TIMES, (seconds * fraction for fraction in (0.02, 0.28, 0.4, 0.1, 0.2)), strict=True)),
    } | changes
    if row["status"] != "ok":
        measured = [name for name in row if name.endswith(("_bytes", "_seconds")) and not name.startswith("memory_")]
        row |= dict.fromkeys((*measured, "tokens_per_second")) | {"last_seen_allocated_bytes": 7 * GIB}
    sent = {"dp_shard": (number * 100.0 * MIB, 250.0 * MIB), "tp": (50.0 * MIB * number, None)}
    traffic = [{"axis": axis, "bytes": size, "formula_bytes": due, "outside": {}} for axis, (size, due) in sent.items()]
    parts = {"config": {}, "layout": {}, "versions": dict(versions()), "traffic": traffic[: 1 + number % 2]}
    return Record.from_json({"row": row, **parts})


LIMIT = {"memory_limit_bytes": 12 * GIB}


def several() -> list[Record]:
    limit = LIMIT
    return [
        record(1, "ddp", 10.0, 9000.0, **limit),
        record(2, "zero1", 8.0, 8500.0, **limit),
        record(3, "zero3", 4.0, 5000.0, **limit),
        record(4, "tp", 4.5, 5500.0, **limit),
        record(5, "fsdp_full_shard", 9.0, 1.0, status="oom", reason="rank 1 ran out", **limit),
        record(6, "ddp", 6.0, 7000.0, checkpointing="full", activation_bytes=int(1.25 * GIB), **limit),
        record(7, "cp", 7.0, 6500.0, **limit),
        record(8, "zero2", 5.0, 5000.0, **limit),
    ]


def growing() -> list[Record]:
    """Return two strategies on 2, 4 and 8 ranks."""
    speeds = {"ddp": (1000.0, 1800.0, 3000.0), "zero3": (900.0, 1700.0, 3300.0)}
    return [
        record(10 * at + world, strategy, 2.0, speed, world_size=world)
        for at, (strategy, by_world) in enumerate(speeds.items())
        for world, speed in zip((2, 4, 8), by_world, strict=True)
    ]


def batched() -> list[Record]:
    sizes = {"none": 1.0, "full": 0.25}
    return [
        record(
            batch + 20 * (kind == "full"),
            "ddp",
            4.0,
            1000.0,
            checkpointing=kind,
            micro_batch=batch,
            global_batch=2 * batch,
            activation_bytes=int(batch * each * GIB),
        )
        for kind, each in sizes.items()
        for batch in (1, 2, 4)
    ]


def enlarged() -> list[Record]:
    """Return two strategies at three sizes of the model, of which one runs out of memory at the largest."""
    return [
        record(40 + 3 * at + size, strategy, size * each, 1000.0 / size, status=status, parameters=size * MIB, **LIMIT)
        for at, (strategy, each) in enumerate({"ddp": 3.0, "zero3": 1.5}.items())
        for size in (1, 2, 4)
        for status in ["oom" if size * each > 8 else "ok"]
    ]


def thrice(records: list[Record], away: float = 0.1) -> list[Record]:
    """Return three repeats of every run; the others are slower and faster by a part of the first one's speed."""
    repeated = []
    for entry in records:
        for repeat, share in enumerate((1.0, 1 - away, 1 + away)):
            row = entry.row | {"repeat": repeat, "run_id": f"{entry.row['run_id']}{'' if repeat == 0 else repeat}"}
            speeds = {"tokens_per_second": share} | dict.fromkeys(("step_seconds", *TIMES), 1 / share)
            row |= {name: row[name] * factor for name, factor in speeds.items() if row.get(name)}
            repeated.append(dataclasses.replace(entry, row=row, config={"repeat": repeat}))
    return repeated


def hostile() -> list[Record]:
    records = [record(n, f"{n}{HOSTILE}", n + 1.0, 1000.0 * n, checkpointing=HOSTILE) for n in (1, 2, 3)]
    records.append(record(4, f"4{HOSTILE}", 1.0, 1.0, status="error", reason=HOSTILE))
    for entry in records:
        for part in entry.traffic:
            part["axis"] = HOSTILE + "\ud800"
    return records


def with_losses(folder: Path, records: list[Record]) -> View:
    """Return the view of runs of which all but the second have their steps on file; that of the third is damaged."""
    folders = {entry.row["run_id"]: folder / entry.row["run_id"] for entry in records}
    view = View("demo", thrice(records), folders=folders)
    for at, path in enumerate(view.folders.values()):
        path.mkdir(parents=True)
        steps = [{"step": step, "phase": "timed", "loss": _loss(at, step)} for step in range(5)]
        if at != 1:
            text = "\n".join(json.dumps(step) for step in steps)
            (path / "steps.jsonl").write_text(text + ('\n{"step": 5, "lo' if at == 2 else "\n"))
    return view


def _loss(run: int, step: int) -> float:
    return 5.0 - step / 4 + (0.5 if run == 3 else run * 1e-6)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chart]:
    """Return every chart of the runs that have data for it, and all charts of hostile names."""
    views = {"scaling": View("demo", thrice(growing())), "batches": View("demo", thrice(batched()))}
    views |= dict.fromkeys(("wall", "largest"), View("demo", thrice(enlarged())))
    usual = with_losses(tmp_path_factory.mktemp("usual"), several())
    charts = {name: picture(views.get(name, usual)) for name, picture in PICTURES.items()}
    bad = with_losses(tmp_path_factory.mktemp("hostile"), hostile())
    charts |= {f"hostile {name}": picture(bad) for name, picture in PICTURES.items()}
    assert all(charts[name] for name in PICTURES)
    return {name: picture for name, picture in charts.items() if picture}


def hiding(spec: Mapping[str, Any], *strategies: str) -> dict[str, Any]:
    others = [param for param in spec["params"] if param["name"] != "hidden"]
    return {**spec, "params": [*others, {"name": "hidden", "value": list(strategies)}]}


@pytest.fixture(scope="module")
def texts(drawn: dict[str, Chart]) -> dict[str, str]:
    """Return every chart as SVG, and all but the hostile ones with one strategy hidden, drawn by one process."""
    specs = {name: picture.spec for name, picture in drawn.items()}
    specs |= {f"hidden {name}": hiding(drawn[name].spec, "ddp") for name in PICTURES}
    return render.svgs(specs)


@pytest.fixture(scope="module")
def trees(texts: dict[str, str]) -> dict[str, ElementTree.Element]:
    return {name: ElementTree.fromstring(text) for name, text in texts.items()}


class Mark:
    """A mark with its label and its position in pixels from the plot's left and top."""

    def __init__(self, element: ElementTree.Element) -> None:
        self.element = element
        self.texts = dict(
            part.split(": ", 1) for part in element.attrib.get("aria-label", "").split("; ") if ": " in part
        )
        self.run = self.texts.get("run", "")
        self.text = element.text or ""
        moved = re.match(r"translate\(([-\d.]+),([-\d.]+)\)", element.attrib.get("transform", ""))
        self.x, self.y = (float(moved[1]), float(moved[2])) if moved else (0.0, 0.0)

    @property
    def box(self) -> tuple[float, float]:
        """Return the left edge and the width of a bar, or the left edge of a tick."""
        path = re.match(r"M([-\d.]+),[-\d.]+h([-\d.]+)", self.element.attrib["d"])
        assert path
        return float(path[1]), float(path[2])

    @property
    def corners(self) -> list[tuple[float, float]]:
        return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", self.element.attrib["d"])]


def marks(tree: ElementTree.Element, kind: str) -> list[Mark]:
    return [Mark(element) for element in tree.iter() if element.attrib.get("aria-roledescription") == kind]


def axis(tree: ElementTree.Element, letter: str) -> Callable[[float], float]:
    """Return the map from pixels to the axis's own values, by two of its labelled ticks."""
    group = next(g for g in tree.iter() if g.attrib.get("aria-label", "").startswith(f"{letter}-axis"))
    at = "x" if letter == "X" else "y"

    def placed(kind: str) -> list[Mark]:
        groups = [g for g in group.iter() if kind in g.attrib.get("class", "")]
        return [Mark(child) for g in groups for child in g]

    ticks = [getattr(tick, at) for tick in placed("role-axis-tick")]
    named = [(getattr(m, at), float(m.text.replace(",", "").replace("−", "-"))) for m in placed("role-axis-label")]
    pairs = [(min(ticks, key=lambda tick: abs(tick - position)), value) for position, value in named]
    (first, low), (last, high) = pairs[0], pairs[-1]
    return lambda pixels: low + (pixels - first) * (high - low) / (last - first)


def title(tree: ElementTree.Element, letter: str) -> str:
    labels = (g.attrib.get("aria-label", "") for g in tree.iter())
    titles = (re.match(rf"{letter}-axis titled '(.*?)' for", text) for text in labels)
    return next(match[1] for match in titles if match)


def rows(records: list[Record]) -> dict[str, dict[str, Any]]:
    """Return the rows of the lines that are ok, by their label."""
    kinds = {"none": "", "full": " + full checkpointing"}
    named = {f"{r.row['strategy']}{kinds[r.row['checkpointing']]}": r.row for r in records}
    return {label: row for label, row in named.items() if row["status"] == "ok"}


def part_lengths(bars: list[Mark], scale: Callable[[float], float]) -> dict[tuple[str, str], float]:
    """Return the length of every part of stacked bars on the axis, by run and part."""
    return {(bar.run, bar.texts["part"]): scale(sum(bar.box)) - scale(bar.box[0]) for bar in bars}


def test_every_segment_of_a_peak_is_as_long_as_its_bytes(trees: dict[str, ElementTree.Element]) -> None:
    tree, known = trees["peak"], rows(several())
    gib = axis(tree, "X")
    assert title(tree, "X") == "peak memory (GiB)"
    bars = marks(tree, "bar")
    expected = {
        (run, named): row[f"at_peak_{part}_bytes"] / GIB for run, row in known.items() for part, named in PARTS.items()
    }
    assert part_lengths(bars, gib) == pytest.approx(expected, abs=0.01)
    ends = {bar.run: 0.0 for bar in bars}
    for bar in bars:
        ends[bar.run] = max(ends[bar.run], gib(sum(bar.box)))
    assert ends == pytest.approx({label: row["peak_allocated_bytes"] / GIB for label, row in known.items()}, abs=0.01)


def test_the_peak_chart_shows_the_limit_and_failed_runs(
    drawn: dict[str, Chart], trees: dict[str, ElementTree.Element]
) -> None:
    for name in ("peak", "hidden peak"):
        (rule,) = marks(trees[name], "rule mark")
        assert axis(trees[name], "X")(rule.x) == pytest.approx(12, abs=0.01)
        shown = [mark.text for mark in marks(trees[name], "text mark")]
        assert "memory limit 12.00 GiB" in shown
        assert "oom, last reported 7.00 GiB" in shown
    assert "The device's memory limit is 12.00 GiB" in drawn["peak"].alt_text
    far = [record(n, s, 1.0, 100.0, memory_limit_bytes=80 * GIB) for n, s in enumerate(("ddp", "tp"), start=1)]
    beyond = memory.peak(View("demo", far))
    assert beyond
    assert "beyond the axis" in beyond.alt_text
    assert beyond.spec["datasets"]["limits"] == []


def test_bars_of_speed_have_their_spread(trees: dict[str, ElementTree.Element]) -> None:
    tree, known = trees["throughput"], rows(several())
    speed_of = axis(tree, "X")
    bars, rules = marks(tree, "bar"), marks(tree, "rule mark")
    fastest_first = sorted(known, key=lambda run: -known[run]["tokens_per_second"])
    assert [bar.run for bar in bars] == fastest_first
    assert [speed_of(sum(bar.box)) for bar in bars] == pytest.approx(
        [known[run]["tokens_per_second"] for run in fastest_first], rel=1e-3
    )
    assert all(bar.box[0] == speed_of(0) == 0 for bar in bars)
    for rule in rules:  # from the slowest to the fastest repeat
        measured = known[rule.run]["tokens_per_second"]
        assert speed_of(rule.x) == pytest.approx(0.9 * measured, rel=1e-3)
        assert speed_of(rule.x + float(rule.element.attrib["x2"])) == pytest.approx(1.1 * measured, rel=1e-3)
    assert len(rules) == len(known)


def test_every_part_of_a_step_is_as_long_as_its_time(trees: dict[str, ElementTree.Element]) -> None:
    tree, known = trees["step"], rows(several())
    ms = axis(tree, "X")
    assert title(tree, "X") == "step time (ms)"
    bars = marks(tree, "bar")
    expected = {(run, part): 1000 * row[name] for run, row in known.items() for name, part in TIMES.items()}
    assert len(bars) == len(expected)
    assert part_lengths(bars, ms) == pytest.approx(expected, abs=0.1)


def front_by_definition(known: Mapping[str, Mapping[str, Any]], away: float = 0.1) -> set[str]:
    """Return the runs that lead all before them on the front and that nothing before them leads, by their peaks."""

    def leads(a: float, b: float) -> bool:
        return a * (1 - away) - b * (1 + away) > 0.5 * 2 * away * max(a, b)

    chosen: list[float] = []
    before: list[float] = []
    names = set()
    for run in sorted(known, key=lambda run: (known[run]["peak_allocated_bytes"], -known[run]["tokens_per_second"])):
        measured = known[run]["tokens_per_second"]
        if all(leads(measured, other) for other in chosen) and not any(leads(other, measured) for other in before):
            names.add(run)
            chosen.append(measured)
        before.append(measured)
    return names


def test_the_front_connects_the_runs_that_are_certainly_faster_than_smaller_ones(
    drawn: dict[str, Chart], trees: dict[str, ElementTree.Element]
) -> None:
    tree, known = trees["trade"], rows(several())
    expected = front_by_definition(known)
    assert 1 < len(expected) < len(known)
    across, up = axis(tree, "X"), axis(tree, "Y")
    assert "(GiB" in title(tree, "Y")
    points = marks(tree, "point")
    assert {point.run for point in points} == known.keys()
    for point in points:
        row = known[point.run]
        assert across(point.x) == pytest.approx(row["tokens_per_second"], rel=1e-2)
        assert up(point.y) == pytest.approx(row["peak_allocated_bytes"] / GIB, rel=1e-2)
    (line,) = marks(tree, "line mark")
    corners = sorted((known[run]["tokens_per_second"], known[run]["peak_allocated_bytes"] / GIB) for run in expected)
    assert [(across(x), up(y)) for x, y in line.corners] == [pytest.approx(corner, rel=1e-2) for corner in corners]
    assert {row[0] for row in drawn["trade"].table.rows if "yes" in row} == expected


def test_the_front_is_over_all_runs_however_few_are_drawn() -> None:
    """The fault was a front over the drawn runs, which called one unbeaten that an undrawn one beat in both."""
    records = [record(n, f"s{n % 3}", 9.0 - n / 4, 100.0 * 1.5**n, micro_batch=n + 1) for n in range(12)]
    view = View("demo", thrice(records, 0.01))
    whole, few = tradeoffs.trade(view), tradeoffs.trade(truncate(view, 12))
    assert whole and few
    names = [{row[0] for row in chart.table.rows if "yes" in row} for chart in (whole, few)]
    assert names[0] == names[1] and len(names[0]) == 1, "the smallest is the fastest"
    assert len(few.table.rows) == 4 < len(whole.table.rows) == 12


def test_speeds_of_few_runs_rank_nothing_and_disturbed_ones_are_not_drawn() -> None:
    records = [*thrice([record(1, "ddp", 4.0, 900.0), record(2, "tp", 3.0, 500.0)]), record(3, "zero1", 2.0, 950.0)]
    records += [record(4, "zero3", 1.0, 7000.0, noise_warning="busy"), record(5, "cp", 1.5, 8000.0)]
    records[-1].row["step_seconds_iqr_ratio"] = None  # too few steps were timed
    view = View("demo", records)
    timed = (first.first_picture, speed.throughput, tradeoffs.trade, speed.step, speed.exposed_communication)
    charts = {chart.name: chart for picture in timed if (chart := picture(view))}
    assert len(charts) == len(timed)
    for name, text in render.svgs({name: chart.spec for name, chart in charts.items()}).items():
        tree = ElementTree.fromstring(text)
        ranges = {mark.run for mark in marks(tree, "rule mark")}
        assert ranges == (set() if name in COLORED_BY_PART else {"ddp", "tp"}), "one run has no range"
        kinds = ("point", "tick") if name == "first" else ("bar", "point", "tick")  # its other bars are of memory
        assert not {mark.run for kind in kinds for mark in marks(tree, kind)} & {"zero3", "cp"}, name
        words = [mark.text for mark in marks(tree, "text mark")]
        assert name == "trade" or sum(word.startswith("disturbed") for word in words) == 2
    assert {row[0] for row in tradeoffs.trade(view).table.rows if "yes" in row} == {"tp", "ddp"}  # type: ignore[union-attr]


def test_without_ranked_speeds_charts_are_of_memory_and_bytes_sent() -> None:
    """Neither single runs nor ranks that share cores have a speed or a time in a chart."""
    crowd = [record(n, name, n, 9e3, world_size=4, measured_on="cpu", communication_bytes=n) for n, name in NAMES]
    for entry in crowd:
        entry.environment["cores"] = 2
    single = [record(n, name, n, 9e3, communication_bytes=n) for n, name in NAMES]
    timed = (speed.throughput, speed.scaling, tradeoffs.trade, speed.step, speed.exposed_communication)
    for records in (single, thrice(crowd)):
        view = View("demo", records)
        assert not any(picture(view) for picture in timed)
        picture = first.first_picture(view)
        assert picture and picture.title == "Memory and communication" and len(picture.spec["concat"]) == 2
        assert "tokens" not in json.dumps([picture.spec, picture.table.header, picture.alt_text])
    ranked = thrice([record(1, "ddp", 1.0, 9e3), record(2, "tp", 2.0, 9e2)])
    chart = speed.throughput(View("demo", [*ranked, *thrice(crowd)]))
    assert chart and "Not drawn are the times of more ranks than cores" in chart.alt_text
    crowded = [row for row in chart.table.rows if row[1] == "more ranks than cores: not comparable"]
    assert len(crowded) == 2 and all(row[2:] == ["", "", "", ""] for row in crowded)


NAMES = ((1, "ddp"), (2, "tp"))


def test_bars_of_bytes_sent_have_ticks_of_the_formula(trees: dict[str, ElementTree.Element]) -> None:
    tree = trees["traffic"]
    sent = axis(tree, "X")
    assert "(MiB" in title(tree, "X")
    expected = {
        f"{label} · {entry['axis']}": entry
        for label, row in rows(several()).items()
        for entry in next(r for r in several() if r.row["run_id"] == row["run_id"]).traffic
    }
    bars, ticks = marks(tree, "bar"), marks(tree, "tick")
    sizes = {bar.texts["bar"].replace("\n", " "): sent(sum(bar.box)) for bar in bars}
    assert sizes == pytest.approx({key: entry["bytes"] / MIB for key, entry in expected.items()}, rel=1e-3)
    formulas = {tick.texts["bar"].replace("\n", " "): sent(tick.box[0] + tick.box[1] / 2) for tick in ticks}
    formula = {bar: entry["formula_bytes"] for bar, entry in expected.items()}
    sent_bytes = {bar: entry["bytes"] for bar, entry in expected.items()}
    known = {bar: due / MIB for bar, due in formula.items() if due and abs(sent_bytes[bar] - due) > 1e-3 * due}
    assert formulas == pytest.approx(known, abs=1)


def test_speed_over_ranks_is_drawn_with_linear_scaling(
    drawn: dict[str, Chart], trees: dict[str, ElementTree.Element]
) -> None:
    tree = trees["scaling"]
    ranks, speed_of = axis(tree, "X"), axis(tree, "Y")
    points = {(p.run, round(ranks(p.x))): speed_of(p.y) for p in marks(tree, "point")}
    expected = {(r.row["strategy"], r.row["world_size"]): r.row["tokens_per_second"] for r in growing()}
    assert points == pytest.approx(expected, rel=1e-2)
    ideals = [line for line in marks(tree, "line mark") if line.element.attrib.get("stroke-dasharray") == "4,3"]
    assert sorted(speed_of(line.corners[-1][1]) for line in ideals) == pytest.approx([3600, 4000], rel=1e-2)
    cells = {(row[0], row[1]): row[-1] for row in drawn["scaling"].table.rows}
    assert cells[("ddp", "8")] == "75.0"
    assert cells[("zero3", "8")] == "91.7"


def test_the_checkpointing_chart_shows_savings_and_cost(
    drawn: dict[str, Chart], trees: dict[str, ElementTree.Element]
) -> None:
    tree = trees["checkpointing"]
    saved = axis(tree, "X")
    (bar,), (tick,) = marks(tree, "bar"), marks(tree, "tick")
    assert saved(sum(bar.box)) == pytest.approx(40, abs=0.3)
    assert saved(tick.box[0] + tick.box[1] / 2) == pytest.approx(75, abs=0.3)
    assert "+29 %" in "".join(tree.itertext()), "the step takes 9000 / 7000 as long"
    assert drawn["checkpointing"].table.rows == [["ddp + full checkpointing", "full", "40.0", "75.0", "28.6~"]], (
        "by three runs"
    )


def test_a_cost_of_checkpointing_that_repeats_do_not_show_is_marked() -> None:
    pair = [record(1, "ddp", 2.0, 9e3), record(2, "ddp", 1.0, 7e3, checkpointing="full")]
    for away, mark in ((0.01, ""), (0.2, "~")):
        chart = tradeoffs.checkpointing(View("demo", thrice(pair, away)))
        assert chart and chart.table.rows[0][-1] == f"28.6{mark}"
        assert ("no certain difference: ddp + full checkpointing" in chart.alt_text) == bool(mark)
        text = render.svgs({"checkpointing": chart.spec})["checkpointing"]
        assert f"+29 %{mark}<" in text and ("~: not certain" in text) == bool(mark)


def test_prediction_is_on_the_x_axis_and_measurement_on_the_y_axis(trees: dict[str, ElementTree.Element]) -> None:
    tree, known = trees["predicted"], rows(several())
    across, up = axis(tree, "X"), axis(tree, "Y")
    assert title(tree, "X").startswith("predicted")
    points = marks(tree, "point")
    assert len(points) == len(known)
    for point in points:
        row = known[point.run]
        assert across(point.x) == pytest.approx(row["predicted_peak_bytes"] / GIB, abs=0.05)
        assert up(point.y) == pytest.approx(row["peak_allocated_bytes"] / GIB, abs=0.05)
        assert float(point.texts["error (%)"]) == pytest.approx(int(row["run_id"], 16), abs=0.01)
    (diagonal,) = marks(tree, "line mark")
    assert [across(x) - up(y) for x, y in diagonal.corners] == pytest.approx([0, 0], abs=0.05)


def test_activations_are_drawn_over_the_micro_batch(trees: dict[str, ElementTree.Element]) -> None:
    tree = trees["batches"]
    across, up = axis(tree, "X"), axis(tree, "Y")
    points = {(p.run, round(across(p.x))): up(p.y) for p in marks(tree, "point")}
    each = {"ddp": 1.0, "ddp + full checkpointing": 0.25}
    assert points == pytest.approx({(run, n): n * size for run, size in each.items() for n in (1, 2, 4)}, abs=0.05)
    crosses = [mark for mark in marks(tree, "text mark") if mark.text == "×"]
    assert len(crosses) == 6


def test_losses_are_drawn_for_runs_that_have_them(
    drawn: dict[str, Chart], trees: dict[str, ElementTree.Element]
) -> None:
    tree = trees["losses"]
    step, loss = axis(tree, "X"), axis(tree, "Y")
    curves = {line.run: line for line in marks(tree, "line mark")}
    places = {"ddp": 0, "tp": 3, "ddp + full checkpointing": 5, "cp": 6, "zero2": 7}
    assert curves.keys() == places.keys()
    for run, at in places.items():
        corners = [(round(step(x)), loss(y)) for x, y in curves[run].corners]
        assert corners == [(n, pytest.approx(_loss(at, n), abs=0.01)) for n in range(5)]
    dashes = {run: line.element.attrib.get("stroke-dasharray") for run, line in curves.items()}
    assert dashes.pop("tp") == "10,0"
    assert set(dashes.values()) == {"10,30"}  # the four others coincide and take turns
    begins = [curves[run].element.attrib.get("stroke-dashoffset", "0") for run in dashes]
    assert sorted(map(float, begins)) == [-30, -20, -10, 0]
    assert list(drawn["losses"].table.rows[0][:2]) == ["ddp", "5.0000000"]


COLORED_BY_PART = ("peak", "step", "exposed")


def test_a_strategy_and_a_part_have_one_color_in_all_charts(trees: dict[str, ElementTree.Element]) -> None:
    colors: dict[str, dict[str, set[str]]] = {"strategy": {}, "part": {}}
    for name in PICTURES:
        for mark in [*marks(trees[name], "bar"), *marks(trees[name], "point"), *marks(trees[name], "line mark")]:
            kind = "part" if name in COLORED_BY_PART else "strategy"
            named = mark.texts.get("part", "") if kind == "part" else mark.run.split(" ")[0]
            if named:
                fill = mark.element.attrib.get("fill", "none")
                color = mark.element.attrib["stroke"] if fill in ("none", "transparent") else fill
                colors[kind].setdefault(named, set()).add(color)
    assert len(colors["strategy"]) == 6 and {"activations", "backward"} <= colors["part"].keys()
    for by_name in colors.values():
        assert {name: found for name, found in by_name.items() if len(found) > 1} == {}
    assert len(set.union(*colors["strategy"].values())) == len(colors["strategy"])


def test_labels_of_crowded_points_cover_neither_points_nor_each_other() -> None:
    chance, (width, height) = random.Random(7), (620, 340)
    for count in (8, 40, 150):
        points = [{"x": chance.random(), "y": chance.random(), "name": f"strategy{place}"} for place in range(count)]
        plot = Points(View("demo", []), Rows([], {}), scale("", (0, 1)), scale("", (0, 1)))
        boxes = []
        for label in plot.placed(points, [], (width, height)):
            length = 5.9 * len(label["short"])
            left = (
                label["x"] * width + label["dx"] - {"left": 0.0, "center": length / 2, "right": length}[label["align"]]
            )
            middle = (1 - label["y"]) * height + label["dy"]
            boxes.append((left, middle - 6, left + length, middle + 6))
        assert min(count, 20) // 2 <= len(boxes) <= count
        for (left, top, right_end, bottom), other in itertools.permutations(boxes, 2):
            assert not (left < other[2] and other[0] < right_end and top < other[3] and other[1] < bottom)
        for (left, top, right_end, bottom), point in itertools.product(boxes, points):
            assert not (left < point["x"] * width < right_end and top < (1 - point["y"]) * height < bottom)


def test_hidden_strategies_are_not_drawn(trees: dict[str, ElementTree.Element]) -> None:
    kinds = ("bar", "point", "line mark", "tick", "text mark", "rule mark")
    for name in PICTURES:
        shown, left = ([m for kind in kinds for m in marks(trees[f"{h}{name}"], kind)] for h in ("", "hidden "))
        assert any(mark.run.startswith("ddp") for mark in shown), name
        assert not any(mark.run.startswith("ddp") for mark in left), name
        others = sorted(mark.run for mark in shown if mark.run and not mark.run.startswith("ddp"))
        assert sorted(mark.run for mark in left if mark.run) == others, name


def plots(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the plots of a spec."""
    found: list[Mapping[str, Any]] = spec.get("concat", [spec.get("spec", spec)])
    return found


def data_of(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return all rows of a spec, which lie under the name that a layer, or the whole spec, refers to."""
    parts = [spec, *(layer for plot in plots(spec) for layer in plot["layer"])]
    assert {part["data"]["name"] for part in parts if "data" in part} == spec["datasets"].keys()
    for values in spec["datasets"].values():
        yield from values


def test_specs_have_the_fields_that_the_page_needs(drawn: dict[str, Chart]) -> None:
    for name, picture in drawn.items():
        spec = picture.spec
        assert "config" not in spec
        assert {"name": "hidden", "value": []} in spec["params"]
        assert "2 ranks" in " ".join(spec["title"]["subtitle"]) or name == "scaling", "the setting is in the picture"
        assert picture.name == name.removeprefix("hostile ")
        assert spec["description"] == picture.alt_text
        assert {row["strategy"] for row in data_of(spec)} - {""}
        assert all("strategy" in row for row in data_of(spec))
        fields = set(re.findall(r'"field": "([^"]*)"', json.dumps(spec)))
        assert all(re.fullmatch(r"[a-z ]+", field) for field in fields)
        table = picture.table
        assert len(table.rows) == len(table.strategies)
        assert all(len(row) == len(table.header) for row in table.rows)


def test_hostile_names_are_text_and_nothing_else(texts: dict[str, str], trees: dict[str, ElementTree.Element]) -> None:
    names = [name for name in texts if name.startswith("hostile")]
    assert {"hostile peak", "hostile trade", "hostile traffic", "hostile losses"} <= set(names)
    for name in names:
        tags = {element.tag.rsplit("}", 1)[-1] for element in trees[name].iter()}
        assert tags <= {"svg", "desc", "rect", "g", "path", "text", "tspan", "line", "title"}, name
        attributes = {key for element in trees[name].iter() for key in element.attrib}
        assert not {key for key in attributes if key.startswith("on") or key.endswith("href")}
        labels = " ".join(element.attrib.get("aria-label", "") for element in trees[name].iter())
        assert "</svg><script>alert(1)</script>" in labels
        assert "Übermaß" in labels


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.004, 0.013, 1.5), "from <0.01 (a) to 1.50 (c)"),
        ((0.0058, 0.0127), "from 0.0058 (a) to 0.0127 (b)"),  # in a table of two decimals both are 0.01
        ((2.0, 2.0), "2.00 for all"),
    ],
)
def test_a_range_is_told_for_all_only_where_all_are_equal(values: tuple[float, ...], text: str) -> None:
    items = [Item(name, "ddp", place) for place, name in enumerate("abc"[: len(values)])]
    assert Rows(items, {"peak": numbers("peak", values)}).span("peak") == text


def test_equal_data_give_equal_svgs(drawn: dict[str, Chart], texts: dict[str, str]) -> None:
    backwards = {name: drawn[name].spec for name in reversed(PICTURES)}
    assert render.svgs(backwards) == {name: texts[name] for name in backwards}


def test_dark_and_light_differ_only_in_colors(
    drawn: dict[str, Chart], texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "config", partial(style.config, dark=True))
    dark = render.svgs({"peak": drawn["peak"].spec})["peak"]
    color = re.compile(r'"#[0-9a-f]{6}"')
    assert dark != texts["peak"]
    assert color.sub("", dark) == color.sub("", texts["peak"])


def test_a_chart_that_cannot_be_drawn_raises_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(render.DrawingError, match=r"not drawn: nonsense: .*Invalid specification"):
        render.svgs({"nonsense": {}})
    aborts = {"mark": "bar", "data": {"values": [{"a": "\x00"}]}, "encoding": {"x": {"field": "a"}}}
    with pytest.raises(render.DrawingError, match="ended by signal 6"):
        render.svgs({"aborts": aborts})
    monkeypatch.setattr(render, "_SECONDS", 0.01)
    with pytest.raises(render.DrawingError, match=r"within 0\.01 s"):
        render.svgs({"late": aborts})


def test_the_library_is_cached_and_rebuilt_if_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_CACHE", tmp_path / "new")
    library = render.library()
    assert "window.vegaEmbed" in library
    assert "</script" not in library
    (file,) = (tmp_path / "new").iterdir()
    file.write_text("kept")
    assert render.library() == "kept"


def test_bars_beyond_the_limit_are_drawn_when_others_are_hidden() -> None:
    """The fault was a cut that dropped strategies from every chart, even after the reader hid all others."""
    records = [record(n, f"s{n % 5}", 1.0 + n / 10, 100.0 * (n + 1), seq_len=n) for n in range(MOST + 10)]
    chart = memory.peak(View("demo", records))
    assert chart
    assert f"{MOST} of {MOST + 10} configurations are drawn at once" in chart.alt_text
    assert len(chart.table.rows) == MOST + 10
    order = chart.spec["usermeta"]["order"]
    assert len(order) == MOST + 10
    visible = [place for place, strategy in enumerate(order) if strategy != "s0"]
    params = [
        {"name": "hidden", "value": ["s0"]},
        {"name": "last", "value": visible[: chart.spec["usermeta"]["most"]][-1]},
    ]
    texts = render.svgs({"all": chart.spec, "some": {**chart.spec, "params": params}})
    shown = {name: {mark.run for mark in marks(ElementTree.fromstring(text), "bar")} for name, text in texts.items()}
    assert len(shown["all"]) == MOST
    assert len(shown["some"]) == len(visible) and not any(run.startswith("s0") for run in shown["some"])


def test_no_label_of_a_bar_is_cut_where_there_is_little_width() -> None:
    """The fault was "fsdp_full_shard + full checkpointing on …" on several bars of 84 mm."""
    names = ("fsdp_full_shard", "fsdp_hybrid_shard")
    records = [
        record(n, name, 1.0 + n, 100.0, checkpointing="full", world_size=ranks)
        for n, (name, ranks) in enumerate(itertools.product(names, (2, 4)))
    ]
    records.append(record(9, "ddp", 1.0, 100.0))
    chart = memory.peak(View("demo", records))
    assert chart
    wide, narrow = render.svgs({"wide": chart.spec, "narrow": render.fit(chart.spec, 318)}).values()
    assert "fsdp_full_shard + full checkpointing on 4 ranks" in wide and "…" not in wide
    assert narrow.count(">checkpointing on 4 ranks<") == 2 and "…" not in narrow


def test_small_charts_share_their_scales() -> None:
    """The faults were shapes by the variants of each strategy alone, and names of the strategy in every small chart."""
    kinds = ("none", "full", "attention", "selective")
    several_kinds = [("ddp", kind) for kind in kinds] + [("tp", "none"), ("zero3", "none"), ("cp", "full")]
    records = [
        record(10 * at + world, strategy, 2.0, 100.0 * world, world_size=world, checkpointing=kind)
        for at, (strategy, kind) in enumerate(several_kinds)
        for world in (2, 4)
    ]
    chart = speed.scaling(View("demo", thrice(records)))
    assert chart and chart.spec["facet"]["field"] == "strategy"
    text = render.svgs({"scaling": chart.spec})["scaling"]
    assert all(f">{strategy}</text>" in text for strategy in ("ddp", "tp", "zero3", "cp"))
    assert {datum["short"] for datum in data_of(chart.spec) if "short" in datum} == {*kinds[1:]}


def test_of_too_many_curves_the_fastest_of_every_strategy_is_drawn() -> None:
    """The fault was curves without speeds, of which the first ones were drawn."""
    kinds = (("ddp", "none", 1.0), ("ddp", "full", 9.0), ("tp", "none", 0.5))
    records = [
        record(10 * at + world, strategy, 2.0, each * world, world_size=world, checkpointing=kind)
        for at, (strategy, kind, each) in enumerate(kinds)
        for world in (2, 4)
    ]
    curves = select(by_world(View("demo", thrice(records)).lines), 2)
    assert [curve.label for curve in curves] == ["ddp + full checkpointing", "tp"]


def test_charts_have_no_empty_rows_panels_or_equal_titles() -> None:
    busy = [record(n, strategy, 1.0, 100.0, noise_warning="busy") for n, strategy in enumerate(("ddp", "tp"))]
    picture = first.first_picture(View("busy", busy))
    assert picture and picture.title == "Peak memory" and len(picture.spec["concat"]) == 1
    pipeline = record(3, "pp_1f1b", 1.0, 100.0, pp=2, exposed_communication_seconds=0.0)
    chart = speed.exposed_communication(View("demo", thrice([*several(), pipeline])))
    assert chart and "pp_1f1b" not in str(chart.table.rows) and "part of their idle time" in chart.alt_text
    sizes = [record(n, strategy, 1.0, 1.0, parameters=size) for n, (strategy, size) in enumerate(SIZES)]
    panels = tradeoffs.trade(View("sizes", thrice(sizes)))
    titles = [cell["title"]["text"] for cell in panels.spec["concat"]] if panels else []
    assert titles == ["With 100,000 parameters", "With 200,000 parameters"]


SIZES = list(itertools.product(("ddp", "tp"), (100_000, 200_000)))


def test_views_without_data_have_no_charts() -> None:
    failed = View("demo", [record(1, "ddp", 1.0, 1.0, status="oom")])
    assert [name for name, picture in PICTURES.items() if picture(failed) or picture(View("demo", []))] == []


# The matrices of Machado, Oliveira and Fernandes 2009 at severity 1, which apply to linear RGB.
DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
}


def lab(color: str, cone_matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """Return the CIELAB color (D65) of #rrggbb as it is seen."""
    plain = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in plain]
    linear = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in cone_matrix]
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(a * b for a, b in zip(row, linear, strict=True)) for row in matrix]
    x, y, z = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (xyz[0] / 0.9505, xyz[1], xyz[2] / 1.089)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def nearest(colors: tuple[str, ...], cone_matrix: tuple[tuple[float, ...], ...]) -> float:
    """Return the least CIE76 difference between two of the colors."""
    points = [lab(color, cone_matrix) for color in colors]
    return min(
        sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) ** 0.5 for p, q in itertools.combinations(points, 2)
    )


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colors_are_distinct_under_color_vision_deficiencies(deficiency: str) -> None:
    cone_matrix = DEFICIENCIES[deficiency]
    assert nearest(style.PALETTE[:7], cone_matrix) > 12
    assert nearest(style.PALETTE, cone_matrix) > 8
    assert nearest(("#3f90da", "#3f95da"), cone_matrix) < 5  # the measure knows what is near
    names = ["single", "ddp", *(f"other{n}" for n in range(8))]
    assert len(set(style.strategy_colors(names).values())) == len(names)
    assert style.strategy_colors(names[1:])["ddp"] == style.strategy_colors(names)["ddp"], "reports agree on colors"


def test_the_library_that_draws_is_imported_by_its_own_process() -> None:
    code = (
        "import sys\n"
        "from harness.report.charts import expected, first, memory, render, speed, style, tradeoffs\n"
        "print(*(name for name in ('vl_convert',) if name in sys.modules))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == []


def test_charts_of_repeats_use_the_largest_peak_and_the_median_speed() -> None:
    """Parts add up only within one run, because a line's medians and maxima have no parts."""
    gibs, speeds = (3.0, 5.0, 4.0), (1000.0, 3000.0, 2000.0)
    records = [
        record(n, "ddp", gib, tokens_per_second, repeat=n)
        for n, (gib, tokens_per_second) in enumerate(zip(gibs, speeds, strict=True))
    ]
    for entry in records:
        entry.config.update({"repeat": entry.row["repeat"]})
    view = View("demo", records)
    assert len(view.lines) == 1
    peak, step = memory.peak(view), speed.step(view)
    assert peak
    assert step
    assert sum(row.get(part, 0) for row in data_of(peak.spec) for part in PARTS.values()) == pytest.approx(5)
    assert sum(row[part] for row in data_of(step.spec) for part in TIMES.values()) == pytest.approx(1024 / 2)
    assert "the one with the median speed" in step.alt_text


def test_figures_that_are_not_finite_are_unknown() -> None:
    records = [record(1, "ddp", 1.0, 1000.0), record(2, "tp", 2.0, float("inf")), record(3, "cp", 3.0, 10.0)]
    records[2].row["step_seconds_iqr_ratio"] = float("inf")
    records[0].traffic[0]["bytes"] = float("nan")
    for picture in PICTURES.values():
        chart = picture(View("demo", records))
        assert chart is None or json.dumps([chart.spec, chart.table.rows], allow_nan=False)
    throughput = speed.throughput(View("demo", thrice(records)))
    assert throughput
    assert "2 configurations" in throughput.alt_text


def test_lines_that_differ_in_more_than_ranks_form_no_curve() -> None:
    pairs = [("ddp", 2, "fp32"), ("ddp", 4, "bf16"), ("tp", 2, "fp32"), ("zero3", 4, "fp32")]
    apart = [record(n, s, 1.0, 10.0, world_size=world, precision=p) for n, (s, world, p) in enumerate(pairs)]
    assert speed.scaling(View("demo", apart)) is None
    # A micro-batch that shrinks as ranks are added is no reason to draw nothing; equal ones are drawn first.
    batches = [record(n, "ddp", 1.0, 10.0, world_size=n, micro_batch=8 // n) for n in (1, 2, 4)]
    chart = speed.scaling(View("demo", thrice(batches)))
    assert chart
    assert [row[1] for row in chart.table.rows] == ["1", "2", "4"]
