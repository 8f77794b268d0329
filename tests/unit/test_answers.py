"""Every claim of the answers, recomputed from runs.csv over random folders by other code than wrote it."""

import itertools
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.cost_model.parts import PEAK_TITLES
from harness.records.schema import Record
from harness.records.store import rows_of, write_runs_csv
from harness.report.answers import answers, lead
from harness.report.columns import comparison_columns
from harness.report.decision import decision
from harness.report.document import BulletList, Disturbed
from harness.report.findings import findings
from harness.report.first_screen import first_answers, fits_table
from harness.report.labels import STEP_TITLES
from harness.report.ranking import Group
from harness.report.view import View
from tests.support.example_records import FAILED, MIB, record_of, row

STRATEGIES = ("ddp", "zero1", "zero3", "fsdp_full_shard", "tp", "pp_1f1b", "cp", "single")


def random_folder(draw: random.Random) -> list[Record]:
    """Return repeated runs of up to eight configurations on two ranks, some failed, disturbed or barely timed."""
    records: list[Record] = []
    kinds = draw.sample([*itertools.product(STRATEGIES, ("none", "full"))], draw.randint(1, 8))
    noise, calm = draw.choice((0.002, 0.02, 0.1)), draw.choice((1.0, 1.0, 0.9, 0.2))
    for number, (strategy, kind) in enumerate(kinds):
        middle = draw.choice((1000, 1100, draw.uniform(300, 3000), draw.uniform(300, 3000)))
        peak = draw.randint(4, 9) * MIB
        shared: dict[str, Any] = {
            "checkpointing": kind,
            "communication_bytes": draw.choice((0, 1, 3)) * MIB,
            "executed_flops": 1_000_000 * (130 if kind == "full" else 100),
            "attention_kernel": "flash",
            "activation_bytes": draw.choice((1, 2)) * MIB,
            "predicted_peak_bytes": draw.randint(3, 9) * MIB,
            "proven_steps": draw.choice((6, 16, 16)) * (number % 5 != 3),
            **({"pipeline_bubble": 0.67, "pipeline_bubble_theory": 0.5} if strategy == "pp_1f1b" else {}),
        }
        wobble = draw.choice((0.05, 0.5))
        usual = [draw.uniform(0.1, 1) for _ in STEP_TITLES]
        for repeat in range(draw.choice((1, 2, 3, 3, 3, 4))):
            speed = middle * draw.gauss(1, noise)
            shares = [share * abs(draw.gauss(1, wobble)) for share in usual]
            parts = {n: 1024 / speed * share / sum(shares) for n, share in zip(STEP_TITLES, shares, strict=True)}
            changes = shared | parts | {"repeat": repeat, "tokens_per_second": speed, "step_seconds": 1024 / speed}
            own = peak - MIB // 8 if number % 4 == 1 and repeat % 2 else peak
            blocks = {"parameter": MIB, "activation": draw.randint(0, 3) * MIB}
            blocks["temporary"] = own - sum(blocks.values())
            changes |= {"peak_allocated_bytes": own} | {f"at_peak_{n}_bytes": size for n, size in blocks.items()}
            if draw.random() > calm:
                changes |= draw.choice(({"noise_warning": "busy"}, {"step_seconds_iqr_ratio": None}))
            if draw.random() < 0.1:
                changes |= FAILED | {"status": "oom", "reason": "out of memory"}
            records.append(record_of(row(10 * number + repeat, strategy, "torch", 0, **changes)))
    return records


