"""harness selftest: real runs that show what of an installation works, on any machine."""

from argparse import Namespace
from pathlib import Path

from harness.cli.command import argument, command
from harness.util.errors import UserError


@command(
    "selftest",
    "Show what of this installation works: versions, devices, and real runs with what must come of each. Steps that"
    " have passed are not repeated by a later call. The exit status is 0 only if no step failed.",
    argument("--only", metavar="STEP,...", help="run these steps alone; --list names them all"),
    argument("--again", action="store_true", help="repeat steps that have passed before"),
    argument("--list", action="store_true", help="name the steps, what each shows, and what it needs"),
    argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="the device of the runs"),
    argument("--to", type=Path, default=Path("results"), metavar="DIR", help="the folder of the results"),
)
def main(options: Namespace) -> int:
    """Run the steps that the options choose. Return 0 only if no step failed. Raises UserError for an unknown step."""
    from harness.selftest import run
    from harness.selftest.bench import Bench
    from harness.selftest.results import ResultsFile
    from harness.selftest.steps import STEPS

    if options.list:
        print(run.list_steps())
        return 0
    known = [step.name for step in STEPS]
    names = known if options.only is None else options.only.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"--only={name} is not a step: choose among {', '.join(known)}")
    bench = Bench(options.to, options.device)
    results = ResultsFile(bench)
    run.print_header(bench)
    try:
        is_ok = run.run_steps(bench, results, names, options.again)
    except KeyboardInterrupt:
        print(f"interrupted; the same command continues, and {results.path} has the steps so far")
        return 130
    run.print_footer(results, names)
    return 0 if is_ok else 1
