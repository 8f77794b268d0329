"""harness plan OVERRIDES: the memory and time of layouts on any cluster, predicted without starting anything."""

import argparse
import csv
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.config.arguments import find_mistake, normalize_arguments
from harness.config.byte_size import format_bytes
from harness.config.from_dict import from_dict
from harness.config.hydra import compose_values
from harness.config.stack import StackConfig
from harness.planner.explain import explanation
from harness.planner.plan import Plan, make_plan, offers
from harness.planner.predict import Prediction
from harness.planner.search import memory_sentences, separation
from harness.records.columns import COLUMN_NAMES
from harness.records.runs_csv import csv_cell
from harness.records.schema import Row
from harness.report.plan_page import plan_page
from harness.util.errors import UserError, run_command
from harness.util.files import atomic_write_text
from harness.util.text import sanitize

FORMATS = ("table", "csv", "json")

Combination = tuple[list[str], dict[str, str]]  # the overrides, and their values by the dotted key


def combinations(arguments: Sequence[str]) -> list[Combination]:
    """Return the overrides of every combination of comma lists. Raises UserError for a mistake in them."""
    words = [word for word in normalize_arguments(arguments) if word not in ("-m", "--multirun")]
    is_sweep = len(words) < len(arguments)
    mistake = find_mistake([*(["-m"] if is_sweep else []), *words])
    if mistake is not None:
        raise UserError(mistake)
    choices = []
    for override in OverridesParser.create().parse_overrides(words):
        if override.is_sweep_override():
            name = override.get_key_element()
            choices.append([(override.key_or_group, f"{name}={value}") for value in override.sweep_string_iterator()])
        else:
            choices.append([(override.key_or_group, str(override.input_line))])
    return [
        ([text for _, text in chosen], {key: text.partition("=")[2] for key, text in chosen})
        for chosen in itertools.product(*choices)
    ]


def plans(arguments: Sequence[str]) -> list[Plan]:
    """Return the plan of every combination; in a sweep, impossible combinations of several are left to the others."""
    made_plans, mistakes = [], []
    for overrides, fixed_keys in combinations(arguments):
        values = dict(compose_values(*overrides, primary="plan"))
        stack: StackConfig = from_dict(StackConfig, values.pop("stack"), "stack")
        try:
            made_plans.append(make_plan(values, stack, fixed_keys))  # type: ignore[arg-type]
        except UserError as error:
            mistakes.append(error)
    if not made_plans and mistakes:
        raise mistakes[0]
    return made_plans


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns that these rows have, in the order of runs.csv and then those beyond it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in COLUMN_NAMES if name in names] + [name for name in names if name not in COLUMN_NAMES]


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as a table of comma-separated values."""
    text = io.StringIO()
    writer, names = csv.writer(text, lineterminator="\n"), columns_of(rows)
    writer.writerow(names)
    writer.writerows([csv_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def table_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return a table of predictions for a terminal."""
    head = ("", "step s", "tokens/s", "per device", "MFU", "peak", "fits", "compute", "exposed", "bubble", "optimizer")
    lines: list[tuple[str, ...]] = [head]
    for number, prediction in enumerate(predictions, 1):
        time, mfu = prediction.time, prediction.mfu
        exposed = sum(time.exposed_communication_seconds.values())
        lines.append(
            (
                str(number),
                f"{time.step_seconds:.4g}",
                f"{prediction.tokens_per_second:,.0f}",
                f"{prediction.tokens_per_second / prediction.layout.world_size:,.0f}",
                "" if mfu is None else f"{100 * mfu:.1f} %",
                format_bytes(prediction.memory.peak_bytes),
                "yes" if prediction.fits else "no",
                *(f"{part:.3g}" for part in (time.compute_seconds, exposed, time.bubble_seconds)),
                f"{time.optimizer_seconds:.3g}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return [*table, "", *(f"{number}  {entry.label()}" for number, entry in enumerate(predictions, 1))]


def notes(plan: Plan) -> list[str]:
    """Return sentences about a plan: what its figures rest on, what separates candidates, and what would fit."""
    lines = []
    first = plan.predictions[0] if plan.predictions else plan.result and plan.result.smallest
    if isinstance(first, Prediction) and first.cluster.hardware.datasheet_only:
        name = first.cluster.name
        lines.append(f"cluster={name} is datasheet-only: no published measurement stands behind its efficiencies.")
    if plan.result is None:
        misfits = [prediction for prediction in plan.predictions if not prediction.fits]
    else:
        result = plan.result
        lines.append(
            f"{result.considered} candidates were considered, {result.valid} could run, and {result.memory_estimates}"
            " needed an exact estimate of memory."
        )
        lines += [separation(prediction, result.best[0]) for prediction in result.best[1:]]
        lines += memory_sentences(result)[:3]
        misfits = [entry for entry in (result.fastest_misfit,) if entry is not None]
        misfits += [result.smallest] if result.smallest and not result.smallest.fits else []
    for prediction in dict.fromkeys(map(id, misfits)):
        misfit = next(entry for entry in misfits if id(entry) == prediction)
        choice = ", or ".join(itertools.islice(offers(misfit), 4)) or "a smaller model or a larger cluster"
        lines.append(
            f"{misfit.label()} would take {misfit.step_seconds:.4g} s but needs {format_bytes(misfit.needed_bytes)} of"
            f" the {format_bytes(misfit.available_bytes)} of a device: {choice} would fit."
        )
    return lines


def show(arguments: Sequence[str], output: str, explains: bool, page: Path | None = None) -> None:
    """Print the plans of these overrides, and write the page of the first search. Raises UserError for a mistake."""
    if output not in FORMATS:
        raise UserError(f"format={output} is not known: choose {', '.join(FORMATS)}")
    all_plans = plans(arguments)
    predictions = [prediction for plan in all_plans for prediction in plan.predictions]
    rows = [prediction.row() for prediction in predictions]
    if page is not None:
        searches = [plan for plan in all_plans if plan.result is not None]
        if not searches or searches[0].result is None:
            raise UserError(f"--report={page} is the page of a search: leave out strategy, or choose strategy=search")
        atomic_write_text(page, plan_page(searches[0].result, notes(searches[0])))
    if output == "json":
        print(json.dumps(rows, indent=1))
        return
    if output == "csv":
        print(csv_text(rows), end="")
        return
    for line in table_lines(predictions) if predictions else []:
        print(line)
    for plan in all_plans:
        for line in notes(plan):
            print(sanitize(line))
    for number, prediction in enumerate(predictions, 1):
        for line in explanation(prediction) if explains else ():
            print(sanitize(f"{number}: {line}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `harness plan` and return its exit status."""
    about = "Predict memory and time of layouts on any cluster; without a strategy, search for the best."
    parser = argparse.ArgumentParser(
        prog="harness plan", description=about, epilog="KEY=VALUE are the settings of runs, such as model=70b."
    )
    parser.add_argument("--explain", action="store_true", help="also print the arithmetic of each figure")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a search as a page with its front")
    options, words = parser.parse_known_args(arguments)
    formats = [word.partition("=")[2] for word in words if word.startswith("format=")]
    overrides = [word for word in words if not word.startswith("format=")]
    return run_command(lambda: show(overrides, formats[-1] if formats else "table", options.explain, options.report))
