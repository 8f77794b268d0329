"""harness selftest: real runs that show what of an installation works, on any machine."""

from argparse import Namespace

from harness.selftest.bundle import make_bundle
from harness.util.text import UserError


def main(options: Namespace) -> int:
    """Run the steps that the options choose. Return 0 only if no step failed. Raises UserError for an unknown step.

    With `bundle`, make that folder instead, with settings of its simulated rows.
    """
    if options.bundle is not None:
        make_bundle(options.bundle, options.python, options.processor, options.settings)
        print(f"copy {options.bundle} to the GPU machine, and run there: sh {options.bundle.name}/run")
        return 0
    if options.settings:
        options.fail(f"unrecognized arguments: {' '.join(options.settings)}")
    from harness.selftest import run
    from harness.selftest.bench import Bench
    from harness.selftest.results import ResultsFile

    if options.list:
        print(run.list_steps())
        return 0
    known = [step.name for step in run.STEPS]
    names = known if options.only is None else options.only.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"--only={name} is not a step: choose among {', '.join(known)}")
    bench = Bench(options.to, options.device)
    results = ResultsFile(bench)
    try:
        is_ok = run.run_steps(bench, results, names, options.again)
    except KeyboardInterrupt:
        print(f"interrupted; the same command continues, and {results.path} has the steps so far")
        return 130
    run.print_footer(results, names)
    return 0 if is_ok else 1
