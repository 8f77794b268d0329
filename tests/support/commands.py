"""The harness as a user calls it, and its parts: configurations, rows, and runs that tests share."""

import copy
import functools
import io
import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import hydra
import pandas as pd
import pytest
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from omegaconf import DictConfig, OmegaConf

from harness.cli.main import main
from harness.config.command import CommandConfig, read_command_config
from harness.config.hydra import register_resolvers, to_container
from harness.config.schema import RunConfig
from harness.engines.base import load_engine
from harness.layout.layout import Layout, resolve_layout
from harness.layout.state_widths import StateWidths
from harness.records.run_folder import RunFolder
from harness.records.schema import Cells, Record
from harness.report.charts import render
from harness.runner import resolve
from harness.runner.launch_run import RunContext
from harness.runner.plan import make_plan
from harness.runner.resolve import resolve_auto, resolve_run_config
from harness.runner.run import execute
from harness.worker import main as worker_main

ROOT = Path(__file__).resolve().parents[2]

GROUPS = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()} | {"sweeps"}

PRECISIONS = ("fp32", "bf16_mixed")

SMALL = ("train.seq_len=32", "train.steps=1", "train.warmup_steps=1")

Done = CompletedProcess[str]

Harness = Callable[..., Done]

Entry = Callable[[str], None]  # what a rank runs in a run's folder


def run_harness(results: Path, *arguments: str) -> Done:
    """Run a command of the harness inside this process, which has torch imported already, and return its outcome.

    Its results go to the folder given. Its reports are without pictures, whose drawing takes a second:
    tests/system/test_charts.py and the commands that tests start in processes of their own draw them.
    """
    command = ["harness", *arguments, f"results_dir={results}", "tracking=none"]
    out, error = io.StringIO(), io.StringIO()
    with chdir(ROOT), redirect_stdout(out), redirect_stderr(error), pytest.MonkeyPatch.context() as patched:
        patched.setattr(render, "svgs", lambda specs: {})
        status = main(command[1:])
    return Done(command, status, out.getvalue(), error.getvalue())


def read_rows(results: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(results / name / "runs.csv", keep_default_na=False, na_values=[""])


def only_row(results: Path, name: str) -> pd.Series:
    (index,) = read_rows(results, name).index
    return read_rows(results, name).loc[index]


@functools.cache
def compose_groups(*overrides: str) -> DictConfig:
    """Return what Hydra composes. It takes a quarter of a second, so that each choice of groups is composed once."""
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra.compose("config", [*overrides, "tracking=none"])


def compose(*overrides: str) -> tuple[RunConfig, CommandConfig]:
    """Return what these overrides configure on a command line, with the defaults of a machine without GPUs.

    Values that are no choice of a group are set as Hydra sets them.
    """
    parsed = OverridesParser.create().parse_overrides([*overrides])
    values = [each for each in parsed if each.key_or_group not in GROUPS and each.type is OverrideType.CHANGE]
    groups = [text for text, each in zip(overrides, parsed, strict=True) if each not in values]
    composed = copy.deepcopy(compose_groups(*groups))
    for override in values:
        OmegaConf.update(composed, override.key_or_group, override.value(), merge=True)
    configured = resolve_auto(to_container(composed), "cpu")
    return resolve_run_config(configured), read_command_config(configured)


def compose_config(*overrides: str) -> RunConfig:
    """Return what a run with these overrides measures."""
    return compose(*overrides)[0]


def compose_layout(world_size: int, *overrides: str) -> tuple[RunConfig, Layout]:
    """Return what a run with these overrides measures, and its layout of so many ranks."""
    config = compose_config(*overrides)
    return config, resolve_layout(config.strategy, world_size)


def widths_of(config: RunConfig, layout: Layout) -> StateWidths:
    """Return the bytes of each parameter's state under the layout's engine."""
    return load_engine(layout.engine).state_widths(config, layout)


def execute_run(config: RunConfig, command: CommandConfig, entry: Entry = worker_main.main) -> Record:
    """Return the record of one run whose ranks run `entry`, such as a fault of tests.support.

    If another test process works on the same run, wait for it and reuse its record.
    """
    planned = make_plan(config, resolve.detect_machine(config.cluster), command)
    while (record := execute(planned, RunContext(entry))) is None:
        time.sleep(0.1)
    return record


def long(*values: object) -> Any:
    """Return a case of a test that is too long for every change."""
    return pytest.param(*values, marks=pytest.mark.long)


def with_larger(
    cases: Sequence[tuple[Entry, str, str]], larger: str, further: Sequence[tuple[Entry, str, str]] = ()
) -> list[Any]:
    """Return faults with the words of their runs and their problems, and each as long cases of a larger model.

    `further` faults are long in both sizes.
    """
    both = itertools.product(PRECISIONS, (*cases, *further))
    return [
        *cases,
        *(long(*case) for case in further),
        *(long(fault, f"{words} {larger} precision={each}", problem) for each, (fault, words, problem) in both),
    ]


def assert_ok(row: Cells) -> None:
    """Check that the run of a row ended well, and that the row gives no reason for another end."""
    assert (row["status"], row["reason"]) == ("ok", ""), f"{row['strategy']}: {row['reason']}"


def assert_not_proven(record: Record, words: str) -> None:
    """Check that the run is an error and that one of the problems its proof names contains these words."""
    problems = record.proof["problems"]
    assert record.row["status"] == "error"
    assert any(words in problem for problem in problems), problems


SMALL_BATCH = (
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.seq_len=64",
    "train.steps=1",
    "train.warmup_steps=2",
)


COMPARISON = "shared"  # the comparison of all runs that run_with() makes: its references are made once


def run_with(results: Path, *overrides: str, entry: Entry = worker_main.main) -> Record:
    """Return the record of a small run on two ranks, unless the overrides say otherwise.

    Every run is made once and then reused from its record, by all tests and test processes. A run with a fault is a
    repeat of its configuration with a number of its own, so that it has the same reference and leaves the record
    without a fault alone.
    """
    fault = () if entry is worker_main.main else (f"repeat={zlib.crc32(entry.__qualname__.encode())}",)
    folder = (f"results_dir={results}", f"name={COMPARISON}", "world_size=2")
    config, command = compose(*folder, *fault, *SMALL_BATCH, *overrides)
    return execute_run(config, command, entry)


def run_folder(results: Path, record: Record) -> RunFolder:
    """Return the folder of a run that run_with() made."""
    return RunFolder(results / COMPARISON / record.run_id)
