"""What references cost on machines with GPUs: the chains of the README's command, by plans alone.

    python -m tests.support.reference_chains --out results/references/chains.csv

Nothing is trained: a launch takes as long as its planned steps and OTHER_SECONDS, or runs into its time limit, and is
recorded in memory. A copy of this file in an older clone shows that clone's chains.
"""

import fnmatch
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.config.command import CommandConfig, merge_values, read_command_config
from harness.config.hydra import compose_values
from harness.config.schema import RunConfig
from harness.cost_model.flops import executed_flops
from harness.hardware.machine import DescribedCluster, described_devices, described_machine
from harness.records.rank_report import RankReport
from harness.records.run_folder import ComparisonFolder
from harness.records.schema import Record
from harness.runner import reference_runs
from harness.runner.launch_run import RunContext
from harness.runner.plan import RunPlan, make_plan
from harness.runner.record import Reference
from harness.runner.resolve import load_strategy_preset, resolve_auto, resolve_run_config
from tests.support.campaigns import REQUIRED_PATH, Line, parse_options, write_table

DEVICES = {"8xA100-80": "NVIDIA A100-SXM4-80GB", "8xH100": "NVIDIA H100 80GB HBM3", "8xH200": "NVIDIA H200"}
MODELS = ("1b", "3b", "7b", "8b", "13b")
STRATEGIES = ("zero3", "zero3_tuned", "fsdp_full_shard", "tp")

COLUMNS = ("machine", "model", "strategy", "seconds", "proven", "chain", "reference")

# What a reference takes beside its training: start, construction, the profiled step and the trace. Assumed.
OTHER_SECONDS = 45.0
TRAININGS = 2  # of a reference


@dataclass
class Laboratory:
    """The records of one comparison, whose runs take as long as they are planned to, or some times as long."""

    slowness: float = 1.0
    launches: int = 1000  # before the command is killed
    records: dict[Path, Record] = field(default_factory=dict)
    launched: list[RunPlan] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def launch(self, plan: RunPlan, context: RunContext, compared: Reference) -> Record:
        """Record a run as if it had trained, and return the record. Raises KeyboardInterrupt if it is killed."""
        assert plan.prediction is not None
        plan.folder.path.mkdir(parents=True, exist_ok=True)
        plan.folder.record.touch()
        if len(self.launched) == self.launches:
            raise KeyboardInterrupt
        step, limit = self.slowness * plan.prediction.step_seconds, plan.command.timeout_seconds
        trainings = TRAININGS if plan.folder.is_reference else 1
        seconds = OTHER_SECONDS + trainings * plan.config.train.total_steps * step
        row = {
            "run_id": plan.run_id,
            "status": "timeout" if seconds > limit else "ok",
            "reason": f"killed after {limit:g} s" if seconds > limit else "",
            "measured_on": plan.machine.device_name,
            "model": plan.config.model.name,
            "precision": plan.config.precision.name,
            "seq_len": plan.config.train.seq_len,
            "world_size": plan.layout.world_size,
            "duration_seconds": min(seconds, limit),
            "step_seconds": step,
            "executed_flops": executed_flops(plan.config, plan.layout, "cuda"),
        }
        config = merge_values(plan.config, plan.command)
        record = Record.from_json({"row": row, "config": config, "ranks": [], "proof": {"reference": compared.note}})
        self.records[plan.folder.path] = record
        self.launched.append(plan)
        return record

    @contextmanager
    def replacing_runs(self) -> Iterator[None]:
        """Let references be launched and recorded here."""
        replaced: dict[str, Callable[..., Any]] = {
            "launch_run": self.launch,
            "read_reports": lambda plan: [RankReport(losses=[0.0])],
            "reusable_record": lambda command, folder: self.records.get(folder.path),
            "readable_records": self.readable_records,
        }
        with pytest.MonkeyPatch.context() as patched:
            modules = [module for name, module in sys.modules.items() if name.startswith("harness.runner.reference")]
            for module, name in itertools.product(modules, replaced):
                patched.setattr(module, name, replaced[name], raising=False)
            yield

    def readable_records(self, folder: ComparisonFolder, pattern: str) -> list[Record]:
        """Return the records of a folder whose names match a pattern."""
        own = {path.name: record for path, record in self.records.items() if path.parent == folder.path}
        return [own[name] for name in fnmatch.filter(own, pattern)]

    def reference(self, plan: RunPlan) -> tuple[float, str, Reference]:
        """Return the seconds of what is trained before a run, the same in words, and the run's reference.

        Then the run itself is recorded.
        """
        first = len(self.launched)
        reference = reference_runs.get_reference(plan, RunContext(log=self.log.append))
        runs = self.launched[first:]
        seconds = [self.records[run.folder.path].row["duration_seconds"] for run in runs]
        words = [
            f"{run.config.strategy.name} on {run.layout.world_size}, {run.config.model.num_hidden_layers} layers,"
            f" {run.config.train.total_steps} steps: {duration:.0f} s"
            for run, duration in zip(runs, seconds, strict=True)
        ]
        self.launch(plan, RunContext(), reference)
        return sum(seconds), "; ".join(words), reference


@cache
def configured(*overrides: str) -> tuple[RunConfig, CommandConfig]:
    """Return what a command line configures on GPUs that compute in bfloat16."""
    values = resolve_auto(compose_values("data=synthetic", "tracking=none", *overrides), "cuda", (8, 0))
    return resolve_run_config(values), read_command_config(values)


def plan_on(name: str, strategy: str, results: str, *overrides: str) -> RunPlan:
    """Return the plan of a run on a node of eight free devices; `name` is the machine's in a table."""
    machine = described_machine(DescribedCluster(name, 1, 8, described_devices()[DEVICES[name]], "cuda"))
    config, command = configured(*overrides)
    run = replace(config, strategy=load_strategy_preset(strategy))
    return make_plan(run, machine, replace(command, results_dir=results))


def chain_lines(name: str, model: str, strategies: Sequence[str] = STRATEGIES) -> Iterator[Line]:
    """Yield a line for each strategy of a command: what is trained before its first row, in this order."""
    laboratory = Laboratory()
    with tempfile.TemporaryDirectory() as folder, laboratory.replacing_runs():
        for strategy in strategies:
            seconds, chain, reference = laboratory.reference(plan_on(name, strategy, folder, f"model={model}"))
            values = (name, model, strategy, round(seconds), "yes" if reference.report else "no", chain, reference.note)
            yield dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    options = parse_options(__doc__, out=REQUIRED_PATH)
    lines = [line for name in DEVICES for model in MODELS for line in chain_lines(name, model)]
    write_table(options.out, COLUMNS, lines)


if __name__ == "__main__":
    main()
