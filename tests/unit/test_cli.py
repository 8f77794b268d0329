"""The start of the command line: it imports little, and does nothing harmful without arguments."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import ls
from harness.cli.main import unknown_command_text
from tests.support.commands import ROOT
from tests.support.tracking import write_example_record

HEAVY = ("torch", "hydra", "omegaconf", "pandas", "deepspeed", "transformers")


def imported(*arguments: str) -> tuple[list[str], str, float]:
    """Return which heavy packages a command imports, its output, and its CPU seconds."""
    code = (
        "import json, sys\nfrom harness.cli.main import main\n"
        f"status = main({list(arguments)!r})\n"
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]), file=sys.stderr)\n"
        "sys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stderr.splitlines()[-1]), done.stdout, seconds


@pytest.mark.parametrize(("argument", "output"), [("--help", "usage: harness"), ("--version", "harness ")])
def test_help_and_version_import_nothing_heavy(argument: str, output: str) -> None:
    heavy, printed, seconds = imported(argument)
    assert heavy == [] and output in printed
    assert seconds < 1


def test_without_arguments_help_is_shown_and_nothing_is_trained() -> None:
    heavy, printed, _ = imported()
    assert heavy == [] and printed == imported("--help")[1]


def test_status_needs_no_torch(tmp_path: Path) -> None:
    heavy, printed, _ = imported("status", str(tmp_path))
    assert "torch" not in heavy and "no run is recorded" in printed


@pytest.mark.parametrize("command", ["ls strategies", "report {results}", "diff {results} {results}"])
def test_commands_on_records_need_no_torch(command: str, tmp_path: Path) -> None:
    write_example_record(tmp_path / "results")
    heavy, printed, _ = imported(*command.format(results=tmp_path / "results").split())
    assert not {"torch", "hydra"} & set(heavy) and printed


PARENTS = ("launcher.multinode", "runner.run", "sweep.executors.parallel", "sweep.slurm.executor")


@pytest.mark.parametrize("module", PARENTS)
def test_parents_of_ranks_import_no_model_engine_or_worker(module: str) -> None:
    code = f"import json, sys, harness.{module}\nprint(json.dumps(list(sys.modules)))"
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))
    engines = {name for name in modules if name.startswith("harness.engines.")}
    assert engines <= {"harness.engines.base"}
    assert not [name for name in modules if name.startswith(("harness.models", "harness.worker"))]


def test_a_word_that_is_no_command_names_the_nearest_command() -> None:
    assert unknown_command_text("statsu") == "statsu is neither a command nor KEY=VALUE: choose status"
    assert unknown_command_text("foo").endswith("choose status, report, diff, sync, export, ls, or write KEY=VALUE")


def test_a_list_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    assert ls.main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = max(len(line.split()[0]) for line in lines) + 2
    assert all(line[start - 1] == " " and line[start] != " " for line in lines)


def test_a_reader_that_closes_the_output_ends_a_command_quietly() -> None:
    command = f"{sys.executable} -m harness ls strategies | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
