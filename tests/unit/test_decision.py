"""The title of a report and the sentence that decides: a tie, one, none, failures, simulations, pipelines, mixtures."""

import dataclasses
import re
from typing import Any

import pytest

from harness.records.schema import Record
from harness.report.decision import decision, title
from harness.report.text import sentence
from harness.report.view import View
from tests.support.example_records import FAILED, MIB, mixed, record_of, records, row
from tests.support.tables import changed, page_text

GPUS = "For GPUs, harness plan predicts speed and memory: docs/which-layout.md."

WHERE = "For tiny (1.0 M parameters) on 2 CPU ranks, "

ON = "for tiny (1.0 M parameters) on 2 CPU ranks, 2 January 2026"

AT = "MiB per rank at the peak"

BUSY: dict[str, Any] = {"noise_warning": "busy"}


def runs(number: int, strategy: str, *speeds: float, peak: int = 20, sent: int = 4, **changes: Any) -> list[Record]:
    """Return a repeat for each speed, with a peak and bytes sent in MiB."""
    shared = {"peak_allocated_bytes": peak * MIB, "communication_bytes": sent * MIB} | changes
    return [
        record_of(row(10 * number + repeat, strategy, "torch", 0, repeat=repeat, tokens_per_second=speed, **shared))
        for repeat, speed in enumerate(speeds)
    ]


def failed(number: int, strategy: str, status: str, **changes: Any) -> list[Record]:
    return [record_of(row(10 * number, strategy, "torch", 0, **FAILED | {"status": status, "reason": "why"} | changes))]


DDP, ZERO1, TP = (
    runs(1, "ddp", 1600, 1590, 1610),
    runs(2, "zero1", 1595, 1580, 1612, peak=18),
    runs(3, "tp", 400, 401, 399, peak=12, sent=6),
)

SIMULATED: dict[str, Any] = {"launch": "simulated", "measured_on": "NVIDIA H200"}

WALL = [
    *runs(1, "ddp", 9.0, parameters=10**6, peak=9),
    *failed(2, "ddp", "oom", parameters=2 * 10**6),
    *runs(3, "zero3", 8.0, parameters=10**6, peak=6),
    *runs(4, "zero3", 7.0, parameters=2 * 10**6, peak=9),
]

