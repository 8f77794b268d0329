"""Every command of README and docs is run: small ones and compositions here, whole sweeps with -m long."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from harness.cli.main import COMMANDS, main
from tests.support.commands import ROOT, compose_config, long, run_harness
from tests.support.processes import run_python

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

SMALL = ("strategy=single", "proof.reference=false", "train.seq_len=32", "train.steps=1", "train.warmup_steps=1")

# What a suite does 150, 100 or 3 times, and where its results are committed.
EXPLAINING = "-m tests.benchmarks.explaining"
ONCE = {
    "--draws 150": "--draws 1",
    "--kills 300": "--kills 1",
    EXPLAINING: f"{EXPLAINING} --repeats 1 --out explaining.json",
}

# These commands have tests of their own, which make what they need, such as an account or a cluster, or which check
# what is committed of them in the place of writing it again.
ELSEWHERE = {
    "-m pytest": ".ci/run",
    "hydra/launcher=slurm": "test_slurm.py",
    "hydra/launcher=ray": "test_ray.py",
    "hydra/launcher=kubernetes": "test_job_files.py",
    "wandb login": "test_tracking.py",
    "wandb leet": "test_command.py",
    "model.path=FOLDER": "test_huggingface.py",
    "harness sync": "test_tracking.py",
    "harness reproduce": "test_reproduce.py",
    "harness import": "test_foreign.py",
    "wide_pipeline": "test_extending.py",
    "engine=by_hand": "test_extending.py",
    "tracking=lines": "test_extending.py",
    "harness completion": "test_cli.py",
    "harness explain": "test_derivations.py",
    "harness export": "test_export.py",
    "harness selftest": "test_selftest.py",
    "-m tests.support.reference_pages": "test_docs.py",
    "-m tests.support.published_plans": "test_published_plans.py",
    "-m tests.support.published_comparisons": "test_published_plans.py",
    "-m tests.support.report_picture": "test_page.py",
    "accelerate launch": "test_export.py",
    "-m tests.benchmarks.overhead": "test_overhead.py",
}

STARTS_A_PROGRAM = r"([A-Z_]+=\w+ )?(\.venv/bin/)?(python3?|wandb|pip|harness|accelerate) "


def commands() -> list[str]:
    """Return what a reader may copy: lines of sh blocks, and inline code that starts a program of the environment."""
    copied: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        lines = [part for block in blocks for line in block.splitlines() for part in line.split(" && ")]
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in (*lines, *spans):
            if re.match(STARTS_A_PROGRAM, line) and not is_mention(line):
                copied[line.replace("\\|", "|")] = None
    return list(copied)


def is_mention(line: str) -> bool:
    """Return whether code in a line only names a program or a command word, so that there is nothing to copy."""
    words = shlex.split(line)
    if words[1:3] == ["-m", "harness"]:
        words = ["harness", *words[3:]]
    return words == ["harness"] or (words[0] == "harness" and len(words) == 2 and words[1] in (*COMMANDS, "COMMAND"))


def harness_arguments(command: str) -> list[str] | None:
    """Return the arguments of a command that starts the harness, None for another program."""
    words = shlex.split(command)
    if words[0] in ("harness", ".venv/bin/harness"):
        return words[1:]
    return words[3:] if words[1:3] == ["-m", "harness"] else None


def run_command(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command of the pages by this interpreter in a folder."""
    arguments = harness_arguments(command)
    return run_python(folder, *(shlex.split(command)[1:] if arguments is None else ["-m", "harness", *arguments]))


INSTALL = [command for command in commands() if "-m venv" in command or "pip install" in command]

KNOWN = [command for command in commands() if any(words in command for words in ELSEWHERE)]

CALLS = [(command, arguments) for command in commands() if (arguments := harness_arguments(command)) is not None]

RUNS = [command for command, arguments in CALLS if arguments[0] not in COMMANDS and command not in KNOWN]

