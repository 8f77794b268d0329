"""The command line: it imports little, does no harm without arguments, answers mistakes, and exports whole scripts."""

import contextlib
import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from harness.cli.completion import SHELLS, candidates
from harness.cli.export import FILES
from harness.cli.main import main, refuse_copies
from harness.config import mistakes
from harness.config.locations import files_in
from harness.config.mistakes import choices_of, group_names, known_keys, similar_models
from harness.data.corpus import Corpus
from harness.export.recorded_run import RecordedRun
from harness.export.script import file_text, refusals
from harness.records.run_folder import RunSpec
from harness.records.store import write_runs_csv
from harness.report.files import FOLDER, FORMATS
from harness.util.text import UserError
from tests.support.commands import ROOT, compose_layout
from tests.support.example_records import row
from tests.support.processes import run_python
from tests.support.tracking import write_example_record

HEAVY = ("torch", "hydra", "omegaconf", "pandas", "deepspeed", "transformers", "wandb")


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


COPIES = {
    "torchrun": {"RANK": "3", "WORLD_SIZE": "8"},
    "srun": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
}

ALONE: list[dict[str, str]] = [
    {"RANK": "0", "WORLD_SIZE": "1"},
    {"WORLD_SIZE": "8"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "44749"},  # a shell of srun --pty
]


