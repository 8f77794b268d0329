"""The first half of the command that makes runs: its combinations, composed and checked before anything slow loads."""

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from harness.cli.notice import Notice, import_slowly, showing
from harness.config.arguments import normalize_arguments
from harness.config.command import read_command_config
from harness.config.from_dict import ConfigValues, GroupValues, from_dict
from harness.config.hydra import composing, register_resolvers, to_container
from harness.config.locations import PACKAGED_CONF
from harness.config.schema import ClusterConfig
from harness.layout.layout import resolve_layout
from harness.records.run_folder import ComparisonFolder, comparison_folder
from harness.runner.plan import find_problems
from harness.runner.resolve import machine_of_run, resolve_auto, resolve_run_config
from harness.runner.reuse import ensure_writable
from harness.sweep.jobs import plugin
from harness.sweep.queued_run import parse_stop_after, wants_max_micro_batch
from harness.tracking.base import check_tracker
from harness.util.redact import redacted
from harness.util.text import UserError, count_text


@dataclass(frozen=True)
class Combinations:
    """What a command line describes: the values of every combination of a sweep, or of the only run."""

    requested: Sequence[ConfigValues]
    launcher: GroupValues  # the keys of hydra.launcher
    comparison: ComparisonFolder
    is_sweep: bool

    @property
    def is_for_cluster(self) -> bool:
        """Whether the runs are jobs of a cluster, so that their machine is another one."""
        return plugin.is_selected(self.launcher)


def compose(arguments: Sequence[str], notice: Notice) -> Combinations | None:
    """Return what the arguments describe; None if Hydra only printed something, as for --cfg job.

    Raises UserError for a mistake in them.
    """
    normalized = normalize_arguments(arguments)
    composed: list[tuple[Any, Any]] = []  # each combination with Hydra's own configuration

    def on_composed(combination: Any) -> None:
        """Store a combination and show how many there are; Hydra takes a minute or two for five hundred of them."""
        composed.append((combination, HydraConfig.get()))
        if composed[-1][1].mode == RunMode.MULTIRUN:
            notice.show(f"harness: {count_text(len(composed), 'combination')} composed")

    previous, sys.argv = sys.argv, ["harness", *normalized]  # Hydra reads the process's arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them its own way
    register_resolvers()
    plugin.register_launcher()
    try:
        with composing(), tempfile.TemporaryDirectory() as scratch:
            OmegaConf.register_new_resolver("harness.scratch", lambda: scratch, replace=True)
            hydra.main(version_base="1.3", config_path=str(PACKAGED_CONF), config_name="config")(on_composed)()
    finally:
        sys.argv = previous
    return combinations_of(composed, arguments) if composed else None


def combinations_of(composed: Sequence[tuple[Any, Any]], arguments: Sequence[str]) -> Combinations:
    """Return composed combinations as plain values, with the command line that they are of, wherever its results go.

    Raises UserError for a value that cannot be resolved.
    """
    words = [word for word in arguments if not word.startswith("results_dir=")]
    command = {"command_line": redacted(shlex.join(["harness", *words]))}
    requested = [to_container(combination) | command for combination, _ in composed]
    hydra_config, values = composed[-1][1], requested[-1]
    is_sweep = hydra_config.mode == RunMode.MULTIRUN
    if not is_sweep and isinstance(values["sweep"], dict):  # a single configuration is always tried
        values["sweep"] |= {"skip_dominated": False}
    comparison = [comparison_folder(values["name"], values["results_dir"]) for values in requested][-1]
    return Combinations(requested, to_container(hydra_config.launcher), comparison, is_sweep)


def check(combinations: Combinations) -> None:
    """Raise UserError for what no run of the command could begin with, and for an impossible single run.

    Impossible combinations of a sweep become rows.
    """
    for name in {values["tracking"]["name"]: None for values in combinations.requested}:
        check_tracker(name)
    parse_stop_after(combinations.requested[0]["stop_after"])
    is_single = not combinations.is_sweep and not combinations.is_for_cluster
    if not is_single or check_run(combinations.requested[0]):  # an impossible single run leaves no files
        ensure_writable(combinations.comparison)


def check_run(values: ConfigValues) -> bool:
    """Raise UserError if this machine cannot run these values.

    Return False where that takes long to decide and is left to the run: for a model of the transformers library, a
    search of micro-batches, and several nodes.
    """
    read_command_config(values)
    cluster = from_dict(ClusterConfig, values["cluster"], "cluster")
    is_remote = cluster.nodes > 1 and values.get("launch") != "simulated"
    if is_remote or wants_max_micro_batch(values) or values["model"].get("family") == "hf":
        return False
    machine = machine_of_run(values)
    config = resolve_run_config(resolve_auto(values, machine.device, machine.compute_capability))
    layout = resolve_layout(config.strategy, config.world_size or machine.world_size)
    if problems := [*find_problems(config, layout, machine)]:
        raise UserError("; ".join(problems))
    return True


def main(arguments: Sequence[str]) -> int:
    """Run what the overrides describe, and return the exit status of the runs. Raises UserError for a mistake.

    What makes the runs is imported only once the command is known to be without a mistake.
    """
    with showing("harness: reading the configuration") as notice:
        combinations = compose(arguments, notice)
        if combinations is None:
            return 0
        check(combinations)
    number = count_text(len(combinations.requested), "combination" if combinations.is_sweep else "run")
    run = import_slowly("harness.cli.run", f"harness: {number} composed, loading what runs them")
    status: int = run.main(combinations)
    return status
