"""Every claim of the answers, recomputed from runs.csv over random folders by other code than wrote it."""

import csv
import math
import random
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cost_model.parts import PEAK_TITLES
from harness.records.runs_csv import rows_of, write_runs_csv
from harness.records.schema import Record
from harness.report.comparison_columns import comparison_columns
from harness.report.document import BulletList, Disturbed
from harness.report.findings import findings
from harness.report.first_screen import FirstScreen, first_screen, launch_bound
from harness.report.labels import STEP_TITLES
from harness.report.view import View
from tests.support.example_records import FAILED, MIB, record_of, row

STRATEGIES = ("ddp", "zero1", "zero3", "fsdp_full_shard", "tp", "pp_1f1b", "cp", "single")


def random_folder(draw: random.Random) -> list[Record]:
    """Return repeated runs of up to eight configurations on two ranks, some failed, disturbed or barely timed."""
    records: list[Record] = []
    kinds = draw.sample([(strategy, kind) for strategy in STRATEGIES for kind in ("none", "full")], draw.randint(1, 8))
    noise, calm = draw.choice((0.002, 0.02, 0.1)), draw.choice((1.0, 1.0, 0.9, 0.2))
    for number, (strategy, kind) in enumerate(kinds):
        middle, peak = (
            draw.choice((1000, 1100, draw.uniform(300, 3000), draw.uniform(300, 3000))),
            draw.randint(4, 9) * MIB,
        )
        shared: dict[str, Any] = {"checkpointing": kind, "communication_bytes": draw.choice((0, 1, 3)) * MIB}
        shared |= {"executed_flops": 1_000_000 * (130 if kind == "full" else 100), "attention_kernel": "flash"}
        shared |= {"activation_bytes": draw.choice((1, 2)) * MIB, "predicted_peak_bytes": draw.randint(3, 9) * MIB}
        shared |= {"proven_steps": draw.choice((6, 16, 16))}
        shared |= {"pipeline_bubble": 0.67, "pipeline_bubble_theory": 0.5} if strategy == "pp_1f1b" else {}
        wobble = draw.choice((0.05, 0.5))
        usual = [draw.uniform(0.1, 1) for _ in STEP_TITLES]
        for repeat in range(draw.choice((1, 2, 3, 3, 3, 4))):
            speed = middle * draw.gauss(1, noise)
            shares = [share * abs(draw.gauss(1, wobble)) for share in usual]
            step = 1024 / speed
            parts = {name: step * share / sum(shares) for name, share in zip(STEP_TITLES, shares, strict=True)}
            blocks = {"parameter": MIB, "activation": draw.randint(0, 3) * MIB}
            changes = shared | {"repeat": repeat, "tokens_per_second": speed, "step_seconds": step, **parts}
            changes |= {f"at_peak_{name}_bytes": size for name, size in blocks.items()}
            own = peak - MIB // 8 if number % 4 == 1 and repeat % 2 else peak
            changes |= {"peak_allocated_bytes": own, "at_peak_temporary_bytes": own - sum(blocks.values())}
            if draw.random() > calm:
                changes |= draw.choice(({"noise_warning": "busy"}, {"step_seconds_iqr_ratio": None}))
            if draw.random() < 0.1:
                changes |= FAILED | {"status": "oom", "reason": "out of memory"}
            records.append(record_of(row(10 * number + repeat, strategy, "torch", 0, **changes)))
    return records


