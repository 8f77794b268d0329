"""The layouts of a plan on simulated devices, before one of them is called likely to fit. Imports no torch.

A plan knows the bytes of tensors, and of what torch's allocator reserves beside them only a range. Where the device
lies within that range, one rank of the layout is simulated as a run with launch=simulated is: its record is kept, and
read by the next plan.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from harness.config.command import CommandConfig, read_command_config
from harness.config.hydra import compose_values
from harness.config.schema import RunConfig
from harness.cost_model.prediction import Prediction, Replay
from harness.hardware.machine import described_machine
from harness.planner.plan import LayoutPlan
from harness.planner.row import named_preset
from harness.planner.sentences import say
from harness.runner.launch_run import RunContext
from harness.runner.plan import find_problems, make_plan
from harness.runner.run import execute

# Micro-batches of a rank: the second one finds the gradients of the first. A pipeline has at least as many as ranks, in
# the shape of a V twice as many.
PASSES = 2


def settle(plans: Sequence[LayoutPlan], log: Callable[[str], None]) -> list[LayoutPlan]:
    """Return plans in which layouts were simulated that leave open whether they fit, fastest first until one does.

    So it is for each search, which has those that do not fit among its best no more, and for the single layouts of each
    model.
    """
    command = command_of(plans[0])
    if not command.plan.simulate:
        return list(plans)
    until_one_fits = partial(simulated_until_one_fits, simulate=partial(simulate, command=command, log=log))
    alone = [prediction for plan in plans if plan.result is None for prediction in plan.predictions]
    alone.sort(key=lambda prediction: (prediction.config.model.name, prediction.step_seconds))
    models = itertools.groupby(alone, lambda prediction: prediction.config.model.name)
    shown = dict(zip(map(id, alone), [entry for _, group in models for entry in until_one_fits([*group])], strict=True))
    return [
        dataclasses.replace(plan, predictions=[shown[id(prediction)] for prediction in plan.predictions])
        if plan.result is None
        else with_best(plan, until_one_fits(plan.result.best))
        for plan in plans
    ]


def command_of(plan: LayoutPlan) -> CommandConfig:
    """Return the settings of a plan that are of its command, such as where simulations are recorded."""
    values = compose_values(*plan.overrides, primary="plan")
    return read_command_config({key: value for key, value in values.items() if key != "stack"})


def with_best(plan: LayoutPlan, simulated: Sequence[Prediction]) -> LayoutPlan:
    """Return a search's plan with these as the best and on the front, but for those that a simulation refuted."""
    assert plan.result is not None
    best = [prediction for prediction in simulated if prediction.verdict.fits != "no"]
    refuted = [prediction for prediction in simulated if prediction not in best]
    known = {prediction.label(): prediction for prediction in simulated}
    front = [known.get(entry.label(), entry) for entry in plan.result.front]
    front = [entry for entry in front if entry not in refuted]
    result = dataclasses.replace(plan.result, best=best, refuted=refuted, front=front)
    return dataclasses.replace(plan, predictions=result.choices, result=result)


def simulated_until_one_fits(
    predictions: Sequence[Prediction], simulate: Callable[[Prediction], Prediction]
) -> list[Prediction]:
    """Return the predictions, fastest first, those that were simulated with what came of it."""
    shown: list[Prediction] = []
    for prediction in predictions:
        is_settled = any(entry.verdict.fits == "likely" for entry in shown)
        shown.append(simulate(prediction) if prediction.is_open and not is_settled else prediction)
    return shown


def shortened(prediction: Prediction) -> tuple[RunConfig, int]:
    """Return the configuration of a simulation with few micro-batches, and the bytes that its peak has less.

    They are what a pipeline keeps of each further micro-batch, such as the buffers that it receives hidden states in. A
    simulated device has as many bytes less. Every expert has as many tokens, as the plan takes it.
    """
    config, layout = named_preset(prediction.config), prediction.layout
    micro_batches = max(PASSES, layout.pp * (1 + layout.is_v_shaped))
    batch = layout.dp * config.train.micro_batch * micro_batches
    train = dataclasses.replace(config.train, global_batch=min(config.train.global_batch, batch))
    model = dataclasses.replace(config.model, routing="balanced") if config.model.num_experts else config.model
    # Both degrees as a search has them: a preset leaves one to the world.
    strategy = dataclasses.replace(config.strategy, dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard)
    config = dataclasses.replace(config, strategy=strategy, train=train, model=model)
    config = dataclasses.replace(config, launch="simulated", world_size=layout.world_size)
    absent = prediction.memory.peak_bytes - dataclasses.replace(prediction, config=config).memory.peak_bytes
    if absent <= 0:
        return config, 0
    budget = prediction.available_bytes - prediction.memory.process_bytes - absent
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, memory_budget=budget)), absent


def simulation_problems(prediction: Prediction) -> Iterator[str]:
    """Yield every reason why a simulation cannot tell whether a prediction fits, a line each."""
    facts = {
        "planned_alone": not prediction.is_runnable,
        "other_layers": prediction.is_of_library,
        "slow_offload": prediction.memory.host_bytes > 0,
    }
    yield from say.of(facts, entry=prediction)
    config, _ = shortened(prediction)
    yield from find_problems(config, prediction.layout, described_machine(prediction.cluster))


def simulate(prediction: Prediction, command: CommandConfig, log: Callable[[str], None]) -> Prediction:
    """Return a prediction with how its fullest rank ends on a simulated device, or with why it was not simulated."""
    if problem := next(simulation_problems(prediction), None):
        return dataclasses.replace(prediction, not_simulated=problem.partition(": choose ")[0])
    log(say("replaying", entry=prediction))
    config, absent = shortened(prediction)
    record = execute(make_plan(config, described_machine(prediction.cluster), command), RunContext(log=log))
    if record is None:
        return dataclasses.replace(prediction, not_simulated="another command simulates it now")
    status, reserved = record.row["status"], record.row.get("peak_reserved_bytes")
    if status == "interrupted":
        raise KeyboardInterrupt
    if status not in ("ok", "oom"):
        return dataclasses.replace(prediction, not_simulated=f"{status}: {record.row.get('reason')}")
    replay = Replay(status == "ok", reserved and reserved + absent, record.row["run_id"])
    return dataclasses.replace(prediction, replay=replay)