# Runs, their title, the sentence that decides, and what it leaves open.
DECISIONS: dict[str, tuple[list[Record], str, str, str]] = {
    "one leads": (
        [*DDP, *runs(2, "zero1", 1000, 1001, 1002, peak=18), *TP],
        f"Three strategies {ON}",
        f"{WHERE}take ddp for speed: 1.60 × the speed of zero1, the next, in 20.00 {AT}; take tp for memory:"
        f" 12.00 {AT}, 60 % of ddp's, at 0.25 × the speed of ddp.",
        GPUS,
    ),
    "the fastest is the smallest": (
        [*DDP, *runs(2, "zero1", 1000, 1001, 1002, peak=30)],
        f"Two strategies {ON}",
        f"{WHERE}take ddp for speed and memory: 1.60 × the speed of zero1, the next, in 20.00 {AT}, the least of all.",
        GPUS,
    ),
    "a tie is decided by memory": (
        [*DDP, *ZERO1, *TP],
        f"Three strategies {ON}",
        f"{WHERE}ddp and zero1 tie for speed: take zero1, with the least memory of these, 18.00 {AT}, 90 % of"
        f" ddp's; take tp for memory: 12.00 {AT}, 67 % of zero1's, at 0.25 × the speed of zero1.",
        GPUS,
    ),
    "a tie of all": (
        [*DDP, *runs(2, "zero1", 1595, 1580, 1612)],
        f"Two strategies {ON}",
        f"{WHERE}ddp and zero1 tie for speed: take ddp or zero1, with the least memory of all, 20.00 {AT}.",
        GPUS,
    ),
    "a single run may be as fast": (
        [*DDP, *TP, *runs(4, "zero1", 1700.0, peak=18)],
        f"Three strategies {ON}",
        f"{WHERE}take ddp for speed, of what can be ranked, in 20.00 {AT}; take tp for memory: 12.00 {AT}, 60"
        " % of ddp's, at 0.25 × the speed of ddp.",
        f"zero1 ran too few times to be ranked, and may be as fast. {GPUS}",
    ),
    "each ran once": (
        [*DDP[:1], *TP[:1]],
        f"Memory and communication of two strategies {ON}",
        f"{WHERE}take tp for memory: 12.00 {AT}, 60 % of ddp's; take ddp for communication: 4.00 MiB sent per"
        " rank and step.",
        f"Speeds are not ranked (1 undisturbed run): repeats=3 would rank them. {GPUS}",
    ),
    "one has the least of both": (
        [*DDP[:1], *runs(3, "pp_1f1b", 400.0, peak=12, sent=1)],
        f"Memory and communication of two strategies {ON}",
        f"{WHERE}take pp_1f1b for memory: 12.00 {AT}, 60 % of ddp's; it also sends the least: 1.00 MiB per"
        " rank and step.",
        f"Speeds are not ranked (1 undisturbed run): repeats=3 would rank them. {GPUS}",
    ),
    "all need the same": (
        [*changed(DDP, **BUSY), *runs(2, "pp_1f1b", 800.0)],
        f"Memory and communication of two strategies {ON}",
        f"{WHERE}all need the same memory, 20.00 {AT}.",
        "Speeds are not ranked (disturbed and 1 undisturbed run): more repeats on a quiet machine would rank"
        f" them. {GPUS}",
    ),
    "more ranks than cores": (
        changed([*DDP, *TP], parts={"environment": {"cores": 1}}),
        f"Memory and communication of two strategies {ON}",
        f"{WHERE}take tp for memory: 12.00 {AT}, 60 % of ddp's; take ddp for communication: 4.00 MiB sent per"
        " rank and step.",
        f"Speeds are not ranked (more ranks than cores): a core for every rank would rank them. {GPUS}",
    ),
    "one ran alone": (
        DDP,
        f"Speed and memory of ddp {ON}",
        f"{WHERE}ddp ran alone, in 20.00 {AT}, at 1,600 tokens/s [1,590–1,610].",
        GPUS,
    ),
    "one of several ended ok": (
        [*DDP[:1], *failed(5, "tp", "oom")],
        f"Memory and communication of two strategies {ON}",
        f"{WHERE}take ddp, the only one of 2 configurations that can be taken, in 20.00 {AT},"
        " at 1,600 tokens/s (n = 1).",
        f"Speeds are not ranked (1 undisturbed run): repeats=3 would rank them. {GPUS}",
    ),
    "all failed": (
        [*failed(5, "tp", "oom"), *failed(6, "cp", "refused")],
        f"Two strategies {ON}",
        "Nothing can be taken: none of 2 configurations ended ok (1 oom, 1 refused). The reasons are under Failures.",
        "",
    ),
    "none are comparable": (
        [*DDP, *changed(TP, precision="bf16_mixed")],
        f"Two strategies {ON}",
        "None of 2 configurations is best, as no two are comparable on as many ranks.",
        GPUS,
    ),
    "simulations": (
        changed([*DDP[:1], *TP[:1], *failed(5, "cp", "oom")], **SIMULATED),
        "Three strategies for tiny (1.0 M parameters) on 2 simulated ranks of NVIDIA H200, 2 January 2026",
        "For tiny (1.0 M parameters) on 2 simulated ranks of NVIDIA H200, take ddp for speed by a model of"
        f" the device: 4.00 × the speed of tp, the next, in 20.00 {AT}; take tp for memory: 12.00 {AT}, 60 %"
        " of ddp's, at 0.25 × the speed of ddp.",
        "",
    ),
    "simulations that a model cannot tell apart": (
        changed([*DDP[:1], *ZERO1[:1], *TP[:1]], **SIMULATED),
        "Three strategies for tiny (1.0 M parameters) on 2 simulated ranks of NVIDIA H200, 2 January 2026",
        "For tiny (1.0 M parameters) on 2 simulated ranks of NVIDIA H200, ddp and zero1 tie for speed within 3 %, which"
        f" a model of the device cannot tell apart: take zero1, with the least memory of these, in 18.00 {AT}; take tp"
        f" for memory: 12.00 {AT}, 67 % of zero1's, at 0.25 × the speed of zero1.",
        "",
    ),
    "no step was timed": (
        changed([*DDP[:1], *TP[:1]], tokens_per_second=None, launch="virtual"),
        f"Memory and communication of two strategies {ON.replace('2 CPU', '2 virtual CPU')}",
        f"{WHERE.replace('2 CPU', '2 virtual CPU')}take tp for memory: 12.00 {AT}, 60 % of ddp's; take ddp"
        " for communication: 4.00 MiB sent per rank and step.",
        f"Speeds are not known. {GPUS}",
    ),
    "the largest model": (
        changed(WALL, memory_limit_bytes=10 * MIB),
        "Memory and communication of four configurations of two strategies for tiny (1.0 M to 2.0 M"
        " parameters) on 2 CPU ranks, 2 January 2026",
        "For tiny on 2 CPU ranks, take zero3 for the largest model: 2.0 M parameters in 10.00 MiB per rank;"
        " the least, 1.0 M, with ddp.",
        f"Speeds are not ranked (1 undisturbed run): repeats=3 would rank them. {GPUS}",
    ),
    "measured and simulated": (
        [*DDP, *TP, *changed(runs(7, "cp", 9000.0), **SIMULATED)],
        "Three strategies for tiny (1.0 M parameters) on 2 ranks of cpu and NVIDIA H200, 2 January 2026",
        f"{WHERE}take ddp for speed: 4.00 × the speed of tp, the next, in 20.00 {AT}; take tp for memory:"
        f" 12.00 {AT}, 60 % of ddp's, at 0.25 × the speed of ddp.",
        GPUS,
    ),
    "parallelisms on two and four ranks": (
        mixed(),
        f"Memory and communication of eight configurations of four strategies {ON.replace('2 CPU', '2 and 4 CPU')}",
        f"{WHERE.replace('2 CPU', '4 CPU')}all need the same memory, 20.00 {AT}.",
        f"Speeds are not ranked (1 undisturbed run): repeats=3 would rank them. {GPUS}",
    ),
    "GPUs": (
        changed([*DDP, *TP], measured_on="NVIDIA H200", model=None),
        "Two strategies on 2 ranks of NVIDIA H200, 2 January 2026",
        f"On 2 ranks of NVIDIA H200, take ddp for speed: 4.00 × the speed of tp, the next, in 20.00 {AT};"
        f" take tp for memory: 12.00 {AT}, 60 % of ddp's, at 0.25 × the speed of ddp.",
        "",
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_the_title_says_what_was_compared_and_one_sentence_decides(name: str) -> None:
    entries, heading, text, rest = DECISIONS[name]
    view = View("demo", entries)
    assert (title(view), *decision(view)) == (heading, text, rest)
    assert page_text(entries).startswith(f"# {heading}\n\n**{text}** {rest}".rstrip())


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        (20, f"{WHERE[:-2]} within 20.00 MiB, ddp and zero1 tie for speed: take zero1"),
        (19, f"{WHERE[:-2]} within 19.00 MiB, take zero1 for speed: 3.99 × the speed of tp, the next, in 18.00 MiB"),
        (12, f"{WHERE[:-2]} within 12.00 MiB, take tp, the only one of 3 configurations that can be taken, in 12.00"),
        (11, f"{WHERE[:-2]} within 11.00 MiB, nothing fits: tp needs 12.00 MiB."),
    ],
)
def test_a_decision_within_a_memory_takes_only_what_fits(mib: int, expected: str) -> None:
    assert decision(View("demo", [*DDP, *ZERO1, *TP]), mib * MIB)[0].startswith(expected)


