"""The recorder of a profiled step's allocations and of the tensors that they belong to."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.engines.base import Engine
from harness.layout.state_widths import StateKind
from harness.measure import memory_snapshot
from harness.measure.allocation_log import AllocationLog, OpSpan, StepAnnotations
from harness.measure.memory import DeviceMemory
from harness.measure.memory_attribution import attribute_peak, peak_without_backend
from harness.probe import ShardSource
from harness.records.rank_report import AtPeak, StateShard
from harness.tensors.shard import BUCKET, GATHERED, STAGING, Shard
from harness.tensors.storage import PLAIN_TYPES, element_bytes, storage_addresses, storage_bytes, stored_dtype


class OwnershipRecorder:
    """A recorder of the allocations of one step between start() and end(), and of claims of their roles.

    Where allocations cannot be logged (a CPU without the counting allocator), claims are ignored.
    """

    def __init__(self, engine: Engine, memory: DeviceMemory) -> None:
        self.engine = engine
        self.memory = memory
        self.annotations = StepAnnotations()
        self.modules = tuple(engine.model.modules())
        self.gradient_buckets: set[int] = set()  # addresses of buckets that hold gradients
        self.peak_allocated_bytes: int | None = None
        self.log: AllocationLog | None = None
        self.is_paused = False
        self.last_position = -1  # after the operator before

    def start(self) -> None:
        """Start logging, and claim the state that exists between steps."""
        self.memory.reset_peak()
        self.logger = self.memory.begin_log()
        with self.pause():
            self._claim_state()

    def end(self) -> None:
        """Stop logging."""
        self._update_peak()
        self.log = self.logger.end()

    def position(self) -> int:
        """Return the moment of the log's next line."""
        return self.logger.position()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude allocations inside the block from the step's, because the measurement itself makes them."""
        self._update_peak()
        self.is_paused, started = True, self.logger.pause(True)
        with torch.no_grad():
            yield
        self.is_paused, ended = False, self.logger.pause(False)
        self.memory.reset_peak()
        if ended > started:
            self.annotations.pauses.append(OpSpan(started, ended, "measuring"))

    def _update_peak(self) -> None:
        peak = self.memory.peak_allocated_bytes()
        if peak is not None:
            self.peak_allocated_bytes = max(peak, self.peak_allocated_bytes or 0)

    def add_operator(self, name: str, started: int, is_view: bool) -> bool:
        """Record an operator that ran since the moment `started`, if it allocated or freed blocks.

        Return whether memory may have a new peak. A view allocates nothing; of other operators, a moment on CUDA is a
        time, by which it cannot be excluded. A peak between operators, as of a resized storage, waits for the next one.
        """
        position = self.position()
        if position > started:
            self.annotations.operators.append(OpSpan(started, position, name))
        is_unchanged = position == self.last_position and self.memory.counts_requests
        if not is_view:
            self.last_position = position
        return not is_view and not is_unchanged

    def add_phase(self, name: str, started: int) -> None:
        """Record a phase of the step that ends now."""
        self.annotations.phases.append(OpSpan(started, self.position(), name))

    def claim(self, tensors: Iterable[Tensor], role: str, detail: str) -> None:
        """Claim a role for the storages of tensors on this device from now on."""
        addresses = storage_addresses(tensors, self.memory.device.type)  # offloaded tensors are not in this memory
        self.annotations.claim(self.position(), addresses, role, detail)

    def claim_activation(self, address: int, is_saved: bool) -> None:
        """Record that a storage is saved for backward from now on, or no longer."""
        if not self.is_paused:
            self.annotations.claim(self.position(), [address], "activation", "saved for backward", is_saved)

    def _claim_state(self) -> None:
        optimizer = (shard.local for shard in self.engine.local_shards("optimizer"))
        self.claim(optimizer, "optimizer", "masters and moments")
        at_rest = (shard.local for shard in self.engine.local_shards("parameters") if shard.state_name != GATHERED)
        self.claim(at_rest, "parameter", "at rest")
        self.claim_gradients()

    def claim_gradients(self) -> int:
        """Claim gradients, and the modules' present parameters: those that were not claimed at rest are gathered.

        Return the bytes of the gradients.
        """
        shards = list(self.engine.local_shards("gradients"))
        self.claim((shard.local for shard in shards), "gradient", "gradients")
        in_buckets = [shard.local for shard in shards if shard.state_name == BUCKET]
        buckets = set(storage_addresses(in_buckets, self.memory.device.type))
        copied = self.gradient_buckets - buckets  # DDP has copied these gradients out of its buckets
        self.annotations.claim(self.position(), copied, "gradient", "gradients", is_owned=False)
        self.gradient_buckets = buckets
        dictionaries = [module._parameters for module in self.modules]  # engines replace these, and what is in them
        parameters = [parameter for each in dictionaries for parameter in each.values() if parameter is not None]
        self.claim(parameters, "gathered", "gathered parameters")
        for role, detail, tensor in self.engine.named_buffers():
            self.claim([tensor], role, detail)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.claim(filter(_has_own_storage, gradients), "communication", "gradients not yet reduced")
        return shard_bytes(shards)

    def at_peak(self, timed_log: AllocationLog | None) -> AtPeak | None:
        """Return what filled memory at the peak of the timed steps, or else of this step.

        The peak is that of `timed_log` unless it is None or its step requested other blocks. Raise RuntimeError if the
        peak of this step's log is not the allocator's.
        """
        if self.log is None or not self.logger.is_complete:
            return None
        own = attribute_peak(self.log, self.annotations, self.log)
        if own is not None and self.logger.peak_bytes not in (None, own.bytes):
            raise RuntimeError(f"blocks of {own.bytes} bytes are logged at the peak of {self.logger.peak_bytes}")
        timed = attribute_peak(timed_log, self.annotations, self.log) if timed_log is not None else None
        return timed or own

    def peak_without_backend_bytes(self, timed_log: AllocationLog | None) -> int | None:
        """Return the peak of the timed steps, or else of this one, without the communication backend's own copies.

        Return None on CUDA, where NCCL makes none, where allocations are not logged, and where the steps are not alike.
        """
        if self.log is None or not self.memory.counts_requests:
            return None
        return peak_without_backend(timed_log or self.log, self.annotations, self.log)

    def write_snapshot(self, path: Path) -> None:
        """Write the step's memory history for torch's viewer."""
        if self.log is not None:
            memory_snapshot.write_snapshot(path, self.logger.snapshot(self.annotations))


