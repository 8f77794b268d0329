"""harness plan OVERRIDES: the memory and time of layouts on any cluster, predicted without its devices."""

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial

from harness.cost_model.fits import Fits
from harness.cost_model.prediction import Prediction
from harness.planner.plan import LayoutPlan, against_words, plans
from harness.planner.row import csv_text, planned_row, refused_row
from harness.planner.sentences import (
    against_lines,
    basis_sentences,
    choice_sentences,
    decision_sentences,
    detail_lines,
    explanation,
    misfit_sentence,
    not_simulated_sentences,
    say,
    search_sentences,
    table_lines,
)
from harness.records.schema import Row
from harness.util.text import UserError, sanitize

FORMATS = ("table", "csv", "json")

PAGES = (".html", ".md")  # the suffixes of the pages of a search


def rows_of(entry: LayoutPlan) -> list[Row]:
    """Return the rows of a plan's predictions, or of a combination that has none."""
    return [refused_row(entry.refusal, entry.values)] if entry.refusal else list(map(planned_row, entry.predictions))


def decisions(entries: Sequence[LayoutPlan]) -> Iterator[str]:
    """Yield what plans decide: the fastest that fits of each search, and of the single layouts of each model.

    What would make a layout fit that does not follows.
    """
    layouts: dict[str, list[tuple[Prediction, float | None]]] = {}
    for plan in entries:
        if plan.result is not None:
            yield from choice_sentences(plan.result, plan.overrides, plan.tokens)
            continue
        for entry in plan.predictions:
            layouts.setdefault(entry.config.model.name, []).append((entry, plan.tokens))
    for of_model in layouts.values():
        of_model.sort(key=lambda shown: (not shown[0].fits, -shown[0].tokens_per_second))
        first, tokens = of_model[0]
        yield from decision_sentences(first, tokens, is_choice=len(of_model) > 1) if first.fits else ()
        yield from (misfit_sentence(entry) for entry, _ in of_model if not entry.fits)


def sentences(plan: LayoutPlan) -> Iterator[str]:
    """Yield what a plan's figures rest on, and what else is to say of a search."""
    yield from plan.notes
    smallest = plan.result.front[-1:] if plan.result is not None else []
    for first in [*plan.predictions, *smallest][:1]:
        yield from basis_sentences(first)
    yield from search_sentences(plan.result) if plan.result is not None else not_simulated_sentences(plan.predictions)


def text_lines(entries: Sequence[LayoutPlan], explains: bool) -> Iterator[str]:
    """Yield plans as lines for a terminal, after their table: layouts in detail, sentences, and what was refused."""
    number = 0
    for plan in entries:
        shown = plan.predictions if plan.result is None else plan.predictions[:1]
        for line in detail_lines(shown[0]) if shown else ():
            yield f"{number + 1}: {line}"
        number += len(plan.predictions)
    yield from dict.fromkeys(line for plan in entries for line in sentences(plan))
    yield from (f"refused: {plan.swept}: {plan.refusal}" for plan in entries if plan.refusal)
    yield from explanations([entry for plan in entries for entry in plan.predictions]) if explains else ()


def explanations(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield the arithmetic of each figure of predictions, which are numbered as in their table."""
    for number, prediction in enumerate(predictions, 1):
        yield from (f"{number}: {line}" for line in explanation(prediction))


def side_by_side(entries: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Return two plans with one prediction each: the best of a search, or its smallest layout where none fits.

    Raises UserError if there are more plans, or one has no prediction.
    """
    shown = [[*entry.predictions, *(entry.result.front[-1:] if entry.result else ())][:1] for entry in entries]
    if len(shown) != 2 or not all(shown):
        raise UserError("--against compares one plan with one other: leave out lists of values and sweeps")
    return [
        dataclasses.replace(entry, predictions=first, result=None) for entry, first in zip(entries, shown, strict=True)
    ]


def shortfalls(entries: Sequence[LayoutPlan], least: Fits) -> Iterator[str]:
    """Yield why plans do not fit as surely as they must, a line each; a search needs one layout that does."""
    enough = {"likely", least}
    for plan in entries:
        if not enough & {entry.verdict.fits for entry in plan.predictions}:
            first = next(
                (f"{entry.label()} has fits={entry.verdict.fits}" for entry in plan.predictions), "no layout fits"
            )
            yield f"--require {least} is not met: {plan.swept + ': ' if plan.swept else ''}{plan.refusal or first}"


def main(options: Namespace) -> int:
    """Print the plans of the settings, and write the page of the first search.

    Return 1 if --require is not met, and print why on standard error; else 0. Raises UserError for a mistake.
    """
    formats = [word.partition("=")[2] for word in options.settings if word.startswith("format=")]
    arguments = [word for word in options.settings if not word.startswith("format=")]
    output, page = formats[-1] if formats else "table", options.report
    if output not in FORMATS:
        raise UserError(f"format={output} is not known: choose {', '.join(FORMATS)}")
    if page is not None and page.suffix not in PAGES:
        raise UserError(f"--report={page} is no page's name: choose one that ends in {' or '.join(PAGES)}")
    if options.foreign is not None:
        from harness.foreign.overrides import import_configuration  # most plans import nothing

        arguments = list(import_configuration(options.foreign, settings=arguments).words)
    if sys.stderr.isatty() and not any(word.startswith(("strategy=", "sweeps=")) for word in arguments):
        print(say("searching"), file=sys.stderr, flush=True)
    entries = plans(arguments)
    if options.against:
        entries += plans(against_words(arguments, options.against))
    if any(
        layout.is_open for entry in entries for layout in (entry.result.best if entry.result else entry.predictions)
    ):
        from harness.planner.replay import settle  # it imports what runs need

        entries = settle(entries, partial(print, file=sys.stderr, flush=True))
    if page is not None:
        searches = [(entry, entry.result) for entry in entries if entry.result is not None]
        if not searches:
            raise UserError(f"--report={page} is the page of a search: leave out strategy, or choose strategy=search")
        from harness.report.plan_page import write_page  # it imports pandas, which a plan without a page does not need

        write_page(page, *searches[0], arguments)
    lacking = [*shortfalls(entries, options.require)] if options.require else []
    entries = side_by_side(entries) if options.against else entries
    if output == "table":
        print_table(entries, options)
    else:
        print_rows(entries, output)
    for line in lacking:
        print(sanitize(line), file=sys.stderr)
    return int(bool(lacking))


def print_table(entries: Sequence[LayoutPlan], options: Namespace) -> None:
    """Print plans for a terminal: what they decide, or two of them side by side, their table, and sentences on them."""
    shown = [(entry.swept, line) for entry in entries for line in entry.predictions]
    if options.against:
        print("\n".join(against_lines(*(line for _, line in shown))))
    else:
        print("\n".join(map(sanitize, decisions(entries))))
        if shown:
            print("", *table_lines([line for _, line in shown], [swept for swept, _ in shown]), sep="\n")
    for text in text_lines(entries, options.explain):
        print(sanitize(text))


def print_rows(entries: Sequence[LayoutPlan], output: str) -> None:
    """Print the rows of plans as JSON or CSV, and on standard error what was chosen for them."""
    for note in dict.fromkeys(note for entry in entries for note in entry.notes):
        print(sanitize(note), file=sys.stderr)
    rows = [row for entry in entries for row in rows_of(entry)]
    print(json.dumps(rows, indent=1) if output == "json" else csv_text(rows), end="\n" * (output == "json"))
