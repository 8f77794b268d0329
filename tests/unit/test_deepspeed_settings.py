"""DeepSpeed's settings in the strategies: none makes a GPU wait, and the report says to which a speed belongs."""

from typing import Any

import pytest
import torch
import yaml

from harness.config.locations import PACKAGED_CONF
from harness.engines.deepspeed.compatibility import FLAGS, SIZES
from harness.engines.deepspeed.config import deepspeed_config
from harness.layout.layout import resolve_layout
from tests.support.commands import compose_config
from tests.support.example_records import record_of, row
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
    by_settings = f"{volumes}; DeepSpeed's defaults: zero3_defaults; those tuned for speed: zero3_tuned"
    assert page_text(records).count(by_settings) == 1
    ddp = record_of(row(9, "ddp", "torch", 0))
    for others in ([ddp], records[:3]):  # no speed of DeepSpeed's, or nothing to compare one with
        assert volumes not in page_text(others)
