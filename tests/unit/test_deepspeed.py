"""DeepSpeed's settings in the strategies: none makes a GPU wait, and what they send and hide is planned."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config.locations import PACKAGED_CONF
from harness.config.strategy import AXES
from harness.cost_model.prediction import Prediction
from harness.engines.deepspeed.compatibility import FLAGS, SIZES, layout_unsupported, unsupported
from harness.engines.deepspeed.config import deepspeed_config
from harness.layout.layout import resolve_layout
from harness.runner.resolve import detect_machine
from harness.simulator.process_group import fake_process_group
from tests.support.commands import compose_config
from tests.support.deepspeed_accelerator import count_synchronizations
from tests.support.example_records import record_of, row
from tests.support.planned import planned
from tests.support.tables import page_text

PRESETS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((PACKAGED_CONF / "strategy").glob("*.yaml"))}

BY_DEEPSPEED = [name for name, values in PRESETS.items() if values.get("engine") == "deepspeed"]


@pytest.mark.parametrize("name", BY_DEEPSPEED)
def test_no_preset_waits_for_the_device_at_every_bucket(name: str) -> None:
    """With reductions to one owner, overlap_comm synchronises the device for every bucket (stage_1_and_2.py)."""
    options = PRESETS[name].get("options", {})
    if options.get("use_multi_rank_bucket_allreduce", True) is False:
        assert options["overlap_comm"] is False
    assert options.keys() <= {*FLAGS, *SIZES}


@pytest.mark.parametrize("name", BY_DEEPSPEED)
def test_the_throughput_timer_is_off_where_the_defaults_are_not_what_is_measured(name: str) -> None:
    config = compose_config(f"strategy={name}", "world_size=2")
    values = deepspeed_config(config, resolve_layout(config.strategy, 2), torch.device("cpu"))
    is_off = values.get("timers") == {"throughput": {"enabled": False}}
    assert is_off is not name.endswith("_defaults")


def by_deepspeed(number: int, name: str, **changes: Any) -> Any:
    record = record_of(row(number, name, "deepspeed", PRESETS[name]["zero_stage"], **changes))
    record.config["strategy"] = PRESETS[name]
    return record


def test_the_report_says_which_settings_a_speed_belongs_to() -> None:
    names = ("zero3", "zero3_defaults", "zero3_tuned")
    records = [by_deepspeed(3 * n + repeat, name, repeat=repeat) for n, name in enumerate(names) for repeat in range(3)]
    volumes = "the papers' volumes: zero3"
    by_settings = f"{volumes}; DeepSpeed's defaults: zero3_defaults; those that it recommends for speed: zero3_tuned"
    assert page_text(records).count(by_settings) == 1
    ddp = record_of(row(9, "ddp", "torch", 0))
    for others in ([ddp], records[:3]):  # no speed of DeepSpeed's, or nothing to compare one with
        assert volumes not in page_text(others)


def predicted(strategy: str, *settings: str) -> Prediction:
    """Return the prediction for a strategy on eight H100, one sequence a micro-batch."""
    words = ("model=7b", "cluster=8xh100", "train.global_batch=32", "train.micro_batch=1", "train.seq_len=4096")
    return planned(*words, f"strategy={strategy}", *settings).predictions[0]


def exposed(prediction: Prediction) -> float:
    return sum(prediction.time.exposed_communication_seconds.values())


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_settings_of_the_papers_wait_for_what_tuned_ones_hide(stage: int) -> None:
    """Reductions that nothing overlaps take their whole time, in stages 2 and 3 in every micro-batch.

    In stage 1 of mixed precision DeepSpeed reduces after the last backward whatever the settings are.
    """
    papers, tuned = predicted(f"zero{stage}"), predicted(f"zero{stage}_tuned")
    if stage == 1:
        assert exposed(papers) < exposed(tuned) < 2.5 * exposed(papers)
    else:
        assert exposed(papers) > 3 * exposed(tuned)
        assert tuned.time.hidden_communication_seconds > papers.time.hidden_communication_seconds
    assert (papers.time.hidden_communication_seconds == 0) is (stage < 3)


@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("precision", ("fp32", "bf16_mixed"))
def test_gradients_that_all_ranks_get_are_sent_twice(stage: int, precision: str) -> None:
    """Of an all-reduce each rank sends twice the bytes of a reduction; parameters are gathered as they were."""
    settings = (f"precision={precision}", "train.global_batch=8")
    papers, tuned = (predicted(f"zero{stage}{name}", *settings).sent_bytes for name in ("", "_tuned"))
    assert tuned == papers | {"dp_shard reduce": 2 * papers["dp_shard reduce"]}
    if precision == "fp32":
        assert sum(tuned.values()) == pytest.approx(1.5 * sum(papers.values()))


WORLD_SIZE = 2

MICRO_BATCHES = 2

SMALL = (
    "model.num_hidden_layers=1",
    "train.seq_len=8",
    "train.micro_batch=1",
    f"train.global_batch={MICRO_BATCHES * WORLD_SIZE}",
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(0, WORLD_SIZE):
        yield init_device_mesh("cpu", (1, 1, WORLD_SIZE, 1, 1, 1), mesh_dim_names=AXES)


def waits_per_step(mesh: DeviceMesh, *overrides: str) -> int:
    """Return how often the third step waits; from then on DeepSpeed's throughput timer runs (its start_step is 2)."""
    config = compose_config(*overrides, *SMALL)
    return count_synchronizations(config, resolve_layout(config.strategy, WORLD_SIZE), mesh, steps=3)[-1]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_no_preset_waits_for_its_device(strategy: str, mesh: DeviceMesh) -> None:
    assert waits_per_step(mesh, f"strategy={strategy}") == 0


