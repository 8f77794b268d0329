"""The start of the command line: it imports little, and does nothing harmful without arguments."""

import contextlib
import json
import os
import pty
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.completion import SHELLS, candidates
from harness.cli.main import main
from harness.report.files import FOLDER, FORMATS
from tests.support.commands import ROOT
from tests.support.processes import run_python
from tests.support.tracking import write_example_record

HEAVY = ("torch", "hydra", "omegaconf", "pandas", "deepspeed", "transformers")


def imported(*arguments: str) -> tuple[set[str], str, float]:
    """Return which heavy packages a command imports, its output, and its CPU seconds."""
    code = (
        "import atexit, json, sys\nfrom harness.cli.main import main\n"
        f"show = lambda: print(json.dumps([name for name in {HEAVY} if name in sys.modules]), file=sys.stderr)\n"
        f"atexit.register(show)\nsys.exit(main({list(arguments)!r}))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_python(ROOT, "-c", code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return set(json.loads(done.stderr.splitlines()[-1])), done.stdout, seconds


@pytest.mark.parametrize(
    ("command", "allowed", "words"),
    [
        ("--help", "", "usage: harness"),
        ("--version", "", "harness "),
        ("report --help", "", "usage: harness report"),
        ("ls strategies", "", "zero3"),
        ("status {results}", "hydra omegaconf pandas", "1 ok"),
        ("report {results}", "omegaconf pandas", "report.md"),
        ("diff {results} {results}", "omegaconf pandas", "A: "),
        ("plan strategy=zero3 model=7b cluster=8xh100", "hydra omegaconf", "tokens/s"),
    ],
)
def test_a_command_imports_little(command: str, allowed: str, words: str, tmp_path: Path) -> None:
    """What prints help imports nothing heavy and takes less than a second; what needs no torch imports none."""
    write_example_record(tmp_path / "results")
    heavy, printed, seconds = imported(*command.format(results=tmp_path / "results").split())
    assert heavy <= set(allowed.split()) and words in printed
    assert allowed or seconds < 1


def test_without_arguments_help_is_shown_and_nothing_is_trained() -> None:
    assert imported()[:2] == imported("--help")[:2]


PARENTS = ("launcher.multinode", "runner.run", "sweep.parallel", "sweep.slurm.executor")


def test_parents_of_ranks_import_no_model_engine_or_worker() -> None:
    imports = ", ".join(f"harness.{module}" for module in PARENTS)
    code = f"import json, sys, {imports}\nprint(json.dumps(list(sys.modules)))"
    modules = json.loads(run_python(ROOT, "-c", code).stdout)
    engines = {name for name in modules if name.startswith("harness.engines.")}
    assert engines <= {"harness.engines.base"}
    assert not [name for name in modules if name.startswith(("harness.models", "harness.worker"))]


def test_a_list_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = max(len(line.split()[0]) for line in lines) + 2
    assert all(line[start - 1] == " " and line[start] != " " for line in lines)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("harness st", {"stack=", "status", "strategy=", "strategy.", "stop_after="}),
        (
            "harness -m strategy=ddp,zero3",
            {"strategy=ddp,zero3", "strategy=ddp,zero3_defaults", "strategy=ddp,zero3_tuned"},
        ),
        ("harness model=tiny train.warm", {"train.warmup_steps="}),
        ("harness cluster.device=", {"cluster.device=auto", "cluster.device=cpu", "cluster.device=cuda"}),
        ("harness ls s", {"strategies", "sweeps"}),
        ("harness selftest --o", {"--only"}),
        ("harness --cfg ", {"job", "hydra", "all"}),
    ],
)
def test_what_may_follow_is_completed(line: str, words: set[str]) -> None:
    assert set(candidates(line)) == words


def test_the_help_of_a_report_names_what_it_exports() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    assert f"folder {FOLDER}: any of {', '.join(FORMATS)}" in " ".join(page.split())


def test_bash_completes_after_an_equals_sign() -> None:
    """The shell breaks words there, so that it must be given what follows."""
    program = Path(sys.executable).with_name("harness")
    line = "harness strategy=zero3_t"
    script = (
        f"{SHELLS['bash']}\nCOMP_WORDS=({program}) COMP_LINE='{line}' COMP_POINT={len(line)}\n_harness 2>/dev/null\n"
    )
    printed = subprocess.check_output(["bash", "-c", script + 'echo "${COMPREPLY[@]}"'], cwd=ROOT, text=True)
    assert printed == "zero3_tuned\n"


def test_a_terminal_shows_what_is_loading(tmp_path: Path) -> None:
    """The first line appears before anything slow is imported, and is removed before the command's own output."""
    reader, writer = pty.openpty()
    command = [sys.executable, "-X", "importtime", "-m", "harness", "train.steps=x", f"results_dir={tmp_path}"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=writer)
    os.close(writer)
    lines = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while chunk := os.read(reader, 2**16):
            lines += chunk
    os.close(reader)
    before, notice, after = lines.decode().partition("harness: loading")
    assert (process.wait(), bool(notice)) == (2, True)
    assert "| hydra" not in before and "| torch\r" not in after
    assert after.rindex("\x1b[2K") < after.index("train.steps=x is not a whole number")


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "strategies"]])
def test_a_reader_that_closes_the_output_ends_a_command_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "harness", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