class Oracle:
    """The configurations of a runs.csv, by the labels that sentences use."""

    def __init__(self, path: Path) -> None:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        is_named = table.checkpointing.nunique() > 1 or table.strategy.nunique() == 1  # what all share is in no label
        labels = table.strategy + (is_named & (table.checkpointing == "full")).map(
            {True: " + full checkpointing", False: ""}
        )
        self.runs: dict[str, list[dict[str, str]]] = {
            str(label): runs.to_dict("records") for label, runs in table.groupby(labels, sort=False)
        }
        self.ok = {label: ok for label, runs in self.runs.items() if (ok := [r for r in runs if r["status"] == "ok"])}
        self.calm = {
            label: [run for run in runs if not run["noise_warning"] and run["step_seconds_iqr_ratio"]]
            for label, runs in self.ok.items()
        }
        rates = {
            label: sorted(float(run["tokens_per_second"]) for run in runs) for label, runs in self.calm.items() if runs
        }
        self.speeds, self.few = (
            {label: speeds for label, speeds in rates.items() if (len(speeds) >= 3) == is_ranked}
            for is_ranked in (True, False)
        )
        self.peaks = {label: self.largest(label, "peak_allocated_bytes") for label in self.ok}
        self.sent = {label: self.largest(label, "communication_bytes") for label in self.ok}

    def largest(self, label: str, column: str) -> int:
        return max(int(run[column]) for run in self.ok[label])

    def at_peak(self, label: str, column: str) -> int:
        """Return a column of the run with the largest peak."""
        return int(max(self.ok[label], key=lambda run: int(run["peak_allocated_bytes"]))[column])

    def share(self, label: str, other: str) -> float:
        return self.peaks[label] / self.peaks[other]

    def median(self, label: str) -> float:
        return statistics.median(self.speeds[label])

    def times(self, fast: str, slow: str) -> str:
        """Return the ratio of two speeds as it is written."""
        return f"{self.median(fast) / self.median(slow):.2f}"

    def is_clear(self, fast: str, slow: str) -> bool:
        upper, lower = self.speeds[fast], self.speeds[slow]
        widest = max(upper[-1] - upper[0], lower[-1] - lower[0])
        return upper[0] - lower[-1] > (0 if min(len(upper), len(lower)) > 3 else widest / 2)

    def differ(self, label: str, other: str) -> bool:
        return self.is_clear(label, other) or self.is_clear(other, label)

    def winner(self) -> str | None:
        """Return the one that is clear of all ranked ones, and above every run of the others."""
        for label, speeds in self.speeds.items():
            others = self.speeds.keys() - {label}
            above = all(few[-1] < speeds[0] for few in self.few.values())
            if others and above and all(self.is_clear(label, other) for other in others):
                return label
        return None

    def front(self) -> list[str]:
        """Return by memory those that are certainly faster than the front so far, and not slower than any before."""
        on_front: list[str] = []
        ordered = sorted(self.speeds, key=lambda label: (self.peaks[label], -self.median(label)))
        for place, label in enumerate(ordered):
            is_faster = all(self.is_clear(label, other) for other in on_front)
            if is_faster and not any(self.is_clear(other, label) for other in ordered[:place]):
                on_front.append(label)
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


def names(text: str) -> list[str]:
    """Return the labels of an enumeration, of which some may only be counted."""
    return [name for name in re.split(r", | and | or ", text) if name and "more" not in name]


def check_rates(text: str, oracle: Oracle) -> None:
    """Check every speed with a range, each of which stands behind its label."""
    rates = re.findall(RATE, text.replace(" at ", " "))
    assert len(rates) == text.count("tokens/s [")
    for label, *figures in rates:
        speeds = oracle.speeds[label]
        assert [*map(number, figures)] == [*map(round, (statistics.median(speeds), speeds[0], speeds[-1]))]


def check_fastest(text: str, oracle: Oracle) -> None:
    check_rates(text, oracle)
    first = max(oracle.speeds, key=oracle.median)
    winner = re.match(rf"({NAME}) at .*, ([\d.]+) × the speed of ({NAME}), the next( that is ranked)?\.$", text)
    if winner is None:
        assert text.startswith(("Not certain.", "A tie within run-to-run variation: ")) and first in text
        assert oracle.winner() is None
        check_challengers(text, oracle, first)
        contenders = re.findall(RATE, text.partition("variation: ")[2])
        assert all(label == first or not oracle.is_clear(first, label) for label, *_ in contenders)
        return
    label, times, rival, is_partial = winner.groups()
    assert label == oracle.winner() and bool(is_partial) == (len(oracle.speeds) < len(oracle.ok))
    assert rival == max(oracle.speeds.keys() - {label}, key=oracle.median) and times == oracle.times(label, rival)