def _has_own_storage(gradient: Tensor) -> bool:
    """Return whether a gradient is no view into a larger storage, such as a bucket's."""
    if type(gradient) in PLAIN_TYPES:
        return gradient.untyped_storage().nbytes() == gradient.nbytes
    return storage_bytes([gradient]) == element_bytes([gradient])


def bytes_by_device(engine: ShardSource, kind: StateKind) -> dict[str, int]:
    """Return the bytes of one kind of state on cpu and on cuda, without gathered parameters and staging buffers."""
    by_device: dict[str, list[Shard]] = defaultdict(list)
    for shard in engine.local_shards(kind):
        if shard.state_name not in (GATHERED, STAGING):
            by_device[shard.local.device.type].append(shard)
    return {device: shard_bytes(shards) for device, shards in by_device.items()}


def shard_bytes(shards: Iterable[Shard]) -> int:
    """Return the bytes of shards: distinct storages whole, with padding, and views into buckets by their elements."""
    bucket_views: list[Tensor] = []
    own: list[Tensor] = []
    for shard in shards:
        (bucket_views if shard.state_name == BUCKET else own).append(shard.local)
    return storage_bytes(own) + element_bytes(bucket_views)


def state_shards(engine: ShardSource, kind: StateKind) -> list[StateShard]:
    """Return the shards of one kind of state that this rank holds now."""
    return [
        StateShard(p.name, p.state_name, tuple(p.shape), p.box, stored_dtype(p.local))
        for p in engine.local_shards(kind)
    ]


def state_fields(engine: Engine, gradient_bytes_by_device: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a rank's report on the state that it holds now; gradients are those of a step before."""
    return {
        "parameter_bytes": shard_bytes(engine.local_shards("parameters")),
        "optimizer_bytes": shard_bytes(engine.local_shards("optimizer")),
        "host_state": sorted(engine.host_state),
        "state_bytes_by_device": {
            "parameters": bytes_by_device(engine, "parameters"),
            "gradients": gradient_bytes_by_device,
            "optimizer": bytes_by_device(engine, "optimizer"),
        },
        "parameter_shards": state_shards(engine, "parameters"),
        "optimizer_shards": state_shards(engine, "optimizer"),
    }
