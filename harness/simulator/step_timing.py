"""The time of a rank's simulated step on the hardware of its cluster."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from harness.engines.base import Engine
from harness.hardware.described_cluster import described_cluster
from harness.measure.gradient_fingerprint import Fingerprinter
from harness.measure.memory import DeviceMemory
from harness.measure.step_profiler import StepListener
from harness.probe import Probe
from harness.records.rank_report import SimulatedTime
from harness.simulator.fake_memory import StorageCounter
from harness.simulator.kernel_work import work_seconds
from harness.simulator.operator_stream import Launch, StreamRecorder
from harness.simulator.process import StepRequest
from harness.simulator.stream_schedule import Player, kind_of
from harness.util.errors import UserError


class TimedStepListener(StepListener):
    """A listener to one step that tells the recorder of launches in which phase of the step they are."""

    recorder_of_launches: StreamRecorder

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Observe a phase of the step."""
        launches = self.recorder_of_launches
        outer, launches.phase = launches.phase, name
        try:
            with super().phase(name):
                yield
        finally:
            launches.phase = outer


@contextmanager
def profile_timed_step(
    request: StepRequest,
    engine: Engine,
    probe: Probe,
    memory: DeviceMemory,
    fingerprinter: Fingerprinter,
    counter: StorageCounter,
) -> Iterator[tuple[StepListener, StreamRecorder]]:
    """Profile the one step inside the block, and record what it launches; both are complete afterwards."""
    listener = TimedStepListener(engine, memory, fingerprinter, request.layout)
    launches = StreamRecorder(request.layout, request.rank, request.device)
    listener.recorder_of_launches = launches

    def on_operator(func: object, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
        if not listener.recorder.is_paused:
            launches.on_operator(func, args, kwargs, result)

    with probe.listen(listener), listener, launches.attach(), mock.patch.object(counter, "on_operator", on_operator):
        yield listener, launches


@dataclass(frozen=True)
class TimedStep:
    """The launches of a rank's step, when each runs, and the summary that the rank reports."""

    rank: int
    launches: Sequence[Launch]
    starts: Sequence[float]
    ends: Sequence[float]
    summary: SimulatedTime


def time_step(request: StepRequest, launches: Sequence[Launch]) -> TimedStep | None:
    """Return when a step's launches run on the request's cluster; None where its hardware or peak is not known."""
    hardware = request.config.cluster.hardware
    if hardware is None or request.device == "cpu":
        return None
    gpus_per_node = described_cluster(request.config.cluster).gpus_per_node
    try:
        seconds = [
            0.0 if launch.work is None else work_seconds(launch.work, hardware, gpus_per_node) for launch in launches
        ]
    except UserError:
        return None
    player, operator_seconds = Player(launches, seconds, hardware.fitted), Counter[str]()
    for launch, own in zip(launches, seconds, strict=True):
        if launch.work is not None:
            operator_seconds[launch.operator] += own  # type: ignore[assignment]
    summary = dataclasses.replace(
        player.play(),
        operator_seconds=dict(operator_seconds.most_common()),  # each as if it ran alone
        communication_operators=sorted({each.operator for each in launches if kind_of(each.work) == "communication"}),
        launches=len(launches),
    )
    return TimedStep(request.rank, launches, player.starts, player.ends, summary)