def check_challengers(text: str, oracle: Oracle, first: str) -> None:
    """Check that every undisturbed configuration with a run as fast is named, though too few runs rank it."""
    rivals = {label: few for label, few in oracle.few.items() if few[-1] >= oracle.speeds[first][0]}
    named = re.findall(rf"({NAME}) ([\d,]+) tokens/s \(n = (\d)\)", text)
    assert bool(rivals) == ("may win" in text) and {label for label, *_ in named} <= rivals.keys()
    assert len(named) == min(len(rivals), 4) and text.endswith(" more.") == (len(rivals) > 4)
    for label, speed, runs in named:
        assert (number(speed), int(runs)) == (round(statistics.median(rivals[label])), len(rivals[label]))
    if rivals:
        is_faster = max(map(statistics.median, rivals.values())) > oracle.median(first)
        assert ("was measured faster" in text) == is_faster != ("had a run as fast" in text)


def check_speed(text: str, oracle: Oracle) -> None:
    """Check how many configurations are not ranked, why, and what would rank them."""
    unranked = [label for label in oracle.ok if label not in oracle.speeds]
    entries = [run for label in unranked for run in oracle.ok[label]]
    ignored = [label for label in unranked if not oracle.calm[label]]
    busy = sum(any(run["noise_warning"] for run in oracle.ok[label]) for label in ignored)
    counts = {"disturbed": busy, "timed over": len(ignored) - busy, "ran": len(unranked) - len(ignored)}
    assert text.startswith(f"Not ranked: of {len(oracle.ok)} configuration")
    for words, count in counts.items():
        assert [int(found) for found in re.findall(rf"(\d+) {words}", text)][:1] == [count] * (count > 0)
    assert ("quiet machine" in text) == any(run["noise_warning"] for run in entries)
    assert ("train.steps" in text) == any(not run["step_seconds_iqr_ratio"] for run in entries)
    assert ("repeats=3" in text) == all(len(oracle.runs[label]) < 3 for label in unranked)


def check_certainty(text: str, oracle: Oracle) -> None:
    """Check the numbers of runs and of proven steps, and which configurations are not ranked."""
    counts = sorted(len(speeds) for speeds in oracle.speeds.values())
    runs = re.search(r"of (\d)(?: to (\d))? undisturbed runs", text)
    assert bool(runs) == (len(counts) > 1)
    if runs:
        assert [int(runs[1]), int(runs[2] or runs[1])] == [counts[0], counts[-1]]
        assert ("Not ranked" in text) == (len(counts) < len(oracle.ok))
    few = re.findall(rf"({NAME}) \((\d) undisturbed runs?\)", text)
    assert all(len(oracle.few[label]) == int(count) for label, count in few)
    sizes = {label: [int(run["peak_allocated_bytes"]) for run in ok] for label, ok in oracle.ok.items()}
    spreads = {label: max(own) / min(own) - 1 for label, own in sizes.items()}
    named = re.findall(rf"repeats differ by up to ([\d.]+) % \(({NAME})\), and the largest is shown", text)
    assert len(named) == (max(spreads.values()) > 0.001)
    for share, label in named:
        assert float(share) == pytest.approx(100 * spreads[label], abs=0.5) and spreads[label] == max(spreads.values())
    proven = [steps for ok in oracle.ok.values() if (steps := int(ok[0]["proven_steps"]))]
    count = len(oracle.ok)
    who = ("It" if count == 1 else f"All {count}") if len(proven) == count else f"{len(proven)} of the {count}"
    compared = f"{'at least ' * (len({*proven}) > 1)}{min(proven, default=0)} steps differ by rounding alone"
    sentence = rf"{who} trained the same as the reference run \(.*\): losses and gradients of {compared}\.$"
    assert bool(re.search(sentence, text)) == ("trained the same" in text) == bool(proven)