def test_a_title_has_any_day_model_and_number_of_runs() -> None:
    several = [entry.with_row(model=f"m{n}", started_at=f"2026-0{1 + n}-28") for n, entry in enumerate(records()[:4])]
    assert title(View("demo", several)) == (
        "Memory and communication of four strategies for 4 models on 1 and 2 CPU ranks,"
        " 28 January 2026 to 28 April 2026"
    )
    odd = [
        dataclasses.replace(entry, row=entry.row | {"started_at": "yesterday", "parameters": 9}) for entry in DDP[:1]
    ]
    assert (
        title(View("demo", odd)) == "Memory and communication of ddp for tiny (9 parameters) on 2 CPU ranks, yesterday"
    )
    assert title(View("demo", [])) == ""


def test_the_legend_of_the_comparison_is_short() -> None:
    """It once had 211 words; what it left out stands at the heads of the columns and under Words."""
    known = ["speed_low", "unsettled", "is_ignored", "stale_reason"]
    legend = sentence("comparison_legend", baseline="ddp", known=known, are_few=True, has_best=True, has_repeats=True)
    assert len(re.findall(r"\S+", legend)) <= 60
    words = page_text([*DDP, *TP]).split("## Words")[1].split("## ")[0]
    for term in ("model state", "communication", "deviation", "repeats", "certainly faster", "ranked", "bold"):
        assert f"**{term}**: " in words
