"""A campaign of random runs, each of which must be proven, or refused before it starts.

python -m tests.support.random_runs --first 1000 --draws 150 --table results/random_runs.csv
A draw is identified by its number, which is its seed. Those in the table are not run again, unless they are findings
and --again is given. --predict runs nothing: it predicts the memory of the draws in the table anew, so that the table
says how far the present cost model is from what was measured.
"""

import collections
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.launcher.forkserver import start_forkserver
from harness.records.store import columns_of, csv_cell
from harness.runner import resolve
from harness.runner.launch_run import RunContext
from harness.runner.plan import make_plan
from harness.runner.record import predicted_columns
from harness.runner.run import execute
from harness.util.text import UserError
from tests.support.campaigns import FLAG, REQUIRED_PATH, parse_options, read_table, write_table
from tests.support.commands import compose
from tests.support.random_draws import draw_real_size, listed

EXPECTED = ("proven", "refused")  # the outcomes of an honest run; any other is a finding

OWN_COLUMNS = ("draw", "outcome", "wall_seconds", "overrides")

LIMITS = ("timeout_seconds=600", "hang_seconds=300")

DEVIATIONS = ("parameters", "loss_deviation", "grad_deviation", "peak_allocated_bytes", "predicted_peak_bytes")


class Ending(NamedTuple):
    status: str
    reason: str
    row: dict[str, Any]


def ending(overrides: Sequence[str], results: Path) -> Ending:
    """Return how the run of these overrides ends; refused means before any of its processes started."""
    try:
        config, command = compose(*overrides, f"results_dir={results}", "name=random")
        machine = resolve.detect_machine(config.cluster)
        start_forkserver(machine.device)
        plan = make_plan(config, machine, command)
    except UserError as error:
        return Ending("refused", str(error), {})
    row = execute(plan, RunContext()).row
    return Ending(row["status"], row["reason"], row)


def outcome(end: Ending, overrides: Sequence[str]) -> str:
    """Return the word for an ending: proven, refused, or what makes it a finding.

    Every run without dropout is compared with a single process.
    """
    if end.status != "ok":
        return end.status
    is_compared = "model.dropout=0.1" in overrides or end.row.get("grad_deviation") is not None
    return "proven" if is_compared else "unproven"


def write_draws(path: Path, draws: list[dict[str, str]]) -> None:
    """Write a table of draws in the order of their numbers, without the columns that are empty in all."""
    names = dict.fromkeys([*OWN_COLUMNS, *columns_of(draws)])
    filled = [name for name in names if any(draw.get(name) for draw in draws)]
    write_table(path, filled, sorted(draws, key=lambda draw: int(draw["draw"])))


def run_line(number: int, overrides: Sequence[str], limits: Sequence[str] = LIMITS) -> dict[str, str]:
    """Return the table's line of a draw with these overrides, which is run now."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        end = ending([*overrides, *limits], Path(folder))
    columns = {name: csv_cell(value) for name, value in end.row.items()}
    return columns | {
        "draw": str(number),
        "outcome": outcome(end, overrides),
        "wall_seconds": f"{time.monotonic() - started:.1f}",
        "overrides": " ".join(overrides),
        "reason": csv_cell(end.reason),
    }


def predict_again(line: dict[str, str]) -> dict[str, str]:
    """Return the table's line of a run with the columns that the present cost model predicts for it.

    The line of a run that would be refused today stays as it is.
    """
    if not line.get("predicted_peak_bytes"):
        return line
    config, command = compose(*line["overrides"].split(), "name=random")
    try:
        plan = make_plan(config, resolve.detect_machine(config.cluster), command)
    except UserError:
        return line
    columns = predicted_columns(plan)
    return line | {name: csv_cell(value) for name, value in columns.items()}


def main() -> None:
    arguments = parse_options(
        __doc__,
        draws={"default": 150},
        first={"default": 0, "help": "the first draw's number"},
        world={"default": 8, "help": "ranks at most"},
        table=REQUIRED_PATH | {"help": "the CSV file of all draws so far"},
        most={"default": 10**9, "help": "stop after so many runs, to be resumed"},
        again=FLAG | {"help": "run findings again"},
        predict=FLAG | {"help": "predict the memory of the runs in the table anew"},
    )
    if arguments.predict:
        write_draws(arguments.table, [predict_again(line) for line in read_table(arguments.table)])
        return
    draws = {int(draw["draw"]): draw for draw in read_table(arguments.table)}
    finished = {seed for seed, draw in draws.items() if draw["outcome"] in EXPECTED or not arguments.again}
    missing = [seed for seed in range(arguments.first, arguments.first + arguments.draws) if seed not in finished]
    for seed in missing[: arguments.most]:
        draws[seed] = line = run_line(seed, listed(draw_real_size(seed, arguments.world)))
        detail = line["reason"] or " ".join(f"{name} {line.get(name, '')}" for name in DEVIATIONS)
        print(f"{seed} {line['wall_seconds']} s {line['outcome']}: {detail[:300]}", flush=True)
        if line["outcome"] not in EXPECTED:
            print("    " + line["overrides"], flush=True)
        write_draws(arguments.table, list(draws.values()))
    counted = collections.Counter(draw["outcome"] for draw in draws.values())
    print(dict(counted), f"{len(missing[arguments.most :])} left", flush=True)
    raise SystemExit(0 if counted.keys() <= set(EXPECTED) else 1)


if __name__ == "__main__":
    main()