SUITES = [command for command in commands() if "-m tests." in command and command not in KNOWN]

READERS = [command for command, arguments in CALLS if arguments[0] in ("status", "report", "diff")]

# Commands that differ only in the name of a comparison are one.
DISTINCT_READERS = list({re.sub(r"results/\w+", "results/NAME", command): command for command in READERS}.values())

LISTS = [command for command, arguments in CALLS if arguments[0] == "ls"]


PLANS = [command for command, arguments in CALLS if arguments[0] == "plan"]

# Searches that simulate their fastest layouts, which takes minutes.
SIMULATED = [each for each in PLANS if "strategy=" not in each.partition("--against")[0] and "simulate" not in each]


def test_no_command_is_left_out() -> None:
    """A command that is new to the pages must be run by one of the tests below, or by one that is named above."""
    assert not set(commands()) - {*INSTALL, *KNOWN, *RUNS, *SUITES, *READERS, *LISTS, *PLANS}
    assert all(list(ROOT.glob(f"tests/*/{name}")) or (ROOT / name).exists() for name in ELSEWHERE.values())
    assert all(any(words in command for command in commands()) for words in ELSEWHERE)
    assert all(any(many in command for command in SUITES) for many in ONCE)
    assert len(RUNS) > 10 and len(READERS) >= 4 and len(SUITES) >= 2 and len(INSTALL) >= 3


@pytest.mark.parametrize("command", [long(each) if each in SIMULATED else each for each in PLANS])
def test_a_plan_has_a_layout(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan, *words = harness_arguments(command)
    assert main([plan, *([] if command in SIMULATED else ["plan.simulate=false"]), *words]) == 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("command", RUNS)
def test_a_run_composes(command: str) -> None:
    """Each combination of the first values composes."""
    arguments = [argument for argument in harness_arguments(command) or () if not argument.startswith("-")]
    if "--cfg" in command:
        arguments.remove("job")
    assert compose_config(*(argument.split(",")[0] for argument in arguments)).model.name


def test_every_sweep_of_the_repository_is_documented_and_exists() -> None:
    named = set(re.findall(r"sweeps=(\w+)", "\n".join(RUNS)))
    assert named == {path.stem for path in (ROOT / "sweeps").glob("*.yaml")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return results/ with a sweep of one run under each name that the commands have, and with what is published."""
    folder = tmp_path_factory.mktemp("readme") / "results"
    assert run_harness(folder, "-m", "name=quickstart", *SMALL).returncode == 0
    for name in ("a", "b", "runs", "NAME"):
        (folder / name).symlink_to(folder / "quickstart")
    (folder / "published").symlink_to(ROOT / "results" / "published")
    return folder


@pytest.mark.parametrize("command", DISTINCT_READERS)
def test_a_command_that_reads_results_succeeds(command: str, results: Path) -> None:
    done = run_command(command, results.parent)
    assert done.returncode == 0 and "ok" in done.stdout, done.stderr


@pytest.mark.parametrize("command", LISTS)
def test_a_command_that_lists_prints_several_lines(command: str) -> None:
    assert run_command(command, ROOT).stdout.count("\n") > 1


@pytest.mark.long
@pytest.mark.parametrize("command", RUNS + SUITES)
def test_a_command_runs_exactly_as_it_stands(command: str, tmp_path: Path) -> None:
    """Each sweep runs whole in a folder of its own, which takes half an hour on two cores.

    A command for 7b may be refused on a machine whose memory is too small for it, in a line that says so.
    """
    for many, single in ONCE.items():
        command = command.replace(many, single)
    for name in ("conf", "sweeps", "harness", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = run_command(command, tmp_path)
    is_too_large = "model=7b" in command and re.search(
        r"refused: model=7b needs .* are available", " ".join(done.stdout.split())
    )
    assert done.returncode == (1 if is_too_large and "-m" not in command.split() else 0), done.stdout + done.stderr
