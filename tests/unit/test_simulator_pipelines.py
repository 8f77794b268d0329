"""torch's pipeline schedules under NCCL's stream rules: no deadlock, and the bubble that the formula says."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.cost_model.pipeline import PassKind, bubble_ratio
from harness.data.corpus import Corpus
from harness.layout.layout import Layout, resolve_layout
from harness.records.run_folder import RunSpec
from harness.simulator.nccl_timeline import DeadlockError, InitMode, step_seconds
from harness.simulator.pipeline_program import (
    Program,
    StagePass,
    Transfer,
    TransferLaunch,
    TransferWait,
    record_programs,
)
from harness.worker.process_group import process_group
from tests.support.commands import compose_config

STRATEGIES = ("pp_gpipe", "pp_1f1b", "pp_interleaved", "pp_zero_bubble")

DEGREES = (2, 4, 8)

# Seconds of a forward through all of a rank's stages are 1. A 7b model on 8 H100 sends 34 MB between stages, which
# takes 0.08 ms at 450 GB/s, and a forward of 7 TFLOP takes 14 ms at half of the peak.
TRANSFER_SECONDS = 0.01

Programs = dict[tuple[str, int], list[Program]]  # of every rank, by strategy and degree

MARGIN = 0.02  # of the bubble above its formula, which counts no transfers


def laid_out(strategy: str, pp: int) -> Layout:
    return resolve_layout(compose_config(f"strategy={strategy}").strategy, pp)


@pytest.fixture(scope="module")
def programs() -> Programs:
    """Return the programs of every pipeline, with four micro-batches for each rank."""
    pipelines = [(strategy, pp) for strategy in STRATEGIES for pp in DEGREES]
    return {key: record_programs(laid_out(*key), 4 * key[1]) for key in pipelines}


def bubble(programs: list[Program], layout: Layout, transfer_seconds: float, mode: InitMode) -> float:
    """Return the idle time of a step in units of the working time, which is 3 for every micro-batch."""
    share = 1 / layout.virtual_stages
    seconds: dict[PassKind, float] = {"forward": share, "backward": 2 * share, "inputs": share, "weights": share}
    working = 3 * 4 * layout.pp
    return (step_seconds(programs, seconds, transfer_seconds, mode) - working) / working


@pytest.fixture
def worker_mode(monkeypatch: pytest.MonkeyPatch) -> InitMode:
    """Return how the process group of a run on GPUs is initialized: eagerly if the worker binds a device to it."""
    arguments: dict[str, Any] = {}
    init_process_group = dist.init_process_group

    def init_fake(backend: str, **keywords: Any) -> None:
        arguments.update(keywords, backend=backend)
        init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(dist, "init_process_group", init_fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # the worker sets them for its process
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    config, corpus = compose_config("strategy=pp_1f1b"), Corpus(None, "synthetic")
    layout = resolve_layout(config.strategy, 2)
    with process_group(RunSpec("", config, layout, corpus, "cuda", threads=torch.get_num_threads())):
        pass
    assert arguments["backend"] == "nccl"
    return "lazy" if arguments.get("device_id") is None else "eager"


@pytest.mark.parametrize("pp", DEGREES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bubble_is_the_formulas(strategy: str, pp: int, programs: Programs, worker_mode: InitMode) -> None:
    """Without the time of transfers it is exactly the formula's, and with it no more than the margin above."""
    layout, recorded = laid_out(strategy, pp), programs[strategy, pp]
    formula = bubble_ratio(layout, 4 * pp)
    assert bubble(recorded, layout, 0.0, worker_mode) == pytest.approx(formula)
    assert formula <= bubble(recorded, layout, TRANSFER_SECONDS, worker_mode) <= formula + MARGIN


@pytest.mark.parametrize("pp", [4, 8])
def test_a_bound_device_would_make_interleaving_wait(pp: int, programs: Programs) -> None:
    """With device_id all single sends and receives of a group share a stream, and interleaving is worse than 1F1B."""
    interleaved, plain = (laid_out(strategy, pp) for strategy in ("pp_interleaved", "pp_1f1b"))
    eager = bubble(programs["pp_interleaved", pp], interleaved, TRANSFER_SECONDS, "eager")
    assert eager > bubble(programs["pp_1f1b", pp], plain, TRANSFER_SECONDS, "eager")
    assert eager > bubble_ratio(interleaved, 4 * pp) + 4 * MARGIN


def send(peer: int, is_batch: bool = False) -> TransferLaunch:
    return TransferLaunch((Transfer("send", peer),), is_batch)


def receive(peer: int, is_batch: bool = False) -> TransferLaunch:
    return TransferLaunch((Transfer("receive", peer),), is_batch)


ONE_SECOND: dict[PassKind, float] = {"forward": 1.0}


def test_transfers_take_their_time_from_the_later_side() -> None:
    sender: Program = [StagePass("forward", 0), send(1)]
    receiver: Program = [receive(0), TransferWait(0), StagePass("forward", 1)]
    assert step_seconds([sender, receiver], ONE_SECOND, 0.5, "lazy") == 2.5


def test_a_receive_that_nobody_waits_for_yet_delays_nothing_but_its_own_stream() -> None:
    """Rank 1 has work before the message comes: its stream computes while the transfer's waits."""
    sender: Program = [StagePass("forward", 0), send(1)]
    receiver: Program = [receive(0), StagePass("forward", 1), TransferWait(0), StagePass("forward", 1)]
    assert step_seconds([sender, receiver], ONE_SECOND, 0.0, "lazy") == 2.0


def test_a_stream_of_the_group_keeps_a_send_behind_a_receive() -> None:
    """Rank 1 first launches a receive from rank 0, which sends late, then a send to rank 2, which waits for it."""
    late: Program = [StagePass("forward", 0), StagePass("forward", 0), send(1)]
    middle: Program = [receive(0), send(2)]
    last: Program = [receive(1), TransferWait(0), StagePass("forward", 2)]
    programs = [late, middle, last]
    assert step_seconds(programs, ONE_SECOND, 0.0, "lazy") == 2.0
    assert step_seconds(programs, ONE_SECOND, 0.0, "eager") == 3.0


def test_sends_that_wait_for_each_other_are_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match=r"waits for itself on rank 0 \(pair 0:1\), rank 1 \(pair 0:1\)"):
        step_seconds([[send(1), receive(1)], [send(0), receive(0)]], {}, 0.0, "lazy")
    both = TransferLaunch((Transfer("send", 1), Transfer("receive", 1)), is_batch=True)
    other = TransferLaunch((Transfer("send", 0), Transfer("receive", 0)), is_batch=True)
    assert step_seconds([[both], [other]], {}, 0.5, "lazy") == 0.5  # a batch is one kernel


def test_a_single_send_never_meets_a_receive_in_a_batch() -> None:
    """Without a bound device they run over communicators of their own."""
    programs: list[Program] = [[send(1)], [receive(0, is_batch=True)]]
    with pytest.raises(DeadlockError, match="sends 0 times to rank 1 on the stream group"):
        step_seconds(programs, {}, 0.0, "lazy")
    assert step_seconds(programs, {}, 0.0, "eager") == 0.0