def check_savings(text: str, oracle: Oracle, full: str, plain: str) -> None:
    """Check what a configuration with full checkpointing saves over the same without."""
    for share in re.findall(r"(?:saves|the peak) ([\d.]+) %", text):
        assert float(share) == pytest.approx(100 * abs(1 - oracle.share(full, plain)), abs=0.5)
        assert "saves" in text or "smaller" in text or oracle.share(full, plain) > 1
    for share, kind in re.findall(r"([\d.]+) % (less|more) speed", text):
        change = oracle.median(full) / oracle.median(plain) - 1
        assert float(share) == pytest.approx(100 * abs(change), abs=0.5) and (change < 0) == (kind == "less")
        assert oracle.differ(full, plain)
    assert "the same speed" not in text or not oracle.differ(full, plain)
    assert "30 % more operations" in text


def check_checkpointing(text: str, oracle: Oracle) -> None:
    plain = re.match(rf"Of the peak of ({NAME}), full (?:saves|adds) ", text)
    assert plain and text.count(";") == 0
    check_savings(text.replace("adds", "the peak"), oracle, f"{plain[1]} + full checkpointing", plain[1])


def check_communication(text: str, oracle: Oracle) -> None:
    ((labels, size, unit),) = re.findall(r"^(.+) with ([\d.]+) (MiB|B) sent", text)
    least = min(oracle.sent.values())
    assert float(size) * {"MiB": MIB, "B": 1}[unit] == least < max(oracle.sent.values())
    assert {oracle.sent[name] for name in names(labels)} == {least}


def check_cost(text: str, oracle: Oracle) -> None:
    ((label, peak),) = re.findall(rf"^({NAME}) takes ([\d.]+) MiB per rank at the peak", text)
    least = min(oracle.peaks.values())
    assert label == oracle.winner() and float(peak) * MIB == oracle.peaks[label]
    assert ("the least of all" in text) == (oracle.peaks[label] == least)
    for times, other in re.findall(rf"([\d.]+) × that of ({NAME})", text):
        assert oracle.peaks[other] == least and times == f"{oracle.share(label, other):.2f}"
    sent = re.findall(r"([\d.]+) MiB sent", text) or ["0"] * ("nothing sent" in text)
    assert [float(size) * MIB for size in sent] == [oracle.sent[label]]


def check_smallest(text: str, oracle: Oracle) -> None:
    ((labels, peak),) = re.findall(r"^(.+?) with ([\d.]+) MiB at the peak", text)
    first, *others = names(labels)
    assert {oracle.peaks[name] for name in (first, *others)} == {float(peak) * MIB} == {min(oracle.peaks.values())}
    for share, other in re.findall(rf"(\d+) % of ({NAME})'s", text):
        assert share == f"{100 * oracle.share(first, other):.0f}"
    for times, other in re.findall(rf"([\d.]+) × the speed of ({NAME})", text):
        assert times == oracle.times(first, other) and oracle.differ(first, other)


COLUMNS = {title: name for name, title in STEP_TITLES.items()}

PEAK_COLUMNS = {title: f"at_peak_{part}_bytes" for part, title in PEAK_TITLES.items()}


