"""The report's charts draw what was measured, as read back from the SVG independently of the code that drew it."""

import colorsys
import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cost_model.parts import PEAK_TITLES
from harness.records.schema import Record
from harness.report.charts import expected, memory, render, speed, style, tradeoffs
from harness.report.charts.bars import MOST
from harness.report.charts.curves import Points, by_world, select
from harness.report.charts.marks import axis as scale
from harness.report.charts.rows import Rows, numbers
from harness.report.document import FOLDER, Chart
from harness.report.labels import STEP_TITLES
from harness.report.lines import Item
from harness.report.view import View, truncate
from tests.support.example_records import GIB, MIB, PARTS, TIMES, record, thrice

HOSTILE = "\"]}' {datum.x} </svg><script>alert(1)</script> \x00\x1b[31m \u202e Übermaß && %s ${y}"

Charts = dict[str, Chart]

Trees = dict[str, ElementTree.Element]

PICTURES: dict[str, Callable[[View], Chart | None]] = {
    "first": tradeoffs.first_picture,
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


LIMIT = {"memory_limit_bytes": 12 * GIB}

SEVERAL = [
    record(1, "ddp", 10.0, 9000.0, **LIMIT),
    record(2, "zero1", 8.0, 8500.0, **LIMIT),
    record(3, "zero3", 4.0, 5000.0, **LIMIT),
    record(4, "tp", 4.5, 5500.0, **LIMIT),
    record(5, "fsdp_full_shard", 9.0, 1.0, status="oom", reason="rank 1 ran out", **LIMIT),
    record(6, "ddp", 6.0, 7000.0, checkpointing="full", activation_bytes=int(1.25 * GIB), **LIMIT),
    record(7, "cp", 7.0, 6500.0, **LIMIT),
    record(8, "zero2", 5.0, 5000.0, **LIMIT),
]

SPEEDS = {"ddp": (1000.0, 1800.0, 3000.0), "zero3": (900.0, 1700.0, 3300.0)}  # on 2, 4 and 8 ranks

GROWING = [
    record(10 * at + world, strategy, 2.0, SPEEDS[strategy][place], world_size=world)
    for (at, strategy), (place, world) in itertools.product(enumerate(SPEEDS), enumerate((2, 4, 8)))
]

BATCHED = [
    record(
        batch + 20 * (kind == "full"),
        *("ddp", 4.0, 1000.0),
        checkpointing=kind,
        micro_batch=batch,
        global_batch=2 * batch,
        activation_bytes=int(batch * each * GIB),
    )
    for (kind, each), batch in itertools.product((("none", 1.0), ("full", 0.25)), (1, 2, 4))
]

# Two strategies at three sizes of the model, of which one runs out of memory at the largest.
ENLARGED = [
    record(40 + 3 * at + size, strategy, size * each, 1000.0 / size, parameters=size * MIB, status=status, **LIMIT)
    for at, (strategy, each) in enumerate((("ddp", 3.0), ("zero3", 1.5)))
    for size, status in ((1, "ok"), (2, "ok"), (4, "oom" if each == 3 else "ok"))
]


# Names that are neither markup nor expressions, and axes that are not even text.
FAILED = record(4, f"4{HOSTILE}", 1.0, 1.0, status="error", reason=HOSTILE)

BAD = [
    dataclasses.replace(run, traffic=[part | {"axis": HOSTILE + "\ud800"} for part in run.traffic])
    for run in (*(record(n, f"{n}{HOSTILE}", n + 1, 1e3 * n, checkpointing=HOSTILE) for n in (1, 2, 3)), FAILED)
]


def with_losses(folder: Path, records: list[Record]) -> View:
    """Return the view of runs of which all but the second have their steps on file; that of the third is damaged."""
    folders = {entry.run_id: folder / entry.run_id for entry in records}
    steps = [
        [{"step": step, "phase": "timed", "loss": _loss(at, step)} for step in range(5)] for at in range(len(records))
    ]
    for at, path in enumerate(folders.values()):
        path.mkdir(parents=True)
        if at != 1:
            text = "".join(f"{json.dumps(step)}\n" for step in steps[at])
            (path / "steps.jsonl").write_text(text + '{"step": 5, "lo' * (at == 2))
    return View("demo", thrice(records), folders=folders)


def _loss(run: int, step: int) -> float:
    return 5.0 - step / 4 + (0.5 if run == 3 else run * 1e-6)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Charts:
    """Return every chart of the runs that have data for it, and all charts of hostile names."""
    own = {"scaling": GROWING, "batches": BATCHED, "wall": ENLARGED, "largest": ENLARGED}
    views = {name: View("demo", thrice(records)) for name, records in own.items()}
    usual, bad = (with_losses(tmp_path_factory.mktemp("runs"), records) for records in (SEVERAL, BAD))
    charts = {name: picture(views.get(name, usual)) for name, picture in PICTURES.items()}
    assert all(charts.values())
    charts |= {f"hostile {name}": picture(bad) for name, picture in PICTURES.items()}
    return {name: picture for name, picture in charts.items() if picture}


@pytest.fixture(scope="module")
def texts(drawn: Charts) -> dict[str, str]:
    """Return every chart as SVG, and all but the hostile ones with one strategy hidden, drawn by one process."""
    specs = {name: picture.spec for name, picture in drawn.items()}
    return render.svgs(specs | {f"hidden {name}": hiding(drawn[name].spec, "ddp") for name in PICTURES})


def hiding(spec: Mapping[str, Any], *strategies: str) -> dict[str, Any]:
    others = [param for param in spec["params"] if param["name"] != "hidden"]
    return {**spec, "params": [*others, {"name": "hidden", "value": list(strategies)}]}


@pytest.fixture(scope="module")
def trees(texts: dict[str, str]) -> Trees:
    return {name: ElementTree.fromstring(text) for name, text in texts.items()}


class Mark:
    """A mark with its label and its position in pixels from the plot's left and top."""

    def __init__(self, element: ElementTree.Element) -> None:
        self.element = element
        label = element.attrib.get("aria-label", "")
        self.texts = dict(part.split(": ", 1) for part in label.split("; ") if ": " in part)
        self.run, self.text = self.texts.get("run", ""), element.text or ""
        moved = re.match(r"translate\(([-\d.]+),([-\d.]+)\)", element.attrib.get("transform", ""))
        self.x, self.y = (float(moved[1]), float(moved[2])) if moved else (0.0, 0.0)

    @property
    def box(self) -> tuple[float, float]:
        """Return the left edge and the width of a bar, or the left edge of a tick."""
        path = re.match(r"M([-\d.]+),[-\d.]+h([-\d.]+)", self.element.attrib["d"])
        return float(path[1]), float(path[2])

    @property
    def corners(self) -> list[tuple[float, float]]:
        return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", self.element.attrib["d"])]


def marks(tree: ElementTree.Element, *kinds: str) -> list[Mark]:
    return [Mark(element) for element in tree.iter() if element.attrib.get("aria-roledescription") in kinds]


def axis(tree: ElementTree.Element, letter: str) -> Callable[[float], float]:
    """Return the map from pixels to the axis's own values, by two of its labelled ticks."""
    group = next(g for g in tree.iter() if g.attrib.get("aria-label", "").startswith(f"{letter}-axis"))

    def placed(kind: str) -> list[tuple[float, str]]:
        groups = [g for g in group.iter() if kind in g.attrib.get("class", "")]
        return [(getattr(mark, letter.lower()), mark.text) for g in groups for mark in map(Mark, g)]

    ticks = [position for position, _ in placed("role-axis-tick")]
    pairs = [
        (min(ticks, key=lambda tick: abs(tick - position)), float(text.replace(",", "").replace("−", "-")))
        for position, text in placed("role-axis-label")
    ]
    (first, low), (last, high) = pairs[0], pairs[-1]
    return lambda pixels: low + (pixels - first) * (high - low) / (last - first)


def labelled(records: list[Record]) -> dict[str, Record]:
    """Return the records that are ok, by their label."""
    kinds = {"none": "", "full": " + full checkpointing"}
    return {f"{r.row['strategy']}{kinds[r.row['checkpointing']]}": r for r in records if r.row["status"] == "ok"}


KNOWN = {label: entry.row for label, entry in labelled(SEVERAL).items()}

SENT = {(f"{run} · {part['axis']}", ""): part for run, entry in labelled(SEVERAL).items() for part in entry.traffic}

DUE = {bar: part for bar, part in SENT.items() if part["formula_bytes"] not in (None, part["bytes"])}

# The length of every bar on its axis, and the place of every tick, by the bar and its part.
FIGURES: dict[tuple[str, str], dict[tuple[str, str], float]] = {
    ("peak", "bar"): {
        (run, title): row[f"at_peak_{part}_bytes"] / GIB for run, row in KNOWN.items() for part, title in PARTS.items()
    },
    ("step", "bar"): {(run, part): 1000 * row[name] for run, row in KNOWN.items() for name, part in TIMES.items()},
    ("exposed", "bar"): {
        (run, "exposed communication"): 1000 * row["exposed_communication_seconds"] for run, row in KNOWN.items()
    },
    ("throughput", "bar"): {(run, ""): row["tokens_per_second"] for run, row in KNOWN.items()},
    ("traffic", "bar"): {bar: part["bytes"] / MIB for bar, part in SENT.items()},
    ("traffic", "tick"): {bar: part["formula_bytes"] / MIB for bar, part in DUE.items()},
    ("checkpointing", "bar"): {("ddp + full checkpointing", ""): 40.0},
    ("checkpointing", "tick"): {("ddp + full checkpointing", ""): 75.0},
    ("largest", "bar"): {("ddp", ""): 2 * MIB / 1e6, ("zero3", ""): 4 * MIB / 1e6},
}


@pytest.mark.parametrize(("name", "kind"), FIGURES)
def test_every_bar_and_tick_has_its_figure(name: str, kind: str, trees: Trees) -> None:
    """Bars of one run begin where the one before ends, so that they end at the sum of its parts."""
    scale, found = axis(trees[name], "X"), marks(trees[name], kind)
    spans = {(mark.texts["bar"].replace("\n", " "), mark.texts.get("part", "")): mark.box for mark in found}
    places = {bar: scale(width if kind == "bar" else left + width / 2) for bar, (left, width) in spans.items()}
    assert len(found) == len(spans) and places == pytest.approx(FIGURES[name, kind], abs=0.01, rel=1e-2)
    for run in {run for run, _ in spans if kind == "bar"}:
        boxes = sorted(box for (other, _), box in spans.items() if other == run)
        assert boxes[0][0] == scale(0) == 0
        assert [left + width for left, width in boxes[:-1]] == pytest.approx([left for left, _ in boxes[1:]], abs=0.01)


# The run of every point, and its place on both axes.
POINTS: dict[str, list[tuple[str, float, float]]] = {
    "trade": [(run, row["tokens_per_second"], row["peak_allocated_bytes"] / GIB) for run, row in KNOWN.items()],
    "predicted": [
        (run, row["predicted_peak_bytes"] / GIB, row["peak_allocated_bytes"] / GIB) for run, row in KNOWN.items()
    ],
    "scaling": [(r.row["strategy"], r.row["world_size"], r.row["tokens_per_second"]) for r in GROWING],
    "batches": [
        (run, size, size * each)
        for (run, each), size in itertools.product((("ddp", 1.0), ("ddp + full checkpointing", 0.25)), (1, 2, 4))
    ],
    "wall": [
        (r.row["strategy"], r.row["parameters"] / 1e6, r.row["peak_allocated_bytes"] / GIB)
        for r in ENLARGED
        if r.row["status"] == "ok"
    ],
}


@pytest.mark.parametrize("name", POINTS)
def test_every_point_stands_at_its_figures(name: str, trees: Trees) -> None:
    across, up = axis(trees[name], "X"), axis(trees[name], "Y")
    points = sorted((point.run, across(point.x), up(point.y)) for point in marks(trees[name], "point"))
    runs, *places = zip(*points, strict=True)
    expected_runs, *expected = zip(*sorted(POINTS[name]), strict=True)
    assert runs == expected_runs and places == [pytest.approx(figures, rel=1e-2) for figures in expected]


# The text of marks, of the description and of the table that are particular to a chart.
WORDS = {
    "peak": ("memory limit 12.00 GiB", "oom, last reported 7.00 GiB", "The device's memory limit is 12.00 GiB"),
    "hidden peak": ("memory limit 12.00 GiB", "oom, last reported 7.00 GiB"),
    "batches": ("×",),
    "checkpointing": ("+29 %~", "~: not certain"),
    "wall": ("×", "memory limit 12.00 GiB", "1 ran out of memory"),
    "losses": ("ddp and 3 more",),
    "scaling": ("90.0", "75.0", "91.7"),
    "predicted": ("+1.00", "+8.00"),
}

UNITS = r"\((GiB|MiB|ms|%|sequences|millions)|^(tokens|number of ranks$|step \(|loss$)"


def test_every_chart_has_units_a_description_and_a_table(drawn: Charts, texts: dict[str, str], trees: Trees) -> None:
    for name in PICTURES:
        labels = [g.attrib.get("aria-label", "") for g in trees[name].iter()]
        titles = [title[1] for label in labels if (title := re.match(r"[XY]-axis titled '(.*?)' for a linear", label))]
        assert titles and all(re.search(UNITS, title) for title in titles), titles
        runs = {mark.run for mark in marks(trees[name], "bar", "point", "line mark")} - {""}
        assert runs <= {row[0] for row in drawn[name].table.rows}, name
    for name, words in WORDS.items():
        chart = drawn[name.removeprefix("hidden ")]
        text = " ".join(["".join(trees[name].itertext()), chart.alt_text, *itertools.chain(*chart.table.rows)])
        assert [word for word in words if word not in text] == [], name
    assert (texts["batches"].count(">×<"), texts["wall"].count(">×<")) == (6, 1)
    assert drawn["checkpointing"].table.rows == [["ddp + full checkpointing", "full", "40.0", "75.0", "28.6~"]]


def test_the_limit_stands_at_its_size_and_beyond_the_axis_is_described_alone(trees: Trees) -> None:
    for name in ("peak", "hidden peak"):
        (rule,) = marks(trees[name], "rule mark")
        assert axis(trees[name], "X")(rule.x) == pytest.approx(12, abs=0.01)
    far = [record(n, s, 1.0, 100.0, memory_limit_bytes=80 * GIB) for n, s in enumerate(("ddp", "tp"), start=1)]
    chart = memory.peak(View("demo", far))
    assert "beyond the axis" in chart.alt_text and chart.spec["datasets"]["limits"] == []


def test_bars_of_speed_are_in_order_and_have_their_spread(trees: Trees) -> None:
    """The range goes from the slowest to the fastest repeat."""
    scale, bars = axis(trees["throughput"], "X"), marks(trees["throughput"], "bar")
    assert [bar.run for bar in bars] == sorted(KNOWN, key=lambda run: -KNOWN[run]["tokens_per_second"])
    rules = {rule.run: rule for rule in marks(trees["throughput"], "rule mark")}
    for share, length in ((0.9, 0), (1.1, 1)):
        ends = {run: scale(rule.x + length * float(rule.element.attrib["x2"])) for run, rule in rules.items()}
        expected = {run: share * row["tokens_per_second"] for run, row in KNOWN.items()}
        assert ends == pytest.approx(expected, rel=1e-3)


def corners(tree: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """Return the corners of every line, in the axes' own values."""
    across, up = axis(tree, "X"), axis(tree, "Y")
    return {line.run: [(across(x), up(y)) for x, y in line.corners] for line in marks(tree, "line mark")}


def on_front(chart: Chart) -> set[str]:
    """Return the runs that a table has on the front."""
    return {row[0] for row in chart.table.rows if "yes" in row}


def test_lines_connect_what_they_should(drawn: Charts, trees: Trees) -> None:
    """They are the front, the diagonal of right predictions, and linear scaling."""
    front = ["zero3", "ddp + full checkpointing"]
    expected = [(KNOWN[run]["tokens_per_second"], KNOWN[run]["peak_allocated_bytes"] / GIB) for run in front]
    assert corners(trees["trade"])[""] == [pytest.approx(corner, rel=1e-2) for corner in expected]
    assert on_front(drawn["trade"]) == set(front)
    assert [x - y for x, y in corners(trees["predicted"])[""]] == pytest.approx([0, 0], abs=0.05)
    lines = marks(trees["scaling"], "line mark")
    ideals = [line.corners[-1][1] for line in lines if line.element.attrib.get("stroke-dasharray") == "4,3"]
    assert sorted(map(axis(trees["scaling"], "Y"), ideals)) == pytest.approx([3600, 4000], rel=1e-2)


def test_losses_are_drawn_for_runs_that_have_them(trees: Trees) -> None:
    """Four of the curves coincide and take turns."""
    places = {"ddp": 0, "tp": 3, "ddp + full checkpointing": 5, "cp": 6, "zero2": 7}
    assert corners(trees["losses"]) == {
        run: [pytest.approx((step, _loss(at, step)), abs=0.01) for step in range(5)] for run, at in places.items()
    }
    looks = {line.run: line.element.attrib for line in marks(trees["losses"], "line mark")}
    assert looks.pop("tp")["stroke-dasharray"] == "10,0"
    assert {look["stroke-dasharray"] for look in looks.values()} == {"10,30"}
    assert sorted(float(look.get("stroke-dashoffset", "0")) for look in looks.values()) == [-30, -20, -10, 0]


def test_the_front_is_over_all_runs_however_few_are_drawn() -> None:
    """The fault was a front over the drawn runs, which called one unbeaten that an undrawn one beat in both."""
    records = [record(n, f"s{n % 3}", 9.0 - n / 4, 100.0 * 1.5**n, micro_batch=n + 1) for n in range(12)]
    view = View("demo", thrice(records, 0.01))
    whole, few = tradeoffs.trade(view), tradeoffs.trade(truncate(view, 12))
    assert len(few.table.rows) == 4 < len(whole.table.rows) == 12
    assert on_front(whole) == on_front(few) and len(on_front(whole)) == 1, "the smallest is the fastest"


def test_speeds_of_few_runs_rank_nothing_and_disturbed_ones_are_not_drawn() -> None:
    records = [*thrice([record(1, "ddp", 4.0, 900.0), record(2, "tp", 3.0, 500.0)]), record(3, "zero1", 2.0, 950.0)]
    records += [record(4, "zero3", 1.0, 7000.0, noise_warning="busy"), record(5, "cp", 1.5, 8000.0, **BRIEF)]
    view = View("demo", records)
    charts = {chart.name: chart for picture in (tradeoffs.first_picture, *TIMED) if (chart := picture(view))}
    assert charts.keys() == {"first", "throughput", "trade", "step", "exposed"}
    for name, text in render.svgs({name: chart.spec for name, chart in charts.items()}).items():
        tree = ElementTree.fromstring(text)
        ranges = {mark.run for mark in marks(tree, "rule mark")}
        assert ranges == (set() if name in COLORED_BY_PART else {"ddp", "tp"}), "one run has no range"
        kinds = ("point", "tick") if name == "first" else ("bar", "point", "tick")  # its other bars are of memory
        assert not {mark.run for mark in marks(tree, *kinds)} & {"zero3", "cp"}, name
        words = [mark.text for mark in marks(tree, "text mark")]
        assert name == "trade" or sum(word.startswith("disturbed") for word in words) == 2
    assert on_front(charts["trade"]) == {"tp", "ddp"}


BRIEF: dict[str, Any] = {"step_seconds_iqr_ratio": None}  # too few steps were timed

TIMED = (speed.throughput, speed.scaling, tradeoffs.trade, speed.step, speed.exposed_communication)


def test_without_ranked_speeds_charts_are_of_memory_and_bytes_sent() -> None:
    """Neither single runs nor ranks that share cores have a speed or a time in a chart."""
    crowd = [
        dataclasses.replace(
            record(n, name, n, 9e3, world_size=4, measured_on="cpu", communication_bytes=n), environment={"cores": 2}
        )
        for n, name in ((1, "ddp"), (2, "tp"))
    ]
    single = [record(n, name, n, 9e3, communication_bytes=n) for n, name in ((1, "ddp"), (2, "tp"))]
    for records in (single, thrice(crowd)):
        view = View("demo", records)
        assert not any(picture(view) for picture in TIMED)
        picture = tradeoffs.first_picture(view)
        assert picture.title == "Memory and communication" and len(picture.spec["concat"]) == 2
        assert "tokens" not in json.dumps([picture.spec, picture.table.header, picture.alt_text])
    ranked = thrice([record(1, "ddp", 1.0, 9e3), record(2, "tp", 2.0, 9e2)])
    chart = speed.throughput(View("demo", [*ranked, *thrice(crowd)]))
    assert "Not drawn are the times of more ranks than cores" in chart.alt_text
    crowded = [row for row in chart.table.rows if row[1] == "more ranks than cores: not comparable"]
    assert len(crowded) == 2 and all(row[2:] == ["", "", "", ""] for row in crowded)


@pytest.mark.parametrize(("away", "mark"), [(0.01, ""), (0.2, "~")])
def test_a_cost_of_checkpointing_that_repeats_do_not_show_is_marked(away: float, mark: str) -> None:
    pair = [record(1, "ddp", 2.0, 9e3), record(2, "ddp", 1.0, 7e3, checkpointing="full")]
    chart = tradeoffs.checkpointing(View("demo", thrice(pair, away)))
    assert chart.table.rows[0][-1] == f"28.6{mark}"
    assert ("no certain difference: ddp + full checkpointing" in chart.alt_text) == bool(mark)


COLORED_BY_PART = ("peak", "step", "exposed")


def test_a_strategy_and_a_part_have_one_color_in_all_charts(trees: Trees) -> None:
    colors: dict[str, set[str]] = {}
    for name in PICTURES:
        for mark in marks(trees[name], "bar", "point", "line mark"):
            named = mark.texts.get("part", "") if name in COLORED_BY_PART else mark.run.split(" ")[0]
            fill = mark.element.attrib.get("fill", "none")
            color = mark.element.attrib["stroke"] if fill in ("none", "transparent") else fill
            colors.setdefault(named, set()).add(color)
    strategies = {row["strategy"] for row in KNOWN.values()}
    assert strategies | {"activations", "backward"} <= colors.keys() and len(strategies) == 6
    assert {name: found for name, found in colors.items() if name and len(found) > 1} == {}
    assert len(set.union(*(colors[name] for name in strategies))) == len(strategies)


@pytest.mark.parametrize("count", [8, 40, 150])
def test_labels_of_crowded_points_cover_neither_points_nor_each_other(count: int) -> None:
    chance, (width, height) = random.Random(7), (620, 340)
    plot = Points(View("demo", []), Rows([], {}), scale("", (0, 1)), scale("", (0, 1)))
    points = [{"x": chance.random(), "y": chance.random(), "name": f"strategy{place}"} for place in range(count)]
    boxes = []
    for label in plot.placed(points, [], (width, height)):
        length, middle = 5.9 * len(label["short"]), (1 - label["y"]) * height + label["dy"]
        left = label["x"] * width + label["dx"] - ALIGNED[label["align"]] * length
        boxes.append((left, middle - 6, left + length, middle + 6))
    assert {8: 8, 40: 38, 150: 20}[count] <= len(boxes) <= count
    dots = [(x, y, x, y) for x, y in ((p["x"] * width, (1 - p["y"]) * height) for p in points)]
    for (left, top, end, bottom), other in [*itertools.permutations(boxes, 2), *itertools.product(boxes, dots)]:
        assert not (left < other[2] and other[0] < end and top < other[3] and other[1] < bottom)


ALIGNED = {"left": 0.0, "center": 0.5, "right": 1.0}


def test_hidden_strategies_are_not_drawn(trees: Trees) -> None:
    kinds = ("bar", "point", "line mark", "tick", "text mark", "rule mark")
    for name in PICTURES:
        shown, left = (sorted(m.run for m in marks(trees[f"{h}{name}"], *kinds) if m.run) for h in ("", "hidden "))
        assert shown != left == [run for run in shown if not run.startswith("ddp")], name


def data_of(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return all rows of a spec, which lie under the name that a layer, or the whole spec, refers to."""
    plots = spec.get("concat", [spec.get("spec", spec)])
    parts = [spec, *itertools.chain(*(plot["layer"] for plot in plots))]
    assert {part["data"]["name"] for part in parts if "data" in part} == spec["datasets"].keys()
    return [*itertools.chain(*spec["datasets"].values())]


def test_specs_have_the_fields_that_the_page_needs(drawn: Charts) -> None:
    for name, picture in drawn.items():
        spec, table = picture.spec, picture.table
        assert "config" not in spec and {"name": "hidden", "value": []} in spec["params"]
        assert "2 ranks" in " ".join(spec["title"]["subtitle"]) or name == "scaling", "the setting is in the picture"
        assert picture.name == name.removeprefix("hostile ") and re.fullmatch(r"[a-z0-9-]+", picture.name)
        assert spec["description"] == picture.alt_text
        assert {row["strategy"] for row in data_of(spec)} - {""}
        assert all(re.fullmatch(r"[a-z ]+", field) for field in re.findall(r'"field": "([^"]*)"', json.dumps(spec)))
        assert len(table.rows) == len(table.strategies) and {len(row) for row in table.rows} == {len(table.header)}


def test_hostile_names_are_text_and_nothing_else(trees: Trees) -> None:
    names = [name for name in trees if name.startswith("hostile")]
    assert {"hostile peak", "hostile trade", "hostile traffic", "hostile losses"} <= set(names)
    for name in names:
        elements = list(trees[name].iter())
        tags = {element.tag.rsplit("}", 1)[-1] for element in elements}
        assert tags <= {"svg", "desc", "rect", "g", "path", "text", "tspan", "line", "title"}, name
        assert not [key for element in elements for key in element.attrib if re.match("on|.*href$", key)]
        labels = " ".join(element.attrib.get("aria-label", "") for element in elements)
        assert "</svg><script>alert(1)</script>" in labels and "Übermaß" in labels


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


def test_equal_data_give_equal_svgs_and_dark_ones_differ_only_in_colors(
    drawn: Charts, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards = {name: drawn[name].spec for name in reversed(PICTURES)}
    assert render.svgs(backwards) == {name: texts[name] for name in backwards}
    monkeypatch.setattr(style, "config", partial(style.config, dark=True))
    dark = render.svgs({"peak": drawn["peak"].spec})["peak"]
    light, plain = (re.sub(r'"#[0-9a-f]{6}"', "", text) for text in (texts["peak"], dark))
    assert dark != texts["peak"] and plain == light


ABORTS: dict[str, Any] = {
    "mark": "bar",
    "data": {"values": [{"a": "\x00"}]},
    "encoding": {"x": {"field": "a"}},
}


@pytest.mark.parametrize(
    ("spec", "seconds", "reason"),
    [
        ({}, None, r"not drawn: chart: .*Invalid specification"),
        (ABORTS, None, "ended by signal 6"),
        (ABORTS, 0.01, r"within 0\.01 s"),
    ],
)
def test_a_chart_that_cannot_be_drawn_raises_an_error_with_the_reason(
    spec: dict[str, Any], seconds: float | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "_SECONDS", seconds or render._SECONDS)
    with pytest.raises(render.DrawingError, match=reason):
        render.svgs({"chart": spec})


def test_without_the_library_there_are_no_charts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command must not end in a traceback after all its runs."""

    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(render, "version", version)
    with render.failure_told("report.html is not written"):
        render.library()
    printed = capsys.readouterr().err
    assert printed.startswith("report.html is not written: ") and "vl-convert-python" in printed


def test_the_library_is_cached_and_rebuilt_if_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_CACHE", tmp_path / "new")
    library = render.library()
    assert "window.vegaEmbed" in library and "</script" not in library
    (file,) = (tmp_path / "new").iterdir()
    file.write_text("kept")
    assert render.library() == "kept"


def test_bars_beyond_the_limit_are_drawn_when_others_are_hidden() -> None:
    """The fault was a cut that dropped strategies from every chart, even after the reader hid all others."""
    chart = memory.peak(
        View("demo", [record(n, f"s{n % 5}", 1 + n / 10, 1e2 + n, seq_len=n) for n in range(MOST + 10)])
    )
    assert f"{MOST} of {MOST + 10} configurations are drawn at once" in chart.alt_text
    order = chart.spec["usermeta"]["order"]
    assert len(order) == len(chart.table.rows) == MOST + 10
    visible = [place for place, strategy in enumerate(order) if strategy != "s0"]
    last = visible[: chart.spec["usermeta"]["most"]][-1]
    params = [{"name": "hidden", "value": ["s0"]}, {"name": "last", "value": last}]
    texts = render.svgs({"all": chart.spec, "some": {**chart.spec, "params": params}})
    every, some = ({mark.run for mark in marks(ElementTree.fromstring(text), "bar")} for text in texts.values())
    assert len(every) == MOST and len(some) == len(visible) and not any(run.startswith("s0") for run in some)


def test_no_label_of_a_bar_is_cut_where_there_is_little_width() -> None:
    """The fault was "fsdp_full_shard + full checkpointing on …" on several bars of 84 mm."""
    kinds = itertools.product(("fsdp_full_shard", "fsdp_hybrid_shard"), (2, 4))
    records = [record(n, s, 1.0 + n, 1e2, checkpointing="full", world_size=world) for n, (s, world) in enumerate(kinds)]
    chart = memory.peak(View("demo", [*records, record(9, "ddp", 1.0, 100.0)]))
    wide, narrow = render.svgs({"wide": chart.spec, "narrow": render.fit(chart.spec, 318)}).values()
    assert "fsdp_full_shard + full checkpointing on 4 ranks" in wide and "…" not in wide + narrow
    assert narrow.count(">checkpointing on 4 ranks<") == 2


def worlds(*kinds: tuple[str, str, float]) -> View:
    """Return runs of each strategy and checkpointing on 2 and 4 ranks, with this speed for each rank."""
    cases = itertools.product(enumerate(kinds), (2, 4))
    return View(
        "demo",
        thrice(
            [
                record(10 * at + world, strategy, 2.0, each * world, world_size=world, checkpointing=kind)
                for (at, (strategy, kind, each)), world in cases
            ]
        ),
    )


def test_small_charts_share_their_scales() -> None:
    """The faults were shapes by the variants of each strategy alone, and names of the strategy in every small chart."""
    kinds = ("none", "full", "attention", "selective")
    others = (("tp", "none", 1e2), ("zero3", "none", 1e2), ("cp", "full", 1e2))
    chart = speed.scaling(worlds(*(("ddp", kind, 1e2) for kind in kinds), *others))
    assert chart.spec["facet"]["field"] == "strategy"
    text = render.svgs({"scaling": chart.spec})["scaling"]
    assert all(f">{strategy}</text>" in text for strategy in ("ddp", "tp", "zero3", "cp"))
    assert {datum["short"] for datum in data_of(chart.spec) if "short" in datum} == {*kinds[1:]}


def test_of_too_many_curves_the_fastest_of_every_strategy_is_drawn() -> None:
    """The fault was curves without speeds, of which the first ones were drawn."""
    view = worlds(("ddp", "none", 1.0), ("ddp", "full", 9.0), ("tp", "none", 0.5))
    assert [curve.label for curve in select(by_world(view.lines), 2)] == ["ddp + full checkpointing", "tp"]


def test_charts_have_no_empty_rows_panels_or_equal_titles() -> None:
    busy = [record(n, strategy, 1.0, 100.0, noise_warning="busy") for n, strategy in enumerate(("ddp", "tp"))]
    picture = tradeoffs.first_picture(View("busy", busy))
    assert picture.title == "Peak memory" and len(picture.spec["concat"]) == 1
    pipeline = record(9, "pp_1f1b", 1.0, 100.0, pp=2, exposed_communication_seconds=0.0)
    chart = speed.exposed_communication(View("demo", thrice([*SEVERAL, pipeline])))
    assert "pp_1f1b" not in str(chart.table.rows) and "part of their idle time" in chart.alt_text
    sizes = itertools.product(("ddp", "tp"), (100_000, 200_000))
    panels = tradeoffs.trade(
        View("sizes", thrice([record(n, s, 1.0, 1.0, parameters=p) for n, (s, p) in enumerate(sizes)]))
    )
    titles = [cell["title"]["text"] for cell in panels.spec["concat"]]
    assert titles == ["With 100,000 parameters", "With 200,000 parameters"]


def test_views_without_data_have_no_charts() -> None:
    views = View("demo", [record(1, "ddp", 1.0, 1.0, status="oom")]), View("demo", [])
    assert [name for name, picture in PICTURES.items() if any(map(picture, views))] == []


# The matrices of Machado, Oliveira and Fernandes 2009 at severity 1, which apply to linear RGB.
DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
}

XYZ = np.array(((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)))


def lab(color: str, deficiency: str) -> Any:
    """Return the CIELAB color (D65) of #rrggbb as it is seen."""
    plain = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(plain <= 0.04045, plain / 12.92, ((plain + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ (np.array(DEFICIENCIES[deficiency]) @ linear).clip(0, 1) / (0.9505, 1, 1.089)
    x, y, z = np.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return np.array((116 * y - 16, 500 * (x - y), 200 * (y - z)))


def nearest(colors: Sequence[str], deficiency: str) -> float:
    """Return the least CIE76 difference between two of the colors."""
    points = [lab(color, deficiency) for color in colors]
    return min(float(np.linalg.norm(p - q)) for p, q in itertools.combinations(points, 2))


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colors_are_distinct_under_color_vision_deficiencies(deficiency: str) -> None:
    assert nearest(style.PALETTE[:7], deficiency) > 12 and nearest(style.PALETTE, deficiency) > 8
    assert nearest(style.PARTS, deficiency) > 12
    assert nearest(("#3f90da", "#3f95da"), deficiency) < 5  # the measure knows what is near
    names = ["single", "ddp", *(f"other{n}" for n in range(8))]
    assert len(set(style.strategy_colors(names).values())) == len(names)
    assert style.strategy_colors(names[1:])["ddp"] == style.strategy_colors(names)["ddp"], "reports agree on colors"


def hue(color: str) -> float:
    return 360 * colorsys.rgb_to_hsv(*(int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)))[0]


def test_a_hue_has_one_meaning() -> None:
    """Parts of a step and of a peak have none of the hues of strategies, and the frame of the page has no hue."""
    assert len(style.PARTS) >= max(len(STEP_TITLES), len(PEAK_TITLES)) + 1, "and what is overlapped or undivided"
    assert min(abs(hue(part) - hue(own)) for part in style.PARTS for own in style.PALETTE) > 30
    css = (FOLDER / "page.css").read_text(encoding="utf-8")
    frame = set(re.findall(r"#[0-9a-f]{6}", css))
    channels = [[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in frame]
    assert len(frame) > 10 and max(max(levels) - min(levels) for levels in channels) < 24, "greys"


def test_the_library_that_draws_is_imported_by_its_own_process() -> None:
    code = (
        "import sys\n"
        "from harness.report.charts import expected, memory, render, speed, style, tradeoffs\n"
        "assert 'vl_convert' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_charts_of_repeats_use_the_largest_peak_and_the_median_speed() -> None:
    """Parts add up only within one run, because a line's medians and maxima have no parts."""
    figures = enumerate(((3.0, 1000.0), (5.0, 3000.0), (4.0, 2000.0)))
    records = [dataclasses.replace(record(n, "ddp", *own, repeat=n), config={"repeat": n}) for n, own in figures]
    view = View("demo", records)
    peak, step = memory.peak(view), speed.step(view)
    assert len(view.lines) == 1
    assert sum(row.get(part, 0) for row in data_of(peak.spec) for part in PARTS.values()) == pytest.approx(5)
    assert sum(row[part] for row in data_of(step.spec) for part in TIMES.values()) == pytest.approx(1024 / 2)
    assert "the median run (of an even number, the slower one of the middle two)" in step.alt_text


def test_figures_that_are_not_finite_are_unknown() -> None:
    disturbed = record(3, "cp", 3.0, 10.0, step_seconds_iqr_ratio=float("inf"))
    records = [record(1, "ddp", 1.0, 1000.0), record(2, "tp", 2.0, float("inf")), disturbed]
    records[0].traffic[0]["bytes"] = float("nan")
    charts = filter(None, (picture(View("demo", records)) for picture in PICTURES.values()))
    assert all(json.dumps([chart.spec, chart.table.rows], allow_nan=False) for chart in charts)
    throughput = speed.throughput(View("demo", thrice(records)))
    assert "2 configurations" in throughput.alt_text


def test_lines_that_differ_in_more_than_ranks_form_no_curve() -> None:
    """A micro-batch that shrinks as ranks are added is no reason to draw nothing; equal ones are drawn first."""
    pairs = [("ddp", 2, "fp32"), ("ddp", 4, "bf16"), ("tp", 2, "fp32"), ("zero3", 4, "fp32")]
    apart = [record(n, s, 1.0, 10.0, world_size=world, precision=p) for n, (s, world, p) in enumerate(pairs)]
    assert speed.scaling(View("demo", apart)) is None
    batches = [record(n, "ddp", 1.0, 10.0, world_size=n, micro_batch=8 // n) for n in (1, 2, 4)]
    chart = speed.scaling(View("demo", thrice(batches)))
    assert [row[1] for row in chart.table.rows] == ["1", "2", "4"]
