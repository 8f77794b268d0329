"""The inputs of the cost model's formulas for a recorded run."""

from contextlib import suppress
from dataclasses import dataclass

from harness.config.command import read_run_config
from harness.config.from_dict import from_dict
from harness.config.model import ModelConfig
from harness.config.schema import Device, RunConfig
from harness.cost_model.rank_memory import rank_stages
from harness.cost_model.sharding import local_parameter_count
from harness.engines.base import load_engine
from harness.layout.layout import Layout
from harness.layout.state_widths import StateWidths
from harness.records.schema import Record
from harness.util.errors import UserError


@dataclass(frozen=True)
class Setting:
    """The inputs of the cost model's formulas for one run."""

    config: RunConfig
    layout: Layout
    widths: StateWidths
    device: Device


def recorded_config(record: Record) -> RunConfig | None:
    """Return the configuration, None if this version cannot read it. No figure depends on the training text."""
    with suppress(UserError):
        return read_run_config(record.config | {"data": {"name": "any", "kind": "synthetic"}})
    return None


def recorded_layout(record: Record) -> Layout | None:
    """Return the layout, None if this version cannot read it."""
    with suppress(UserError):
        return from_dict(Layout, record.layout or {})
    return None


def read_setting(record: Record) -> Setting | None:
    """Return the setting of a recorded run; None where this version of the harness does not know its keys."""
    config, layout = recorded_config(record), recorded_layout(record)
    if config is None or layout is None:
        return None
    with suppress(UserError, KeyError):
        widths = load_engine(layout.engine).state_widths(config, layout)
        layout.grad_accumulation_steps(config.train)  # raises UserError for a batch that leaves a remainder
        return Setting(config, layout, widths, "cpu" if record.row.get("measured_on") == "cpu" else "cuda")
    return None


def most_parameters(model: ModelConfig, layout: Layout) -> int:
    """Return the number of parameters on the rank that has most of them, before they are sharded."""
    stages = [rank_stages(model, layout, pp_rank) for pp_rank in range(layout.pp)]
    tp, vocabulary_tp = layout.tp, layout.vocabulary_tp
    return max(sum(local_parameter_count(model, stage, tp, vocabulary_tp) for stage in own) for own in stages)
