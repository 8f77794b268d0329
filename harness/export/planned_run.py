"""The layout of a plan as a run that is exported."""

from collections.abc import Callable, Sequence
from pathlib import Path

from harness.data.corpus import prepare_corpus
from harness.export.recorded_run import RecordedRun
from harness.planner.plan import plans
from harness.planner.replay import settle
from harness.planner.row import named_preset
from harness.planner.sentences import misfit_sentence
from harness.records.run_folder import RunSpec
from harness.util.text import UserError


def plan_run(settings: Sequence[str], target: Path, log: Callable[[str], None]) -> RecordedRun:
    """Return the layout of a plan, of a search the fastest one. Raises UserError if there is no such plan."""
    plan, *others = plans(settings)
    if others:
        number = len(others) + 1
        raise UserError(f"{number} plans do not go into one folder: leave out lists of values and sweeps")
    (plan,) = settle([plan], log) if plan.result else [plan]
    if not plan.predictions:
        raise UserError("no layout of the search fits: choose more devices, or name a strategy")
    best = plan.predictions[0]
    if not best.is_runnable:
        raise UserError(f"{best.planned_alone} is planned alone: leave it out to export what this project trains")
    config = named_preset(best.config)
    corpus = prepare_corpus(config.data, config.train.seq_len)
    spec = RunSpec("plan", config, best.layout, corpus, best.cluster.device, threads=1)
    log(best.label() if best.fits else misfit_sentence(best))
    if "without" in config.model.source:
        log(f"model={config.model.name} is exported by {config.model.source}: set that in your own model")
    return RecordedRun(target.resolve(), target.resolve(), spec)