class Oracle:
    """The configurations of a runs.csv, by the labels that sentences use."""

    def __init__(self, path: Path) -> None:
        self.runs: dict[str, list[dict[str, str]]] = {}
        with path.open(newline="", encoding="utf-8") as file:
            entries = list(csv.DictReader(file))
            strategies, kinds = ({entry[name] for entry in entries} for name in ("strategy", "checkpointing"))
            named = len(kinds) > 1 or len(strategies) == 1  # what all strategies share is in no label
            for entry in entries:
                kind = entry["checkpointing"] if named else "none"
                label = entry["strategy"] + ("" if kind == "none" else f" + {kind} checkpointing")
                self.runs.setdefault(label, []).append(entry)
        self.ok = {label: ok for label, runs in self.runs.items() if (ok := [r for r in runs if r["status"] == "ok"])}
        self.calm = {
            label: [run for run in runs if not run["noise_warning"] and run["step_seconds_iqr_ratio"]]
            for label, runs in self.ok.items()
        }
        self.speeds = {
            label: sorted(float(run["tokens_per_second"]) for run in runs)
            for label, runs in self.calm.items()
            if len(runs) >= 3
        }

    def peak(self, label: str) -> int:
        return max(int(run["peak_allocated_bytes"]) for run in self.ok[label])

    def few(self, label: str) -> list[float]:
        return sorted(float(run["tokens_per_second"]) for run in self.calm[label])

    def median(self, label: str) -> float:
        return statistics.median(self.speeds[label])

    def is_clear(self, fast: str, slow: str) -> bool:
        upper, lower = self.speeds[fast], self.speeds[slow]
        widest = max(upper[-1] - upper[0], lower[-1] - lower[0])
        return upper[0] - lower[-1] > (0 if min(len(upper), len(lower)) > 3 else widest / 2)

    def winner(self) -> str | None:
        """Return the one that is clear of all ranked ones, and above every run of the others."""
        for label in self.speeds:
            others = [other for other in self.speeds if other != label]
            runs = [run for other, ok in self.ok.items() if other not in self.speeds for run in self.calm[other]]
            above = all(float(run["tokens_per_second"]) < self.speeds[label][0] for run in runs)
            if others and above and all(self.is_clear(label, other) for other in others):
                return label
        return None

    def front(self) -> list[str]:
        """Return by memory those that are certainly faster than the front so far, and not slower than any before."""
        on_front: list[str] = []
        before: list[str] = []
        for label in sorted(self.speeds, key=lambda label: (self.peak(label), -self.median(label))):
            is_faster = all(self.is_clear(label, other) for other in on_front)
            if is_faster and not any(self.is_clear(other, label) for other in before):
                on_front.append(label)
            before.append(label)
        return on_front

    def median_run(self, label: str) -> dict[str, str]:
        runs = sorted(self.calm[label], key=lambda run: float(run["tokens_per_second"]))
        return runs[(len(runs) - 1) // 2]


NAME = r"[a-z0-9_]+(?: \+ full checkpointing)?"

RATE = rf"({NAME}) ([\d,]+) tokens/s \[([\d,]+)–([\d,]+)\]"


def number(text: str) -> float:
    return float(text.replace(",", ""))


def seconds(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"ms": 1e-3, "s": 1.0}[unit]


def check_rates(text: str, oracle: Oracle) -> None:
    """Check every speed with a range, each of which stands behind its label."""
    rates = re.findall(RATE, text.replace(" at ", " "))
    assert len(rates) == text.count("tokens/s [")
    for label, *figures in rates:
        speeds = oracle.speeds[label]
        assert [number(figure) for figure in figures] == [
            round(value) for value in (statistics.median(speeds), speeds[0], speeds[-1])
        ]


def check_fastest(text: str, oracle: Oracle) -> None:
    check_rates(text, oracle)
    winner = re.match(rf"({NAME}) at .*, ([\d.]+) × the speed of ({NAME}), the next( that is ranked)?\.$", text)
    if winner is None:
        assert text.startswith("Not certain.") and oracle.winner() is None
        first = max(oracle.speeds, key=oracle.median)
        assert first in text
        check_challengers(text, oracle, first)
        for label in re.findall(RATE, text.partition("highest median: ")[2]):
            assert label[0] == first or not oracle.is_clear(first, label[0])
        return
    label, times, rival, is_partial = winner.groups()
    assert label == oracle.winner() and bool(is_partial) == (len(oracle.speeds) < len(oracle.ok))
    assert rival == max((other for other in oracle.speeds if other != label), key=oracle.median)
    assert times == f"{oracle.median(label) / oracle.median(rival):.2f}"


def check_challengers(text: str, oracle: Oracle, first: str) -> None:
    """Check that every undisturbed configuration with a run as fast is named, though too few runs rank it."""
    few = {label: oracle.few(label) for label in oracle.ok if label not in oracle.speeds and oracle.calm[label]}
    rivals = {label: speeds for label, speeds in few.items() if speeds[-1] >= oracle.speeds[first][0]}
    named = re.findall(rf"({NAME}) ([\d,]+) tokens/s \(n = (\d)\)", text)
    assert bool(rivals) == ("may win" in text) and {label for label, *_ in named} <= rivals.keys()
    assert len(named) == min(len(rivals), 4) and text.endswith(" more.") == (len(rivals) > 4)
    for label, speed, runs in named:
        assert (number(speed), int(runs)) == (round(statistics.median(rivals[label])), len(rivals[label]))
    if rivals:
        is_faster = max(map(statistics.median, rivals.values())) > oracle.median(first)
        assert ("was measured faster" in text) == is_faster and ("had a run as fast" in text) != is_faster


def check_speed(text: str, oracle: Oracle) -> None:
    """Check how many configurations are not ranked, why, and what would rank them."""
    unranked = [label for label in oracle.ok if label not in oracle.speeds]
    ignored = [label for label in unranked if not oracle.calm[label]]
    busy = [label for label in ignored if any(run["noise_warning"] for run in oracle.ok[label])]
    assert text.startswith(f"Not ranked: of {len(oracle.ok)} configuration")
    counts = {"disturbed": len(busy), "timed over": len(ignored) - len(busy), "ran": len(unranked) - len(ignored)}
    for words, count in counts.items():
        found = re.search(rf"(\d+) {words}", text)
        assert (int(found[1]) if found else 0) == count
    entries = [run for label in unranked for run in oracle.ok[label]]
    assert ("quiet machine" in text) == any(run["noise_warning"] for run in entries)
    assert ("train.steps" in text) == any(not run["step_seconds_iqr_ratio"] for run in entries)
    assert ("repeats=3" in text) == all(len(oracle.runs[label]) < 3 for label in unranked)


def check_certainty(text: str, oracle: Oracle) -> None:
    """Check the numbers of runs and of proven steps, and which configurations are not ranked."""
    runs = re.search(r"of (\d)(?: to (\d))? undisturbed runs", text)
    counts = sorted(len(speeds) for speeds in oracle.speeds.values())
    assert bool(runs) == (len(counts) > 1)
    if runs:
        assert [int(runs[1]), int(runs[2] or runs[1])] == [counts[0], counts[-1]]
        assert ("Not ranked" in text) == (len(counts) < len(oracle.ok))
    for label, count in re.findall(rf"({NAME}) \((\d) undisturbed runs?\)", text):
        assert label not in oracle.speeds and int(count) == len(oracle.calm[label])
    peaks = {label: [int(run["peak_allocated_bytes"]) for run in ok] for label, ok in oracle.ok.items()}
    widest = max(max(sizes) / min(sizes) - 1 for sizes in peaks.values())
    spread = re.search(rf"repeats differ by up to ([\d.]+) % \(({NAME})\), and the largest is shown", text)
    assert bool(spread) == (widest > 0.001)
    if spread:
        assert max(peaks[spread[2]]) / min(peaks[spread[2]]) - 1 == widest
        assert float(spread[1]) == pytest.approx(100 * widest, abs=0.5)
    steps = sorted({int(ok[0]["proven_steps"]) for ok in oracle.ok.values()})
    assert text.endswith(f" for {'at least ' * (len(steps) > 1)}{steps[0]} steps.") and re.search(
        r"All \d+ are proven", text
    )


def check_savings(text: str, oracle: Oracle, full: str, plain: str) -> None:
    """Check what a configuration with full checkpointing saves over the same without."""
    peak = re.search(r"(?:saves|the peak) ([\d.]+) %", text)
    if peak:
        assert float(peak[1]) == pytest.approx(100 * abs(1 - oracle.peak(full) / oracle.peak(plain)), abs=0.5)
        assert ("saves" in text or "smaller" in text) or oracle.peak(full) > oracle.peak(plain)
    speed = re.search(r"([\d.]+) % (less|more) speed", text)
    if speed:
        change = oracle.median(full) / oracle.median(plain) - 1
        assert float(speed[1]) == pytest.approx(100 * abs(change), abs=0.5) and (change < 0) == (speed[2] == "less")
        assert oracle.is_clear(full, plain) or oracle.is_clear(plain, full)
    if "the same speed" in text:
        assert not oracle.is_clear(full, plain) and not oracle.is_clear(plain, full)
    assert "30 % more operations" in text


def check_checkpointing(text: str, oracle: Oracle) -> None:
    plain = re.match(rf"Of the peak of ({NAME}), full (?:saves|adds) ", text)
    assert plain and text.count(";") == 0
    check_savings(text.replace("adds", "the peak"), oracle, f"{plain[1]} + full checkpointing", plain[1])


def check_communication(text: str, oracle: Oracle) -> None:
    sent = {label: int(ok[0]["communication_bytes"]) for label, ok in oracle.ok.items()}
    size = re.search(r" with ([\d.]+) (MiB|B) sent", text)
    assert size and float(size[1]) * {"MiB": MIB, "B": 1}[size[2]] == min(sent.values()) < max(sent.values())
    names = re.split(r", | and ", text[: size.start()])
    assert all(sent[name] == min(sent.values()) for name in names if "more" not in name)


def check_cost(text: str, oracle: Oracle) -> None:
    label, peak = re.match(rf"({NAME}) takes ([\d.]+) MiB per rank at the peak", text).groups()  # type: ignore[union-attr]
    least = min(map(oracle.peak, oracle.ok))
    assert label == oracle.winner() and float(peak) == oracle.peak(label) / MIB
    assert ("the least of all" in text) == (oracle.peak(label) == least)
    for times, other in re.findall(rf"([\d.]+) × that of ({NAME})", text):
        assert oracle.peak(other) == least and times == f"{oracle.peak(label) / least:.2f}"
    sent = re.search(r"([\d.]+) MiB sent", text)
    expected = max(int(run["communication_bytes"]) for run in oracle.ok[label])
    assert float(sent[1]) * MIB == expected if sent else "nothing sent" in text and expected == 0


def check_smallest(text: str, oracle: Oracle) -> None:
    names, peak = re.match(r"(.+?) with ([\d.]+) MiB at the peak", text).groups()  # type: ignore[union-attr]
    least = min(map(oracle.peak, oracle.ok))
    expected = [label for label in oracle.ok if oracle.peak(label) == least]
    assert float(peak) * MIB == least and all(
        name in expected for name in re.split(r", | and ", names) if "more" not in name
    )
    share = re.search(rf"([\d]+) % of ({NAME})'s", text)
    if share:
        assert share[1] == f"{100 * least / oracle.peak(share[2]):.0f}"
    for times, other in re.findall(rf"([\d.]+) × the speed of ({NAME})", text):
        first = re.split(r", | and ", names)[0]
        assert times == f"{oracle.median(first) / oracle.median(other):.2f}"
        assert oracle.is_clear(first, other) or oracle.is_clear(other, first)


def check_why(text: str, oracle: Oracle) -> None:
    longer = rf"A step of ({NAME}) takes ([\d.]+ m?s) longer than one of ({NAME}) in median runs"
    steps = rf"{longer}, mainly by (.+?)\.(?: [AT]|$)"
    assert len(re.findall(steps, text)) == text.count("A step of")
    for slow, longer, fast, parts in re.findall(steps, text):
        assert oracle.is_clear(fast, slow)
        slow_run, fast_run = oracle.median_run(slow), oracle.median_run(fast)
        whole = float(slow_run["step_seconds"]) - float(fast_run["step_seconds"])
        assert seconds(longer) == pytest.approx(whole, rel=0.006)
        explained = 0.0
        for duration, title in re.findall(r"([\d.]+ m?s) more ([a-z ]+?)(?=,| and |$)", parts):
            column = next(name for name, known in STEP_TITLES.items() if known == title)
            part = float(slow_run[column]) - float(fast_run[column])
            assert seconds(duration) == pytest.approx(part, rel=0.006)
            assert min(float(run[column]) for run in oracle.calm[slow]) > max(
                float(run[column]) for run in oracle.calm[fast]
            )
            explained += part
        assert explained >= 0.49 * whole
    for large, above, small in re.findall(rf"The peak of ({NAME}) is ([\d.]+) MiB above that of ({NAME})", text):
        assert float(above) * MIB == oracle.peak(large) - oracle.peak(small)
        for size, title in re.findall(
            r"([\d.]+) MiB more ([a-z ]+?)(?=,| and |\.)", text.partition(f"of {small}, mainly by ")[2]
        ):
            column = next(f"at_peak_{part}_bytes" for part, known in PEAK_TITLES.items() if known == title)
            assert float(size) * MIB == int(oracle.ok[large][0][column]) - int(oracle.ok[small][0][column])


CHECKS = {
    "Fastest": check_fastest,
    "Cost": check_cost,
    "Least memory": check_smallest,
    "Why": check_why,
    "Speed": check_speed,
    "How sure": check_certainty,
    "Checkpointing": check_checkpointing,
    "Least communication": check_communication,
}


def check_screen(screen: FirstScreen, oracle: Oracle) -> None:
    leads = [lead for lead, _ in screen.answers]
    assert len(screen.answers) <= 6 and len(leads) == len(set(leads))
    for lead, text in screen.answers:
        CHECKS.get(lead, check_rates)(text, oracle)
    if len(oracle.ok) > 1:
        assert ("Fastest" in leads) == (len(oracle.speeds) > 1) and ("Cost" in leads) == (oracle.winner() is not None)
        assert leads[-1] == "How sure"
    ignored = [label for label in oracle.ok if not oracle.calm[label]]
    assert bool(screen.warning) == (2 * len(ignored) > len(oracle.ok))
    front = [] if screen.fits is None else [(cells[0], cells[1], cells[2]) for cells in screen.fits.rows]
    front = [cells if screen.fits and len(screen.fits.header) == 4 else (*cells[:2], "") for cells in front]
    if len(oracle.speeds) > 1:
        assert [label for _, label, _ in front] == oracle.front()
    for memory, label, rivals in front:
        assert float(memory.split()[1]) * MIB == oracle.peak(label)
        own = oracle.peak(label)
        following = min((size for _, other, _ in front if (size := oracle.peak(other)) > own), default=math.inf)
        fitting = [other for other in oracle.ok if other != label and oracle.peak(other) < following]
        memory_of = {
            other: f" from {size / MIB:.2f} MiB" * (size > own) for other in fitting for size in [oracle.peak(other)]
        }
        alike = [
            other + memory_of[other]
            for other in fitting
            if other in oracle.speeds and not oracle.is_clear(label, other)
        ]
        alike += [
            f"{other} (n = {len(oracle.few(other))}){memory_of[other]}"
            for other in fitting
            if other not in oracle.speeds and oracle.calm[other] and oracle.few(other)[-1] >= oracle.speeds[label][0]
        ]
        assert all(other in alike for other in re.split(r", | and ", rivals) if other and "more" not in other)
        assert bool(rivals) == bool(alike)


def sentences(view: View) -> Iterator[str]:
    for section in findings(view):
        yield from (text for part in section.parts if isinstance(part, BulletList) for _, text in part.items)


def check_sentences(view: View, oracle: Oracle) -> None:
    for text in sentences(view):
        pair = re.match(rf"({NAME}) beside ({NAME}): (.+)\.$", text)
        if pair is None:
            check_general(text, oracle)
            continue
        label, base, figures = pair.groups()
        assert oracle.runs[label][0]["checkpointing"] == oracle.runs[base][0]["checkpointing"]
        for share in re.findall(r"(\d+) % of its peak", figures):
            assert share == f"{100 * oracle.peak(label) / oracle.peak(base):.0f}"
        for times in re.findall(r"([\d.]+) × the speed", figures):
            assert times == f"{oracle.median(label) / oracle.median(base):.2f}"
        if "no certain difference" in figures:
            assert not oracle.is_clear(label, base) and not oracle.is_clear(base, label)
        for times in re.findall(r"([\d.]+) × its bytes", figures):
            sent = [int(oracle.ok[name][0]["communication_bytes"]) for name in (label, base)]
            assert times == f"{sent[0] / sent[1]:.2f}"


def check_general(text: str, oracle: Oracle) -> None:
    """Check a sentence on checkpointing, pipelines, predictions or failures; there are no others."""
    if full := re.match(rf"full checkpointing of ({NAME}): ", text):
        check_savings(text, oracle, f"{full[1]} + full checkpointing", full[1])
    elif text.startswith("Idle over working time"):
        labels = re.findall(rf"({NAME}) 0\.67 \(formula 0\.50\)", text)
        assert labels == [label for label in oracle.ok if label.startswith("pp_1f1b") and oracle.calm[label]]
    elif text.startswith("The peaks predicted"):
        errors = [abs(int(ok[0]["predicted_peak_bytes"]) / oracle.peak(label) - 1) for label, ok in oracle.ok.items()]
        count, *shares = re.findall(r"[\d.]+(?= )", text)
        assert int(count) == len(errors)
        assert [float(share) for share in shares] == pytest.approx(
            [100 * statistics.median(errors), 100 * max(errors)], abs=0.5
        )
    else:
        failed = len(oracle.runs) - len(oracle.ok)
        verb = "has" if failed == 1 else "have"
        assert text.startswith(f"{failed} of {len(oracle.runs)} configurations {verb} no figures ({failed} oom)")


def check_table(view: View, oracle: Oracle) -> None:
    """Every ratio of a column has one baseline, and only ranked speeds have ratios, ranges and no mark."""
    columns = {column.key or column.title: column.cells for column in comparison_columns(view.lines, short=False)}
    labels = [line.label for line in view.lines]
    baselines = {base for line in view.lines if (base := line.get("baseline"))}
    assert len(baselines) <= 1
    speeds = columns.get("tokens_per_second", [""] * len(labels))
    ratios = columns.get("× tokens/s", [""] * len(labels))
    peaks = columns.get("× peak memory", [""] * len(labels))
    for label, speed, ratio, peak in zip(labels, speeds, ratios, peaks, strict=True):
        if label not in oracle.ok:
            assert speed == ratio == peak == ""
            continue
        (base,) = baselines or {label}
        assert isinstance(speed, Disturbed) == (not oracle.calm[label]) == speed.endswith("‡")
        assert speed.endswith("]") == (label in oracle.speeds)
        assert bool(ratio) == bool(baselines and {label, base} <= oracle.speeds.keys() and any(peaks))
        if ratio:
            assert ratio.rstrip("~") == f"{oracle.median(label) / oracle.median(base):.2f}"
            alike = label != base and not oracle.is_clear(label, base) and not oracle.is_clear(base, label)
            assert ratio.endswith("~") == alike
        if peak:
            assert peak == f"{oracle.peak(label) / oracle.peak(base):.2f}"


def check_folder(seed: int, folder: Path) -> Iterator[str]:
    """Check all claims about one random folder, and yield their texts."""
    draw = random.Random(seed)
    records = random_folder(draw)
    view = View("random", records)
    oracle = Oracle(write_runs_csv(folder, rows_of(records)))
    if oracle.ok:
        screen = first_screen(view)
        check_screen(screen, oracle)
        yield from (f"{lead}: {text}" for lead, text in screen.answers)
        yield screen.warning
    check_sentences(view, oracle)
    check_table(view, oracle)
    yield from sentences(view)
    if len(oracle.ok) < 2:
        return
    limit = draw.randint(4, 9) * MIB
    lead, text = first_screen(view, limit).answers[0]
    fitting = [label for label in oracle.ok if oracle.peak(label) <= limit]
    assert lead.startswith("Fits in") and (text.startswith(f"{len(fitting)} of ") or not fitting)
    fastest = re.search(rf"of which ({NAME}) is the fastest", text)
    if fastest:
        rivals = [label for label in fitting if label in oracle.speeds and label != fastest[1]]
        assert rivals and all(oracle.is_clear(fastest[1], rival) for rival in rivals)
    yield text


def test_every_claim_follows_from_runs_csv(tmp_path: Path) -> None:
    texts = [text for seed in range(32) for text in check_folder(seed, tmp_path)]
    kinds = {", the next", "Not certain.", "Not ranked", "at the peak of", "A step of", "The peak of", "× the speed"}
    kinds |= {"beside", "no certain difference", "is the fastest", "Ignore all speeds", "may win", "Of the peak of"}
    kinds |= {"The peaks predicted", "no figures", "Idle over working", "full checkpointing of", "sent per rank"}
    assert {kind for kind in kinds if sum(kind in text for text in texts) < 3} == set()


def test_gpus_that_wait_for_their_host_are_named() -> None:
    """Speeds of models too small for a GPU compare how fast kernels are launched, except where stages wait."""

    def banner(measured_on: str, *idle: float, **changes: Any) -> str:
        rows = [
            row(number, f"s{number}", "torch", 0, measured_on=measured_on, step_seconds=1.0, idle_seconds=share)
            | changes
            for number, share in enumerate(idle)
        ]
        return launch_bound(View("gpu", [record_of(values) for values in rows]))

    gpu = "NVIDIA H200"
    assert banner(gpu, 0.9, 0.6, 0.1).startswith("Launch-bound: in 2 of 3 configurations the GPUs were idle")
    assert banner(gpu, 0.9, 0.4) == banner(gpu) == banner("cpu", 0.9, 0.9) == banner(gpu, 0.9, 0.9, pp=2) == ""
