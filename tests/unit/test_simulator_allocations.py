"""The log of CUDA's caching allocator, read from histories in torch's format: what is allocated, and until when."""

from collections.abc import Iterator

import pytest
import torch

from harness.measure.allocation_log import StepAnnotations
from harness.measure.allocation_logger import CudaAllocationLog
from harness.measure.memory_attribution import attribute_peak
from tests.support.allocator_history import SEGMENT_BYTES, AllocatorHistory, memory_history

DEVICE_INDEX = 1  # of two devices, the first of which has a history without entries


@pytest.fixture
def allocator() -> Iterator[AllocatorHistory]:
    allocator = AllocatorHistory(DEVICE_INDEX)
    with memory_history(allocator):
        yield allocator


def begin_log() -> CudaAllocationLog:
    return CudaAllocationLog(torch.device("cuda", DEVICE_INDEX))


def peak_parts(log: CudaAllocationLog, annotations: StepAnnotations) -> dict[str, int]:
    """Return the bytes at the peak by role, and the sum of all."""
    peak = attribute_peak(log.end(), annotations)
    return {part.role: part.bytes for part in peak.parts} | {"all": peak.bytes}


def test_a_block_is_freed_when_its_tensor_is_and_not_when_other_streams_are_done(allocator: AllocatorHistory) -> None:
    """A send's buffer is still in use by the stream of NCCL when the next tensor of a step is allocated."""
    parameter = allocator.allocate(1000)
    log = begin_log()
    annotations = StepAnnotations()
    annotations.claim(log.position(), [parameter], "parameter", "at rest")
    sent = allocator.allocate(700, stream=7)
    allocator.request_free(sent)
    other = allocator.allocate(500)
    allocator.complete_free(sent)
    allocator.free(other)
    parts = peak_parts(log, annotations)
    assert parts == {"parameter": 1000, "temporary": 700, "all": 1700}
    assert log.is_complete


def test_a_block_that_waits_for_another_stream_is_live_neither_before_nor_after(allocator: AllocatorHistory) -> None:
    waiting = allocator.allocate(300)
    allocator.request_free(waiting)
    log = begin_log()
    stays = allocator.allocate(64)
    allocator.complete_free(waiting)
    last = allocator.allocate(32)
    allocator.request_free(last)
    lines = log.end()
    assert lines.initial_count == 0
    assert lines.bytes.tolist() == [64, 32, -32]
    assert lines.addresses.tolist() == [stays, last, last]
    assert log.is_complete


def test_segments_and_failed_requests_are_no_blocks(allocator: AllocatorHistory) -> None:
    log = begin_log()
    block = allocator.allocate(10)
    allocator.run_out_of_memory(1 << 40)
    allocator.free(block)
    assert {entry["action"] for entry in allocator.entries} >= {"segment_map", "segment_unmap", "oom"}
    assert log.end().bytes.tolist() == [10, -10]
    assert max(abs(size) for size in log.end().bytes.tolist()) < SEGMENT_BYTES
    assert log.is_complete


def test_a_history_that_lost_entries_is_not_complete(allocator: AllocatorHistory) -> None:
    """The history has max_entries at most in torch, which drops the oldest."""
    log = begin_log()
    allocator.allocate(10)
    allocator.allocate(20)
    del allocator.entries[:2]
    log.end()
    assert not log.is_complete
