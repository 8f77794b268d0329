"""The bench that the self-test's steps run on: this machine, and real runs made by the harness's own runner."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from harness.config.command import read_command_config
from harness.config.hydra import compose_values
from harness.config.schema import ClusterConfig, RequestedDevice
from harness.hardware.machine import CPU_RANKS, Machine
from harness.launcher.rank_entry import worker_entry
from harness.measure.environment import collect_environment
from harness.records.run_folder import RunFolder, comparison_folder
from harness.records.schema import Record
from harness.runner.launch_run import RunContext
from harness.runner.plan import make_plan
from harness.runner.resolve import detect_machine, resolve_auto, resolve_run_config
from harness.runner.reuse import ensure_writable
from harness.runner.run import execute
from harness.util.files import JsonObject
from harness.util.text import UserError

COMPARISON = "selftest"  # the name of the comparison that has the self-test's runs
MOST_RANKS = 2  # of a run that can have any number of ranks


class StepFailedError(Exception):
    """A step of the self-test did not come out as it must; the message says what was different."""


class StepSkippedError(Exception):
    """A step of the self-test cannot run here; the message says what it needs."""


@dataclass
class Bench:
    """This machine, the folder of the runs, and the runs that this command has made."""

    results_dir: Path
    device: RequestedDevice = "auto"
    records: dict[tuple[str, ...], Record] = field(default_factory=dict)  # by their overrides

    @cached_property
    def machine(self) -> Machine:
        """Return this machine. Raises UserError if it does not have the device."""
        return detect_machine(ClusterConfig("local", device=self.device))

    @cached_property
    def environment(self) -> JsonObject:
        """Return the versions, the devices and the settings of this machine."""
        return collect_environment(self.machine)

    @property
    def gpus(self) -> int:
        """Return the number of CUDA devices that runs may use."""
        return self.machine.devices if self.machine.device == "cuda" else 0

    @property
    def world_size(self) -> int:
        """Return the number of ranks of a run that can have any."""
        return min(self.gpus, MOST_RANKS) if self.gpus else CPU_RANKS

    def folder(self, record: Record) -> RunFolder:
        """Return the folder of a run."""
        return comparison_folder(COMPARISON, str(self.results_dir)).run(record.run_id)

    def make_run(self, overrides: str, base: str, entry: Callable[[str], None], may_not_fit: bool) -> Record:
        """Return the record of a run with these overrides after those of `base`.

        It is made anew, unless this command has made the same run already.
        Raises StepFailedError if it is refused or impossible here, StepSkippedError if it is refused and `may_not_fit`.
        """
        known = {"world": self.world_size, "hang": 60 if self.gpus else 20}  # what braces stand for
        arguments = tuple(f"{base} {overrides}".format_map(known).split())
        key = (entry.__qualname__, *arguments)
        if key not in self.records:
            try:
                self.records[key] = self._execute(arguments, entry)
            except UserError as mistake:
                raise StepFailedError(f"{overrides}: {mistake}") from None
        record = self.records[key]
        if record.status == "refused":
            error = StepSkippedError if may_not_fit else StepFailedError
            raise error(f"{overrides}: refused, {record.row['reason']}")
        if record.status == "interrupted":
            raise KeyboardInterrupt
        return record

    def usual_run(self, record: Record) -> Record:
        """Return the record of the same configuration without its `repeat` and with the worker as it is.

        Raises as make_run does.
        """
        (arguments,) = (key[1:] for key, value in self.records.items() if value is record)
        usual = [argument for argument in arguments if not argument.startswith("repeat=")]
        return self.make_run(" ".join(usual), "", worker_entry, may_not_fit=True)

    def _execute(self, arguments: tuple[str, ...], entry: Callable[[str], None]) -> Record:
        own = (f"name={COMPARISON}", f"results_dir={self.results_dir}", f"cluster.device={self.device}")
        always = ("tracking=none", "force=true", "sweep.skip_dominated=false")  # no run depends on another
        last_of_each_key = {argument.partition("=")[0]: argument for argument in arguments}  # Hydra takes a group once
        values = compose_values(*last_of_each_key.values(), *own, *always)
        values = resolve_auto(values, self.machine.device, self.machine.compute_capability)
        config, command = resolve_run_config(values), read_command_config(values)
        plan = make_plan(config, detect_machine(config.cluster), command)
        ensure_writable(plan.comparison)
        record = execute(plan, RunContext(entry))
        if record is None:
            raise UserError(f"another command is working on {plan.folder.path}: wait for it, or choose another --to")
        return record