@pytest.mark.parametrize("starter", COPIES)
def test_a_command_that_is_started_once_for_each_rank_is_refused(
    starter: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_python(ROOT, "-m", "harness", "strategy=ddp", **COPIES[starter])
    refusal = f"{starter} must not start the harness, which starts the ranks itself"
    assert done.returncode == 2 and refusal in done.stderr
    for name, value in COPIES[starter].items():
        monkeypatch.setenv(name, value)
    for words in (["selftest"], ["calibrate"]):
        assert main(words) == 2 and refusal in capsys.readouterr().err
    assert main(["ls", "sweeps"]) == 0


@pytest.mark.parametrize("variables", ALONE)
def test_a_command_that_is_started_once_is_not_refused(variables: dict[str, str]) -> None:
    refuse_copies(variables)


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


PARENTS = ("launcher.multinode", "runner.run", "sweep.parallel", "sweep.jobs.executor")


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
            {f"strategy=ddp,zero3{end}" for end in ("", "_defaults", "_hpz", "_plus_plus", "_tuned")},
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


SLIPS = re.findall(r"^\| `(.+?)` \| (.+) \|$", (ROOT / "docs" / "reference" / "mistakes.md").read_text(), re.MULTILINE)


def answer(typed: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command prints for a mistake, which must be one line."""
    status = main(shlex.split(typed))
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1), (typed, printed)
    return printed.err.strip().replace("`", "")


def test_every_mistake_of_the_page_has_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # which has no results
    assert len(SLIPS) > 120
    answers = {typed: (expected, answer(typed, capsys)) for typed, expected in SLIPS}
    wrong = {
        typed: printed
        for typed, (expected, printed) in answers.items()
        if not re.fullmatch(re.escape(expected).replace("…", ".+"), printed)
    }
    assert wrong == {}


def test_several_values_are_the_first_mistake_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "add -m to run every combination" in answer("gpus=8 strategy=ddp,nope", capsys)


HEADER = "# @package _global_\n"
PARAMS = "name: mine\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      "

SWEEP_FILES = {
    PARAMS + "strategy: ddp,tp": "sweeps/mine.yaml lacks its first line: write # @package _global_",
    HEADER + "name: [": "a configuration file is not valid YAML: .+",
    HEADER
    + "strategy: [ddp, tp]": "sweeps/mine.yaml: strategy: ['ddp', 'tp'] is a choice: write strategy: ddp,tp under"
    " hydra.sweeper.params",
    HEADER + "strategie: ddp": "sweeps/mine.yaml: strategie is not a key: did you mean strategy=ddp?",
    HEADER + PARAMS + "strategie: ddp,tp": "strategie is not a key: did you mean strategy=ddp,tp?",
    HEADER
    + PARAMS
    + "strategy: [ddp, tp]": "sweeps/mine.yaml: strategy: ['ddp', 'tp'] is a list: write strategy: ddp,tp",
    HEADER + PARAMS + "strategy: ddp,zerro3": "strategy=zerro3 is not known: did you mean strategy=zero3, .+",
    HEADER + PARAMS + "checkpointing: true": "checkpointing=true is not known: did you mean checkpointing=full?",
    HEADER + PARAMS.replace("  mode: MULTIRUN\n", "") + "strategy: ddp,tp": "sweeps/mine.yaml varies nothing without"
    " mode: MULTIRUN under hydra: write it, or add -m",
}


@pytest.mark.parametrize(("text", "expected"), SWEEP_FILES.items())
def test_a_mistake_in_the_file_of_a_sweep_has_the_line_to_write(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(re.escape(expected).replace(r"\.\+", ".+"), answer("sweeps=mine", capsys))


def test_a_command_without_its_folder_names_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fastest run comes first, by a command that lacks its run and by one that was given a comparison."""
    runs = [row(n, "ddp", "torch", 0, tokens_per_second=speed) for n, speed in enumerate((100.0, 300.0, 200.0))]
    (tmp_path / "results" / "mine").mkdir(parents=True)
    write_runs_csv(tmp_path / "results" / "mine", runs)
    monkeypatch.chdir(tmp_path)
    folders = [f"results/mine/{runs[n]['run_id']}" for n in (1, 2, 0)]
    fastest = f"choose {folders[0]}, {folders[1]} or {folders[2]}"
    for word in ("status", "report", "reproduce", "sync"):
        assert answer(word, capsys) == f"harness {word} takes results/NAME: choose results/mine"
    assert answer("explain", capsys) == f"harness explain takes results/NAME/RUN: {fastest}"
    assert answer("export", capsys).endswith(fastest)
    assert answer("explain results/mine", capsys) == f"results/mine is not the folder of a run: {fastest}"


@pytest.mark.parametrize("typed", ["help plan", "plan help"])
def test_help_may_stand_on_either_side_of_its_word(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(typed.split())
    assert capsys.readouterr().out.startswith("usage: harness plan")


def is_setting(key: str, value: str) -> bool:
    """Return whether a setting is one that the harness has; what the user fills in is not checked."""
    if key in (*group_names(), "hydra/launcher") and "{" not in value:
        return value in choices_of(key)
    return key in (*known_keys(), *group_names())


def test_every_alias_leads_to_a_setting_that_exists() -> None:
    targets = [target if "=" in target else f"{target}={{}}" for target in mistakes.KEYS.values()]
    targets += [
        choice if "=" in choice.partition(" ")[0] else f"{group}={choice}"
        for group, names in mistakes.VALUES.items()
        for choices in names.values()
        for choice in choices
    ]
    targets += [text for sentences in (mistakes.NO_KEYS, *mistakes.NO_VALUES.values()) for text in sentences.values()]
    targets += [target for targets in mistakes.KEY_VALUES.values() for target in targets.values() if "=" in target]
    targets += mistakes.WORDS.values()
    settings = [pair for target in targets for pair in re.findall(r"\b([a-z_./]+)=([\w.{}-]+)", target)]
    assert [pair for pair in settings if not is_setting(*pair)] == [] and set(mistakes.KEY_VALUES) <= set(known_keys())


def test_no_alias_hides_what_exists() -> None:
    names = {*known_keys(), *group_names()} - {"sweep"}  # which is a group of keys, and no setting by itself
    assert not names & {*mistakes.KEYS, *mistakes.NO_KEYS}
    assert not set(mistakes.KEYS) & set(mistakes.NO_KEYS)
    for group, spellings in (*mistakes.VALUES.items(), *mistakes.NO_VALUES.items()):
        assert not set(spellings) & set(choices_of(group)), group


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("meta-llama/Llama-2-7b-hf", ["7b"]),
        ("meta-llama/Llama-3.2-1B", ["1b"]),
        ("llama-3.1-70b-instruct", ["70b"]),
        ("llama3_405b", ["405b"]),
        ("mistralai/Mistral-7B-v0.1", ["mistral_7b"]),
        ("gpt3-175b", ["gpt_175b"]),
        ("mpt-30b-chat", ["mpt_30b"]),
        ("llama-65b", ["70b"]),
        ("Qwen2.5-7B", ["model=Qwen/Qwen2.5-7B"]),
        ("gemma-2b", ["model=google/gemma-2b"]),
        ("gemma-2-2b-it", ["model=google/gemma-2-2b"]),
        ("phi3", ["model=microsoft/Phi-3-mini-4k-instruct"]),
        ("mixtral-8x22b", ["model=mistralai/Mixtral-8x22B-v0.1"]),
        ("pythia", []),
        ("bert-base", []),
    ],
)
def test_a_model_is_known_by_its_names_elsewhere(name: str, models: list[str]) -> None:
    assert similar_models(name, choices_of("model")) == models


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_script_has_the_names_that_it_uses(world_size: int, tmp_path: Path) -> None:
    settings = ("precision=bf16_mixed", "checkpointing=full", "train.global_batch=16", "train.micro_batch=1")
    for strategy in files_in("strategy"):
        with suppress(UserError):  # not a layout of so many ranks
            config, layout = compose_layout(world_size, f"strategy={strategy}", f"world_size={world_size}", *settings)
            spec = RunSpec("", config, layout, Corpus(None, ""), "cpu", threads=1)
            run = RecordedRun(Path("/results/run"), Path("/other"), spec)
            for name in (name for name in FILES if name.endswith(".py") and not refusals(run, FILES[name])):
                (tmp_path / f"{strategy}_{name}").write_text(file_text(run, name))
    assert len(list(tmp_path.iterdir())) > 20
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout
