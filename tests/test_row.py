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
            "in_flight": 1 + number,
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


def test_a_pipelines_idle_time_is_what_its_phases_leave() -> None:
    config = composed("strategy=pp_1f1b", "strategy.layers_per_stage=[1,3]")
    layout = resolve(config.strategy, 2)
    ranks = [rank(0, [10.0, 10.0, 10.0], 1), rank(1, [10.0, 10.0, 30.0], 2)]
    phases = [{"forward": [1.0, 2.0, 1.0], "backward": [2.0, 2.0, 2.0], "optimizer": [1.0, 1.0, 1.0]}]
    phases.append(
        {"forward": [2.0] * 3, "backward_input": [2.0] * 3, "backward_weight": [1.0] * 3, "optimizer": [1.0] * 3}
    )
    for one, seconds in zip(ranks, phases, strict=True):
        one["phase_seconds"] = seconds
    first, last = row.pipeline(config, layout, ranks)
    assert (first["working_seconds"], first["idle_seconds"]) == (3.0, 6.0)
    assert (last["working_seconds"], last["idle_seconds"]) == (5.0, 4.0)  # medians over steps
    assert (first["bubble"], last["idle_share"]) == (2.0, pytest.approx(4 / 9))
    assert [(r["stages"], r["layers"], r["in_flight"]) for r in (first, last)] == [([0], [1], 1), ([1], [3], 2)]
    found = row.measured(config, layout, ranks)
    assert found["bubble"] == pytest.approx(10 / 8) and found["bubble_formula"] == 1 / 8 and found["in_flight"] == 2