def check_why(text: str, oracle: Oracle) -> None:
    longer = rf"A step of ({NAME}) takes ([\d.]+ m?s) longer than one of ({NAME}) in the median run of each"
    steps = re.findall(rf"{longer}, mainly by (.+?)\.(?= [AT]|$)", text)
    assert len(steps) == text.count("A step of")
    for slow, duration, fast, reasons in steps:
        parts = {"step_seconds": duration} | {
            COLUMNS[title]: part for part, title in re.findall(r"([\d.]+ m?s) more ([a-z ]+?)(?=,| and |$)", reasons)
        }
        slow_run, fast_run = oracle.median_run(slow), oracle.median_run(fast)
        differences = {name: float(slow_run[name]) - float(fast_run[name]) for name in parts}
        assert oracle.is_clear(fast, slow)
        assert {name: seconds(part) for name, part in parts.items()} == pytest.approx(differences, rel=0.006)
        for name in parts.keys() - {"step_seconds"}:
            close = [fast] if oracle.winner() else [n for n in oracle.speeds if not oracle.is_clear(fast, n)]
            others = [float(run[name]) for label in {fast, *close} for run in oracle.calm[label]]
            assert min(float(run[name]) for run in oracle.calm[slow]) > max(others)
        assert sum(differences.values()) >= 1.49 * differences["step_seconds"]
    for large, above, small in re.findall(rf"The peak of ({NAME}) is ([\d.]+) MiB above that of ({NAME})", text):
        assert float(above) * MIB == pytest.approx(oracle.peaks[large] - oracle.peaks[small], abs=0.006 * MIB)
        reasons = text.partition(f"of {small}, mainly by ")[2]
        for size, title in re.findall(r"([\d.]+) MiB more ([a-z ]+?)(?=,| and |\.)", reasons):
            column = PEAK_COLUMNS[title]
            assert float(size) * MIB == oracle.at_peak(large, column) - oracle.at_peak(small, column)


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


WHERE = "For tiny (1.0 M parameters) on 2 CPU ranks, "

SIZE = r"[\d.]+ MiB per rank at the peak"

SHARE = rf"(?:, (?P<share>\d+) % of (?P<of>{NAME})'s)?"

CLAUSES = (
    rf"take (?P<winner>{NAME}) for speed(?P<both> and memory)?: (?P<times>[\d.]+) × the speed of (?P<next>{NAME}),"
    rf" the next(?P<partial> that is ranked)?, in (?P<peak>{SIZE})(?:, the least of all)?",
    rf"(?P<tied>.+) tie for speed: take (?P<chosen>.+), with the least memory of (?P<both>all|these),"
    rf" (?P<peak>{SIZE}){SHARE}",
    rf"take (?P<leader>{NAME}) for speed(?P<both> and memory)?, of what can be ranked, in (?P<peak>{SIZE})",
    rf"take (?P<smallest>.+) for memory: (?P<peak>{SIZE}){SHARE}(?:, at (?P<speed>.+))?",
    rf"all need the same memory, (?P<peak>{SIZE})",
    r"(?:take (?P<fewest>.+) for communication:|(?P<also>it|they) also sends? the least:) (?P<sent>[\d.]+ (?:MiB|B))"
    r"(?: sent)? per rank and step",
    rf"take (?P<only>{NAME}), the only one of (?P<total>\d+) configurations that can be taken,"
    rf" in (?P<peak>{SIZE})(?:, at .+)?",
    rf"(?P<only>{NAME}) ran alone, in (?P<peak>{SIZE})(?:, at .+)?",
)


def is_listed(text: str, expected: set[str]) -> bool:
    """Return whether an enumeration names these labels, of which those behind the fourth are only counted."""
    return set(names(text)) == expected if len(expected) < 5 else set(names(text)) < expected


def check_decision(text: str, rest: str, oracle: Oracle) -> None:
    """Work out again what to take: for speed, of a tie by memory, for memory, and for bytes sent."""
    assert text.startswith(WHERE) and text.endswith(".")
    found: dict[str, str] = {}
    for clause in text.removeprefix(WHERE).removesuffix(".").split("; "):
        match = next(filter(None, (re.fullmatch(pattern, clause) for pattern in CLAUSES)))
        parts = {name: part for name, part in match.groupdict().items() if part}
        check_clause(parts, oracle)
        found = parts | found
    first = max(oracle.speeds, key=oracle.median, default="")
    least = {label for label, peak in oracle.peaks.items() if peak == min(oracle.peaks.values())}
    is_by_speed = not found.keys().isdisjoint({"winner", "tied", "leader"})
    takes_smallest = found.get("both", "these") != "these" or "only" in found or least == oracle.ok.keys()
    assert is_by_speed == (len(oracle.speeds) > 1) and ("smallest" in found) != takes_smallest
    may_win = {label for label, few in oracle.few.items() if first and few[-1] >= oracle.speeds[first][0]}
    named = re.match(r"(.+) ran too few times to be ranked, and may be as fast\.", rest)
    assert bool(named) == bool(may_win and not found.keys().isdisjoint({"tied", "leader"}))
    assert named is None or is_listed(named[1], may_win)
    assert ("Speeds are not ranked (" in rest) == (not is_by_speed and len(oracle.speeds) < len(oracle.ok))
    assert rest.endswith("For GPUs, harness plan predicts speed and memory: docs/which-layout.md.")


