"""When the kernels of a pipeline run under NCCL's stream rules.

The rules are those of torch's ProcessGroupNCCL (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, pointToPoint and
startCoalescing) up to version 2.13:

- Kernels of one stream run in the order of their launch. A transfer's stream first waits for what the current stream
  was given before the launch (syncStream); the current stream waits for a transfer at Work.wait().
- A batch (batch_isend_irecv) is one kernel. "For batch P2P, we need to treat it like a collective when selecting
  communicator": it runs on the stream of the group's communicator.
- A single send or receive depends on how the group was initialized. Without a device_id, "In lazy initialization mode,
  this will result in a new 2-rank NCCL communicator to be created", whose key has both ranks and no direction: there
  is a stream for each pair of ranks. With a device_id, "In eager initialization mode, unbatched P2P ops are treated as
  independent collective ops, and are thus serialized with all other ops on this ProcessGroup": all use one stream.
- The n-th send from a rank to another over a communicator meets the n-th receive there. Both kernels run until the
  transfer is over, which takes its time from when the later of the two runs.

Left out are the time in which the host launches kernels, the sharing of links and of multiprocessors between kernels,
and that small messages are sent into buffers without a receiver.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.cost_model.pipeline import PassKind
from harness.simulator.pipeline_program import (
    Meeting,
    Program,
    Segment,
    StagePass,
    Transfer,
    TransferLaunch,
    TransferWait,
)

InitMode = Literal["lazy", "eager"]  # a process group without device_id, and with it

MAIN_STREAM = "main"


class DeadlockError(RuntimeError):
    """The error that kernels wait for each other for ever."""


@dataclass
class Kernel:
    """A kernel, or a wait, on a stream of a rank; `ready` and `end` are times, None while they are unknown."""

    rank: int
    stream: str
    seconds: float = 0.0
    after: list["Kernel"] = field(default_factory=list)  # on other streams of the rank
    transfers: tuple[Transfer, ...] = ()
    is_meeting: bool = False
    peers: list["Kernel"] = field(default_factory=list)  # the other side of each transfer, or those of a meeting
    ready: float | None = None
    end: float | None = None


def step_seconds(
    programs: Sequence[Program],
    pass_seconds: Mapping[PassKind, float],
    transfer_seconds: float,
    mode: InitMode,
) -> float:
    """Return the time from the first kernel of a step to the end of the last, on the slowest rank.

    Raise DeadlockError if kernels wait for each other, or if a transfer has no other side.
    """
    kernels = timed_kernels(programs, mode, pass_seconds, transfer_seconds)
    return max(kernel.end or 0.0 for of_rank in kernels for kernel in of_rank)


def timed_kernels(
    programs: Sequence[Program],
    mode: InitMode,
    pass_seconds: Mapping[PassKind, float] | None = None,
    transfer_seconds: float = 0.0,
) -> list[list[Kernel]]:
    """Return the kernels of every rank with their times, one for each entry of its program.

    Raise DeadlockError if kernels wait for each other, or if a transfer has no other side.
    """
    kernels = [
        _kernels(rank, program, pass_seconds or {}, transfer_seconds, mode) for rank, program in enumerate(programs)
    ]
    everywhere = [kernel for of_rank in kernels for kernel in of_rank]
    _connect_transfers(everywhere)
    meetings = [[kernel for kernel in of_rank if kernel.is_meeting] for of_rank in kernels]
    for met in zip(*meetings, strict=True):
        for kernel in met:
            kernel.peers = [other for other in met if other is not kernel]
    _run(everywhere)
    return kernels


def stream_of(rank: int, launch: TransferLaunch, mode: InitMode) -> str:
    """Return the stream of a rank on which transfers run; ranks that share a communicator name it alike."""
    if launch.is_batch or mode == "eager":
        return "group"
    (transfer,) = launch.transfers
    low, high = sorted((rank, transfer.peer))
    return f"pair {low}:{high}"


def _kernels(
    rank: int, program: Program, pass_seconds: Mapping[PassKind, float], transfer_seconds: float, mode: InitMode
) -> list[Kernel]:
    """Return a rank's kernels in the order of their launch."""
    kernels: list[Kernel] = []
    last_on_main: list[Kernel] = []  # empty or one kernel
    for entry in program:
        if isinstance(entry, TransferLaunch):
            stream = stream_of(rank, entry, mode)
            seconds = transfer_seconds if entry.seconds is None else entry.seconds
            kernels.append(Kernel(rank, stream, seconds, list(last_on_main), entry.transfers))
            continue
        kernel = Kernel(rank, MAIN_STREAM)
        if isinstance(entry, StagePass):
            kernel.seconds = pass_seconds[entry.kind]
        elif isinstance(entry, Segment | Meeting):
            kernel.seconds, kernel.is_meeting = entry.seconds, isinstance(entry, Meeting)
        elif isinstance(entry, TransferWait):
            kernel.after = [kernels[entry.launch]]
        kernels.append(kernel)
        last_on_main = [kernel]
    return kernels


def _connect_transfers(kernels: Sequence[Kernel]) -> None:
    """Give every transfer's kernel its peers. Raise DeadlockError if a send has no receive or the reverse."""
    sends: defaultdict[tuple[str, int, int], list[Kernel]] = defaultdict(list)
    receives: defaultdict[tuple[str, int, int], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        for transfer in kernel.transfers:
            if transfer.direction == "send":
                sends[kernel.stream, kernel.rank, transfer.peer].append(kernel)
            else:
                receives[kernel.stream, transfer.peer, kernel.rank].append(kernel)
    for key in sorted(sends.keys() | receives.keys()):
        if len(sends[key]) != len(receives[key]):
            stream, source, target = key
            raise DeadlockError(
                f"rank {source} sends {len(sends[key])} times to rank {target} on the stream {stream}, which receives"
                f" {len(receives[key])} times"
            )
        for send, receive in zip(sends[key], receives[key], strict=True):
            send.peers.append(receive)
            receive.peers.append(send)


def _run(kernels: Sequence[Kernel]) -> None:
    """Set the times of all kernels. Raise DeadlockError if some can never run."""
    streams: defaultdict[tuple[int, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        streams[kernel.rank, kernel.stream].append(kernel)
    queues = [Queue(stream) for stream in streams.values()]
    while any(queue.waiting for queue in queues):
        if not sum(queue.advance() for queue in queues):
            stuck = sorted(f"rank {head.rank} ({head.stream})" for queue in queues for head in queue.waiting[-1:])
            raise DeadlockError(f"the schedule waits for itself on {', '.join(stuck)}")


class Queue:
    """The kernels of a stream that have not ended, last first, and the time at which the last one ended."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.waiting = list(reversed(kernels))
        self.clock = 0.0

    def advance(self) -> bool:
        """Run what can run now, and return whether any kernel became ready or ended."""
        has_advanced = False
        while self.waiting:
            kernel = self.waiting[-1]
            if kernel.ready is None:
                ends = [other.end for other in kernel.after]
                if None in ends:
                    break
                kernel.ready = max([self.clock, *(end for end in ends if end is not None)])
                has_advanced = True
            starts = [kernel.ready, *(peer.ready for peer in kernel.peers)]
            if None in starts:
                break
            kernel.end = self.clock = max(start for start in starts if start is not None) + kernel.seconds
            self.waiting.pop()
            has_advanced = True
        return has_advanced