def test_overlap_with_one_owner_of_each_bucket_waits_at_every_bucket(mesh: DeviceMesh) -> None:
    """This was the preset of ZeRO-2: stage_1_and_2.py waits in allreduce_and_copy, which reduces to one owner."""
    assert waits_per_step(mesh, "strategy=zero2", "strategy.options.overlap_comm=true") > MICRO_BATCHES


def test_the_timer_of_the_librarys_defaults_waits_twice_in_a_micro_batch(mesh: DeviceMesh) -> None:
    assert waits_per_step(mesh, "strategy=zero1_defaults") == 2 * MICRO_BATCHES


def test_fp16_is_planned_and_refused_on_a_cpu_that_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed asks torch whether its CPU kernels have fp16; plans and simulated devices need none."""
    [prediction] = planned("strategy=zero2", "precision=fp16_mixed", "model=7b", "cluster=8xh100").predictions
    assert prediction.fits
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False, raising=False)
    of_run = compose_config("strategy=zero2", "precision=fp16_mixed", "world_size=2")
    layout, machine = resolve_layout(of_run.strategy, 2), detect_machine(of_run.cluster)
    (reason,) = unsupported(of_run, layout, machine)
    assert reason.startswith("precision=fp16_mixed is not possible for DeepSpeed on this CPU: choose")
    assert not list(unsupported(dataclasses.replace(of_run, launch="simulated"), layout, machine))


@pytest.mark.parametrize(("scale", "ranks", "power"), [(65536, 2, 15), (65536, 3, 14), (2**22, 1, 22)])
def test_the_loss_scale_includes_the_average_over_ranks(scale: int, ranks: int, power: int) -> None:
    """It is a power of two; a scale that is none is refused with the nearest one."""
    words = ("strategy=zero2", "precision=fp16_mixed", f"world_size={ranks}", f"train.global_batch={2 * ranks}")
    config = compose_config(*words, f"precision.initial_loss_scale={scale}")
    written = deepspeed_config(config, resolve_layout(config.strategy, ranks), torch.device("cpu"))["fp16"]
    assert (written["initial_scale_power"], written["hysteresis"]) == (power, 1)
    other = compose_config(*words, f"precision.initial_loss_scale={scale + 1000}")
    (reason,) = layout_unsupported(other, resolve_layout(other.strategy, ranks))
    assert reason.endswith(f"choose {scale}")