def check_clause(found: dict[str, str], oracle: Oracle) -> None:
    """Check the labels and the figures of one clause."""
    least, first = min(oracle.peaks.values()), max(oracle.speeds, key=oracle.median, default="")
    close = {label for label in oracle.speeds if label == first or not oracle.is_clear(first, label)}
    peak = float(found["peak"].split()[0]) * MIB if "peak" in found else None
    if "winner" in found:
        rival = max(oracle.speeds.keys() - {first}, key=oracle.median)
        assert (found["winner"], found["next"], found["times"]) == (oracle.winner(), rival, oracle.times(first, rival))
        assert ("partial" in found) == (len(oracle.speeds) < len(oracle.ok))
        assert peak == oracle.peaks[first] and ("both" in found) == (peak == least)
    elif "tied" in found:
        smallest = min(oracle.peaks[label] for label in close)
        assert oracle.winner() is None and len(close) > 1 and is_listed(found["tied"], close) and peak == smallest
        assert is_listed(found["chosen"], {label for label in close if oracle.peaks[label] == smallest})
        assert (found["both"] == "all") == (peak == least) and ("of" in found) == (oracle.peaks[first] != peak)
    elif "leader" in found:
        assert oracle.winner() is None and {found["leader"]} == close and peak == oracle.peaks[first]
        assert ("both" in found) == (peak == least)
    elif "smallest" in found:
        assert peak == least and is_listed(found["smallest"], {n for n, own in oracle.peaks.items() if own == least})
        check_speed_of_smallest(names(found["smallest"])[0], found.get("of", ""), found.get("speed"), oracle)
    elif "sent" in found:
        size, unit = found["sent"].split()
        fewest = {label for label, sent in oracle.sent.items() if sent == min(oracle.sent.values())}
        assert float(size) * {"MiB": MIB, "B": 1}[unit] == min(oracle.sent.values()) < max(oracle.sent.values())
        assert is_listed(found["fewest"], fewest) if "fewest" in found else oracle.peaks[min(fewest)] == least
    elif "only" in found:
        assert {found["only"]} == {*oracle.ok} and peak == least and int(found.get("total", 1)) == len(oracle.runs)
    else:
        assert {*oracle.peaks.values()} == {peak}
    if "share" in found:
        own = names(found.get("chosen", found.get("smallest", "")))[0]
        assert found["share"] == f"{100 * oracle.share(own, found['of']):.0f}"


def check_speed_of_smallest(label: str, other: str, text: str | None, oracle: Oracle) -> None:
    """Check the speed of the smallest beside what is to be taken for speed, where both are ranked."""
    if len(oracle.speeds) < 2 or label not in oracle.speeds:
        assert text == ("a speed that is not ranked" if len(oracle.speeds) > 1 else None)
    else:
        is_even = text == f"no certain difference in speed from {other}"
        assert is_even != oracle.differ(label, other) and (
            is_even or text == f"{oracle.times(label, other)} × the speed of {other}"
        )


