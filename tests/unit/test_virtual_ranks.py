"""What a virtual rank has in the place of other ranks' values, and what its row says of time."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.cost_model.timing.step_time import StepTime
from harness.layout.layout import resolve_layout
from harness.metrics.columns import virtual_columns
from harness.records.rank_report import PhaseShare, RankReport, TimeBreakdown
from harness.simulator.deepspeed_process import fill_padding
from harness.simulator.process_group import fake_process_group
from harness.simulator.virtual_rank import RECEIVED_GRADIENT, RECEIVED_HIDDEN_STATE, fill_received, own_vocabulary
from tests.support.commands import compose_config

# A step of 1 s, of which stand-ins for collectives take 0.2 s in forward and 0.1 s in backward.
REPORT = RankReport(
    status="ok",
    device_name="cpu",
    step_seconds=(1.0,),
    phase_seconds={"data": (0.1,), "forward": (0.3,), "backward": (0.4,), "optimizer": (0.1,)},
    time_breakdown=TimeBreakdown(
        1.0, {"forward": PhaseShare(0.3, 0.2, 0.0), "backward": PhaseShare(0.4, 0.1, 0.0)}, overlapped_seconds=0.0
    ),
)

PREDICTED = StepTime(
    compute_seconds=9.0,
    exposed_communication_seconds={"dp_shard": 0.5, "tp": 0.25},
    bubble_seconds=0.125,
    optimizer_seconds=9.0,
    other_seconds=9.0,
    micro_batches=1,
    forward_seconds=9.0,
    backward_seconds=9.0,
    hidden_communication_seconds=9.0,
)


def test_an_estimated_step_is_measured_computing_and_predicted_communication() -> None:
    layout = resolve_layout(compose_config("strategy=fsdp_full_shard").strategy, 4)
    columns = virtual_columns(layout, [REPORT], PREDICTED)
    assert columns["predicted_communication_seconds"] == pytest.approx(0.875)
    assert columns["estimated_step_seconds"] == pytest.approx(1.0 - 0.3 + 0.875)
    parts = [columns[f"{name}_seconds"] for name in ("data", "forward", "backward", "optimizer", "other")]
    assert parts == pytest.approx([0.1, 0.1, 0.3, 0.1, 0.1])
    assert not {"step_seconds", "tokens_per_second", "exposed_communication_seconds"} & columns.keys()


def test_no_step_is_estimated_without_known_hardware() -> None:
    layout = resolve_layout(compose_config("strategy=fsdp_full_shard").strategy, 4)
    assert (
        not {"estimated_step_seconds", "predicted_communication_seconds"}
        & virtual_columns(layout, [REPORT], None).keys()
    )


WORLD_SIZE = 4

# The collectives of engines that allocate their results, as calls with an input and a result of WORLD_SIZE or 1 parts.
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_gather_into_tensor": lambda part, whole: dist.all_gather_into_tensor(whole, part),
    "all_gather": lambda part, whole: dist.all_gather([*whole.chunk(WORLD_SIZE)], part),
    "reduce_scatter_tensor": lambda part, whole: dist.reduce_scatter_tensor(part, whole),
    "reduce_scatter": lambda part, whole: dist.reduce_scatter(part, [*whole.chunk(WORLD_SIZE)]),
    "all_to_all_single": lambda part, whole: dist.all_to_all_single(part, part.clone().fill_(1.0)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_fake_process_group_fills_results(name: str) -> None:
    part, whole = torch.ones(WORLD_SIZE), torch.ones(WORLD_SIZE * WORLD_SIZE)
    (whole if name.startswith("all_gather") else part).fill_(math.nan)
    with fake_process_group(WORLD_SIZE - 1, WORLD_SIZE):
        COLLECTIVES[name](part, whole)
    assert (part == 1).all() and (whole == 1).all()


@pytest.mark.parametrize("size", [RECEIVED_HIDDEN_STATE, RECEIVED_GRADIENT])
@pytest.mark.parametrize("hidden", [6, 7])
def test_received_values_are_normal_numbers_in_float16(size: float, hidden: int) -> None:
    received = torch.full((2, 3, hidden), math.nan, dtype=torch.float16, requires_grad=True)
    version = received._version
    fill_received(received, size)
    assert received.isfinite().all() and received.abs().min() >= torch.finfo(torch.float16).tiny
    assert received.std() > 0.9 * size and received._version == version


def test_ranks_divide_a_vocabulary_as_tensor_parallelism_does() -> None:
    layout = resolve_layout(compose_config("strategy=tp").strategy, 4)
    assert [len(own_vocabulary(258, layout, rank)) for rank in range(4)] == [65, 65, 65, 63]
    assert own_vocabulary(258, layout, 3) == range(195, 258)
    whole = resolve_layout(compose_config("strategy=tp", "strategy.vocabulary_parallel=false").strategy, 4)
    assert own_vocabulary(258, whole, 3) == range(258)


@pytest.mark.parametrize(("place", "expected"), [(0, [0, 1, 2]), (1, [3, 4, 0]), (2, [0, 1, 2])])
def test_the_padding_of_a_part_is_filled(place: int, expected: list[int]) -> None:
    whole, part = torch.arange(5.0), torch.full((3,), math.nan)
    valid = whole[3 * place : 3 * place + 3]
    part[: len(valid)] = valid
    fill_padding(part, whole, place)
    assert part.tolist() == expected
