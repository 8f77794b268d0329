"""The command as a user meets it: a mistake is one line of output, and everything else is a row."""

import itertools
import json
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.cuda._memory_viz import trace_plot

from harness.cli.main import main
from harness.records.run_folder import RunFolder
from tests.support.commands import ROOT, SMALL, Harness, read_rows
from tests.support.processes import run_python


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("strategy=nope", "strategy=nope is not known: choose 3d, cp, cp_ulysses, ddp, ddp_pp, dp,"),
        ("train.stepz=3", "train.stepz is not a key"),
        ("+strategy.foo=1", "strategy.foo is not a key: choose one of name, engine,"),
        ("strategy.engine=foo", "strategy.engine=foo is not known: choose accelerate,"),
        ("train.steps=0", "train.steps=0 is not a positive whole number: choose 1 or more"),
        ("train.lr=-1", "train.lr=-1.0 is not a finite number of 0 or more"),
        ("train.micro_batch=-1", "train.micro_batch=-1 is not a positive whole number"),
        ("world_size=0", "world_size=0 is not a positive number"),
        ("world_size=3", "train.global_batch=8 is not a multiple of train.micro_batch=1 x 3 data-parallel ranks"),
        ("world_size=4 strategy.dp_shard=3", "world_size=4 is not divisible by the strategy's degrees (dp_shard 3)"),
        ("world_size=4 strategy.dp_replicate=3", "world_size=4 is not the product of the strategy's degrees"),
        ("train.global_batch=7", "train.global_batch=7 is not a multiple"),
        ("model.hidden_size=97", "model.hidden_size=97 does not give model.num_attention_heads=4 heads of even size"),
        ("model.num_key_value_heads=3", "model.num_key_value_heads=3 does not divide model.num_attention_heads=4"),
        ("name=../x", "name=../x cannot name a folder of results"),
        ("data.path=/nope", "data.path=/nope does not exist: name a text file"),
        ("results_dir=/proc/x", "results_dir: /proc/x/runs cannot be written"),
        ("strategy=zero1 strategy.dp_replicate=2 world_size=4", "strategy.dp_replicate=2 is not supported by"),
        ("strategy=fsdp_full_shard strategy.zero_stage=1", "strategy.zero_stage=1 is not a mode of fully_shard"),
        ("strategy=tp world_size=4", "strategy.tp=4 does not divide model.num_key_value_heads=2: choose 1 or 2"),
        ("strategy=tp model.intermediate_size=255", "strategy.tp=2 does not divide model.intermediate_size=255"),
        (
            "strategy=tp_sp train.seq_len=33",
            "strategy.tp=2 with strategy.sequence_parallel does not divide train.seq_len=33: choose a multiple of 2",
        ),
        ("strategy=tp_sp world_size=1", "strategy.sequence_parallel=true needs strategy.tp of 2 or more"),
        ("strategy=pp_1f1b world_size=8", "strategy.pp=8 makes 8 stages of model.num_hidden_layers=4"),
        ("strategy=pp_interleaved world_size=4", "strategy.pp=4 x strategy.virtual_stages=2 makes 8 stages"),
        (
            "strategy=pp_gpipe train.micro_batch=8",
            "has too few micro-batches of train.micro_batch=8 for strategy.pp=2 stages",
        ),
        (
            "strategy=pp_interleaved train.global_batch=5",
            "strategy.schedule=interleaved_1f1b takes micro-batches in rounds of 2, not 5 in all",
        ),
        ("strategy=pp_interleaved strategy.virtual_stages=1", "needs more than strategy.virtual_stages=1"),
        ("strategy=pp_1f1b strategy.virtual_stages=2", "strategy.schedule=1f1b has no strategy.virtual_stages=2"),
        ("strategy=pp_1f1b strategy.layers_per_stage=[1,2]", "with the sum 4 (model.num_hidden_layers)"),
        ("strategy=pp_1f1b strategy.layers_per_stage=[4,x]", "strategy.layers_per_stage=x is not a whole number"),
        ("strategy=ddp strategy.layers_per_stage=[2,2]", "strategy.layers_per_stage=[2, 2] needs strategy.pp"),
        ("strategy=cp strategy.data_parallel=none", "strategy.cp=2 needs strategy.data_parallel"),
        (
            "strategy=ddp_pp strategy.schedule=zero_bubble world_size=4",
            "strategy.data_parallel=ddp reduces gradients",
        ),
        ("strategy=pp_1f1b strategy.layers_per_stage=2", "strategy.layers_per_stage=2 is not a list: give it a list"),
        ("strategy=zero3 strategy.tp=2 world_size=4", "strategy.vocabulary_parallel=true is not supported"),
        ("strategy=ddp strategy.engine=accelerate strategy.tp=2 world_size=4", "strategy.tp=2 is not supported by"),
        ("cluster.device=cuda", "cluster.device=cuda needs a CUDA device"),
        (
            "precision=fp8",
            "precision=fp8 is not known: did you mean precision=fp8_mixed?",
        ),
        ("tracking.mode=loud", "tracking.mode=loud is not known"),
    ],
)
def test_a_mistake_prints_one_line_and_leaves_no_file(
    overrides: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([f"results_dir={tmp_path}/results", *overrides.split()]) == 2
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert message in printed.err


@pytest.mark.parametrize("mistake", ["sweep=quickstart", "train.steps=x", "world_size=3"])
def test_a_mistake_takes_at_most_two_seconds_of_processor_time(mistake: str, tmp_path: Path) -> None:
    """One is found in the arguments, one in what Hydra composed, and one by the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_python(tmp_path, "-m", "harness", mistake, f"results_dir={tmp_path}/results")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_an_impossible_combination_of_a_sweep_is_a_refused_row(harness: Harness, tmp_path: Path) -> None:
    sweep = ("strategy=ddp,dp", "train.micro_batch=1,3", "train.steps=1,0", "train.seq_len=32", "train.warmup_steps=1")
    done = harness("-m", "name=mixed", "proof.reference=false", *sweep)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "results", "mixed")
    assert sorted(rows.status) == ["ok"] + ["refused"] * 7
    assert rows[rows.status == "refused"].reason.str.len().min() > 20
    assert "refused" in done.stdout and max(map(len, done.stdout.splitlines())) <= 120


def test_a_model_that_cannot_fit_is_refused_with_the_arithmetic(harness: Harness, tmp_path: Path) -> None:
    started = time.monotonic()
    done = harness("strategy=zero3", "model=70b", "name=big")
    assert time.monotonic() - started < 60
    (row,) = read_rows(tmp_path / "results", "big").itertuples()
    assert (done.returncode, row.status) == (1, "refused")
    # ZeRO-3 in fp32 under DeepSpeed: 4 + 4 + 12 bytes a parameter over two ranks.
    sizes = [f"{part} {row.parameters * width / 2**30:.1f}" for part, width in (("parameters", 2), ("optimizer", 6))]
    words = [*sizes, "x 2 ranks on one host", "are available: choose preflight=false"]
    assert [part for part in words if part not in row.reason] == []
    assert row.reason.rpartition(", or ")[2].startswith("model=")  # a smaller model comes last
    assert (done.stdout + done.stderr).count("are available: choose") == 1
    assert not (tmp_path / "results" / "big" / row.run_id / "ranks").exists()  # no process was started


def test_a_recorded_run_is_not_run_again(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is made again only with force=true or by other code; a key that affects the result makes another run."""
    results, small = tmp_path / "results", (*SMALL, "model.num_hidden_layers=2", "train.global_batch=4")
    assert harness("name=again", *small).returncode == 0
    (run_dir,) = [path.parent for path in (results / "again").glob("*/record.json")]
    record = run_dir / "record.json"
    recorded_at = record.stat().st_mtime_ns
    beat = RunFolder(run_dir).read_heartbeat(0)
    assert beat is not None and beat.beats > 12  # most of them in phases of the profiled step

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("NCCL_AUTH_TOKEN", "a secret")
    again = harness("name=again", *small).stderr
    assert "is recorded, with another PYTORCH_ALLOC_CONF in its environment; force=true runs it again" in again
    assert record.stat().st_mtime_ns == recorded_at
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert "is recorded; force=true runs it again" in harness("name=again", *small).stderr

    changed = json.loads(record.read_text())
    changed["versions"]["torch"] = "2.0.0"
    record.write_text(json.dumps(changed))
    assert "stale: torch 2.0.0" in harness("name=again", *small).stderr
    assert json.loads(record.read_text())["versions"]["torch"] != "2.0.0"

    assert "allowed 10 noise floors and not 9" in harness("name=again", "proof.floor_multiple=9", *small).stderr

    recorded_at = record.stat().st_mtime_ns
    harness("name=again", "force=true", "proof.reference=false", *small)
    assert record.stat().st_mtime_ns > recorded_at
    harness("name=again", "train.seed=1", "proof.reference=false", *small)
    assert len(read_rows(results, "again")) == 2


def test_a_memory_snapshot_is_recorded_on_request(harness: Harness, tmp_path: Path) -> None:
    """The snapshot of every rank has torch's own form and, played back, reaches the peak that the allocator counted."""
    assert harness("name=snapshot", "proof.reference=false", *SMALL).returncode == 0
    again = harness("name=snapshot", "proof.reference=false", "measure.memory_snapshot=true", *SMALL)
    assert "it has no memory snapshot" in again.stderr
    (run_dir,) = [path.parent for path in (tmp_path / "results" / "snapshot").glob("*/record.json")]
    for rank in range(2):
        snapshot = pickle.loads(RunFolder(run_dir).memory_snapshot(rank).read_bytes())
        signs = {"alloc": 1, "free_completed": -1}
        deltas = [(entry["size"] * signs.get(entry["action"], 0)) for entry in snapshot["device_traces"][0]]
        profiled = json.loads(RunFolder(run_dir).rank_report(rank).read_text())["profiled"]
        assert max(itertools.accumulate(deltas)) == profiled["peak_allocated_bytes"]
        assert any(frame["name"] == "backward" for entry in snapshot["device_traces"][0] for frame in entry["frames"])
        assert "<script" in trace_plot(snapshot)


@pytest.mark.long  # two commands at one sweep are killed in tests/system/test_random_kills.py
def test_two_commands_share_a_folder(tmp_path: Path) -> None:
    """Each run is made once, by either command."""
    command = [sys.executable, "-m", "harness", f"results_dir={tmp_path}", "name=both", "tracking=none", *SMALL]
    both = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    messages = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    assert sum("reference single" in text for text in messages) == 1
    assert sum("is recorded" in text for text in messages) == 1


def test_the_quick_comparison_is_proven_and_read_back(tmp_path: Path) -> None:
    """The README's comparison, once and with fewer steps, is all proven, and is readable from its files alone.

    It takes half a minute on two cores; the bound allows for a busy machine.
    """
    started = time.monotonic()
    few_steps = ("train.steps=1", "train.warmup_steps=1", "repeats=1")
    done = run_python(ROOT, "-m", "harness", "sweeps=quickstart", f"results_dir={tmp_path}", *few_steps)
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - started < 240
    rows = read_rows(tmp_path, "quickstart")
    data = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp_full_shard", "fsdp_shard_grad_op"]
    assert (list(rows.strategy), set(rows.status)) == ([*data, "tp", "pp_1f1b"], {"ok"})
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert f"{tmp_path}/quickstart/report.md" in done.stdout
    # The report is made again by its own command, and W&B's own reader reads what tracking stored.
    written = tmp_path / "quickstart" / "report.md"
    before = written.read_text()
    written.unlink()
    assert run_python(ROOT, "-m", "harness", "report", str(tmp_path / "quickstart")).returncode == 0
    assert written.read_text() == before
    (wandb_file,) = (tmp_path / "quickstart" / rows.run_id[1]).glob("wandb/offline-run-*/run-*.wandb")
    reader = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--summary", "--json", str(wandb_file)]
    read = subprocess.run(reader, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert str(rows.peak_allocated_bytes[1]) in read.stdout