def check_screen(view: View, oracle: Oracle) -> None:
    leads = [name for name, _ in first_answers(view)]
    assert len(leads) <= 6 and len(leads) == len(set(leads))
    whole = answers(view.largest_groups[0]) if view.largest_groups else {}
    for name, text in (*first_answers(view), *((lead(kind), text) for kind, text in whole.items())):
        CHECKS.get(name, check_rates)(text, oracle)
    if len(oracle.ok) > 1:
        assert ("Fastest" in leads) == (len(oracle.speeds) > 1) and ("Cost" in leads) == (oracle.winner() is not None)
        assert leads[-1] == "How sure"
    check_decision(*decision(view), oracle)
    fits = fits_table(view)
    rows = [dict(zip(fits.header, cells, strict=True)) for cells in fits.rows] if fits else []
    front = [cells["fastest that fits"] for cells in rows]
    assert len(oracle.speeds) < 2 or front == oracle.front()
    for cells in rows:
        assert float(cells["memory per rank"].split()[1]) * MIB == oracle.peaks[cells["fastest that fits"]]
        alike = as_fast(cells["fastest that fits"], front, oracle)
        rivals = names(cells.get("may be as fast or faster", ""))
        assert set(rivals) <= alike and bool(rivals) == bool(alike)


def as_fast(label: str, front: list[str], oracle: Oracle) -> set[str]:
    """Return what may be as fast as a line of the front in the memory up to the next, as its table names them."""
    own = oracle.peaks[label]
    following = min((oracle.peaks[other] for other in front if oracle.peaks[other] > own), default=math.inf)
    alike = set()
    for other, peak in oracle.peaks.items():
        few = oracle.few.get(other, [])
        is_close = other in oracle.speeds and not oracle.is_clear(label, other)
        if other != label and peak < following and (is_close or (few and few[-1] >= oracle.speeds[label][0])):
            alike.add(other + f" (n = {len(few)})" * bool(few) + f" from {peak / MIB:.2f} MiB" * (peak > own))
    return alike


def sentences(view: View) -> list[str]:
    parts = [part for section in findings(view) for part in section.parts if isinstance(part, BulletList)]
    return [text for part in parts for _, text in part.items]


def check_sentence(text: str, oracle: Oracle) -> None:
    """Check a sentence on a pair, on checkpointing, pipelines, predictions or failures; there are no others."""
    if pair := re.match(rf"({NAME}) beside ({NAME}): (.+)\.$", text):
        label, base, figures = pair.groups()
        assert oracle.runs[label][0]["checkpointing"] == oracle.runs[base][0]["checkpointing"]
        for pattern, figure in (
            (r"(\d+) % of its peak", lambda: f"{100 * oracle.share(label, base):.0f}"),
            (r"([\d.]+) × its speed", lambda: oracle.times(label, base)),
            (r"([\d.]+) × its bytes", lambda: f"{oracle.sent[label] / oracle.sent[base]:.2f}"),
        ):
            assert all(shown == figure() for shown in re.findall(pattern, figures))
        assert "no certain difference" not in figures or not oracle.differ(label, base)
    elif full := re.match(rf"full checkpointing of ({NAME}): ", text):
        check_savings(text, oracle, f"{full[1]} + full checkpointing", full[1])
    elif text.startswith("Idle over working time"):
        labels = re.findall(rf"({NAME}) 0\.67 \(formula 0\.50\)", text)
        assert labels == [label for label in oracle.ok if label.startswith("pp_1f1b") and oracle.calm[label]]
    elif text.startswith("The peaks predicted"):
        errors = [
            abs(int(ok[0]["predicted_peak_bytes"]) / oracle.peaks[label] - 1) * 100 for label, ok in oracle.ok.items()
        ]
        figures = [float(figure) for figure in re.findall(r"[\d.]+(?= )", text)]
        assert figures == pytest.approx([len(errors), statistics.median(errors), max(errors)], abs=0.5)
    else:
        failed = len(oracle.runs) - len(oracle.ok)
        verb = "has" if failed == 1 else "have"
        assert text.startswith(f"{failed} of {len(oracle.runs)} configurations {verb} no figures ({failed} oom)")


def check_table(view: View, oracle: Oracle) -> None:
    """Every ratio of a column has one baseline, and only ranked speeds have ratios, ranges and no mark."""
    columns = {column.key or column.title: column.cells for column in comparison_columns(view.lines, short=False)}
    bases = {base for line in view.lines if (base := line.get("baseline"))}
    titles = ("tokens_per_second", "× tokens/s", "× peak memory")
    speeds, ratios, peaks = (columns.get(title, [""] * len(view.lines)) for title in titles)
    assert len(bases) <= 1
    for line, speed, ratio, peak in zip(view.lines, speeds, ratios, peaks, strict=True):
        label, base = line.label, next(iter(bases), line.label)
        if label not in oracle.ok:
            assert speed == ratio == peak == ""
            continue
        assert isinstance(speed, Disturbed) == (not oracle.calm[label]) == speed.endswith("‡")
        assert speed.endswith("]") == (label in oracle.speeds)
        assert bool(ratio) == bool(bases and {label, base} <= oracle.speeds.keys() and any(peaks))
        is_alike = bool(ratio) and label != base and not oracle.differ(label, base)
        assert ratio in ("", oracle.times(label, base) + "~" * is_alike) if ratio else not is_alike
        assert peak in ("", f"{oracle.share(label, base):.2f}")


def check_folder(seed: int, folder: Path) -> list[str]:
    """Check all claims about one random folder, and return their texts."""
    draw = random.Random(seed)
    records = random_folder(draw)
    view, oracle = View("random", records), Oracle(write_runs_csv(folder, rows_of(records)))
    texts = sentences(view)
    for text in texts:
        check_sentence(text, oracle)
    check_table(view, oracle)
    if oracle.ok:
        check_screen(view, oracle)
        whole = answers(view.largest_groups[0]) if view.largest_groups else {}
        texts += [*(text for _, text in first_answers(view)), *whole.values(), *decision(view)]
    if len(oracle.ok) > 1:
        limit = draw.randint(4, 9) * MIB
        name, text = next(first_answers(view, limit))
        fitting = {label for label, peak in oracle.peaks.items() if peak <= limit}
        assert name.startswith("Fits in") and (text.startswith(f"{len(fitting)} of ") or not fitting)
        for label in re.findall(rf"The fastest of them is ({NAME}): ", text):
            rivals = (fitting & oracle.speeds.keys()) - {label}
            assert rivals and all(oracle.is_clear(label, rival) for rival in rivals)
        texts.append(text)
    return texts


def test_every_claim_follows_from_runs_csv(tmp_path: Path) -> None:
    texts = [text for seed in range(32) for text in check_folder(seed, tmp_path)]
    kinds = {", the next", "Not certain.", "Not ranked", "at the peak of", "A step of", "The peak of", "× the speed"}
    kinds |= {"beside", "no certain difference", "The fastest of them is", "may win", "Of the peak of"}
    kinds |= {"The peaks predicted", "no figures", "Idle over working", "full checkpointing of", "sent per rank"}
    kinds |= {"tie for speed: take", "for speed: ", "for memory: ", "for communication: ", "of what can be ranked"}
    kinds |= {"ran too few times", "Speeds are not ranked (", "for speed and memory"}
    assert {kind for kind in kinds if sum(kind in text for text in texts) < 3} == set()


WRONG = {
    "the slowest is taken": ("chosen", property(lambda group: group.ranked[-1:])),
    "the second leads": ("fastest", property(lambda group: group.ranked[1:2])),
    "a tie has a winner": ("_leaders", property(lambda group: (group.ranked[:1], []))),
    "the largest is the smallest": (
        "smallest",
        property(lambda group: sorted(group.members, key=lambda line: line.peak or 0)[-1:]),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_decision_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, *WRONG[name])
    caught = 0
    for seed in range(32):
        records = random_folder(random.Random(seed))
        oracle = Oracle(write_runs_csv(tmp_path, rows_of(records)))
        if len(oracle.speeds) < 2:
            continue
        try:
            check_decision(*decision(View("random", records)), oracle)
        except (AssertionError, StopIteration):
            caught += 1
    assert caught > 3
