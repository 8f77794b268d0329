"""The best layouts of a search on simulated devices, before one of them is called likely to fit. Imports no torch.

A plan knows the bytes of tensors, and of what torch's allocator reserves beside them only a range. Where the device
lies within that range, one rank of the layout is simulated as a run with launch=simulated is: its record is kept, and
read by the next plan.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from harness.config.command import CommandConfig, read_command_config
from harness.config.hydra import compose_values
from harness.cost_model.prediction import Prediction, Replay
from harness.hardware.machine import described_machine
from harness.planner.plan import LayoutPlan
from harness.planner.sentences import say
from harness.runner.launch_run import RunContext
from harness.runner.plan import make_plan
from harness.runner.run import execute

PASSES = 2  # micro-batches of a rank, from which on more of them need no more memory


def replay_best(plan: LayoutPlan, log: Callable[[str], None]) -> LayoutPlan:
    """Return a search's plan in which the fastest layouts were simulated until one fits, as far as that was open.

    Those that do not fit are among the best no more.
    """
    values = compose_values(*plan.overrides, primary="plan")
    command = read_command_config({key: value for key, value in values.items() if key != "stack"})
    if plan.result is None or not command.plan.simulate:
        return plan
    return with_best(plan, list(simulated_until_one_fits(plan.predictions, command, log)))


def with_best(plan: LayoutPlan, simulated: Sequence[Prediction]) -> LayoutPlan:
    """Return a search's plan with these predictions, but for those that a simulation refuted, which are told apart."""
    assert plan.result is not None
    best = [prediction for prediction in simulated if prediction.verdict.fits != "no"]
    refuted = [prediction for prediction in simulated if prediction not in best]
    result = dataclasses.replace(plan.result, best=best, refuted=refuted)
    return dataclasses.replace(plan, predictions=best, result=result)


def simulated_until_one_fits(
    predictions: Sequence[Prediction], command: CommandConfig, log: Callable[[str], None]
) -> Iterator[Prediction]:
    """Yield the predictions, fastest first, those that were simulated with what came of it."""
    is_settled = False
    for prediction in predictions:
        is_settled = is_settled or prediction.verdict.fits == "likely"
        if not is_settled and prediction.can_be_replayed:
            log(say("replaying", entry=prediction))
            prediction = dataclasses.replace(prediction, replay=simulate(prediction, command, log))
            is_settled = prediction.verdict.fits == "likely"
        yield prediction


def simulate(prediction: Prediction, command: CommandConfig, log: Callable[[str], None]) -> Replay | None:
    """Return how the fullest rank of a prediction ends on a simulated device, None if it cannot be simulated."""
    config, layout = prediction.config, prediction.layout
    passes = layout.pp if layout.pp_enabled else PASSES
    batch = min(config.train.global_batch, layout.dp * config.train.micro_batch * passes)
    train = dataclasses.replace(config.train, global_batch=batch)
    config = dataclasses.replace(config, launch="simulated", world_size=layout.world_size, train=train)
    record = execute(make_plan(config, described_machine(prediction.cluster), command), RunContext(log=log))
    if record is not None and record.row["status"] == "interrupted":
        raise KeyboardInterrupt
    if record is None or record.row["status"] not in ("ok", "oom"):
        return None
    return Replay(record.row["status"] == "ok", record.row.get("peak_reserved_bytes"), record.row["run_id"])
