"""A row's figures from two hand-made ranks that differ in everything: no rank left out, no unit changed."""

from typing import Any

import pytest
from conftest import composed

from harness import row
from harness.layout import resolve


def rank(number: int, seconds: list[float], peak: int, **profiled: Any) -> dict[str, Any]:
    at_peak = {f"{part}_bytes": 10 for part in ("parameter", "gradient", "optimizer", "activation")}
    sent = [{"operation": "all_reduce", "group_ranks": [0, 1], "dtype": "float32", "bytes_sent": 50.0, "count": 1}]
    return {
        "rank": number,
        "devices": 1,
        "device_name": "cpu",
        "step_seconds": seconds,
        "losses": [4.0 + number, 2.0 + number],
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": None,
        "parameter_bytes": 100 + number,
        "optimizer_bytes": 200 - number,
        "profiled": {
            "gradient_bytes": 300 + number,
            "activation_bytes": 400 - number,
            "at_peak": at_peak | {"phase": "backward"},
            "communication": sent * (1 + number),
        }
        | profiled,
    }


def test_figures_are_the_whole_worlds() -> None:
    config = composed("train.global_batch=8", "train.seq_len=32")
    ranks = [rank(0, [1.0, 2.0, 9.0], 1000), rank(1, [3.0, 1.0, 1.0], 1500)]
    found = row.measured(config, resolve(config.strategy, 2), ranks)
    assert found["step_seconds"] == 3.0  # the slowest rank of each step: 3, 2 and 9; their median
    assert found["tokens_per_second"] == pytest.approx(8 * 32 / 3.0)
    assert found["tokens_per_second_per_device"] == pytest.approx(8 * 32 / 3.0 / 2)
    assert (found["peak_allocated_bytes"], found["peak_rank"], found["peak_reserved_bytes"]) == (1500, 1, None)
    assert (found["parameter_bytes"], found["optimizer_bytes"]) == (101, 200)
    assert (found["gradient_bytes"], found["activation_bytes"]) == (301, 400)
    assert found["communication_bytes"] == 100
    assert (found["loss_first"], found["loss_last"]) == (4.5, 2.5)
    assert found["at_peak_other_bytes"] == 1460 and found["peak_phase"] == "backward"
