"""The row of a prediction, with the columns of runs.csv where they exist, and the overrides by which it is run.

The overrides are the nearest strategy preset, and what differs from it. Imports no torch.
"""

import csv
import dataclasses
import io
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from harness.config.from_dict import GroupValues
from harness.config.locations import files_in
from harness.config.schema import CheckpointingConfig, RunConfig
from harness.config.strategy import AXES, StrategyConfig
from harness.cost_model.parts import PEAK_PARTS
from harness.cost_model.prediction import Prediction
from harness.records.schema import COLUMNS, Cells, Row
from harness.records.store import csv_cell
from harness.runner.config_columns import config_columns

SEARCH = "search"  # the strategy that stands for all of them

_OF_LIBRARY = ("engine", "literature")  # the library, and whether its settings are the papers': of a preset as it is

# The settings that a search chooses, which a run's command line has from its answer; a stack is a plan's alone.
_CHOSEN = ("strategy.", "checkpointing.", "train.micro_batch.", "stack.", "plan.simulate.", "plan.tokens.")

# The columns of plans.csv before those of a planned row. A layout may have a place in one of the lists or in both.
PLACE_COLUMNS = {
    "place_among_choices": "The place among the choices, the fastest that fits first; empty for all others.",
    "place_on_front": "The place among those that are faster than all with less memory, from 1; else empty.",
}

# The columns of plans that runs.csv does not have, with what they are; the guide's table has them.
PLAN_COLUMNS = {
    "cluster": "The cluster that the plan is for.",
    "stack": "The implementation whose memory and time are predicted.",
    "overrides": "The overrides that give a run this layout, checkpointing and micro-batch; empty for other stacks.",
    "datasheet_only": "Whether no published measurement stands behind the efficiencies of the cluster's devices.",
    "fits": "Whether the fullest rank fits a device: likely, tight or no, by the interval of its peak.",
    "predicted_peak_low_bytes": "The lower end of the interval of allocated bytes.",
    "predicted_peak_high_bytes": "The upper end of the interval, of the bytes that the allocator must have.",
    "predicted_step_low_seconds": "The lower end of the interval of the step time, by the errors on file.",
    "predicted_step_high_seconds": "The upper end; nine of ten measured steps are to lie between both.",
    "device_bytes": "The bytes that a device must have: what torch's allocator cannot give back, and process_bytes.",
    "process_bytes": "The bytes of a device outside torch's allocator, such as CUDA's context.",
    "host_bytes": "The bytes that a rank keeps on the host under offload.",
    "at_peak_loss_bytes": "The logits and the loss at the peak; runs count them as temporary.",
    "at_peak_workspace_bytes": "The workspaces of matrix products at the peak; runs count them as temporary.",
    "peak_phase": "The phase in which the fullest rank peaks: forward, backward or optimizer.",
    "exposed_AXIS_seconds": "The part of exposed_communication_seconds along tp, cp, ep, dp_shard, dp_replicate or pp.",
    "communication_AXIS_OPERATION_bytes": "The part of communication_bytes along an axis and by an operation.",
    "secondary_bytes": "The part of communication_bytes that goes among the neighboring ranks of secondary shards.",
    "between_nodes_bytes": "The part of communication_bytes that leaves the node, as the mean of its devices.",
    "cost_per_billion_tokens": "The price of a billion tokens, by cluster.hardware.price_per_device_hour.",
}


def planned_row(prediction: Prediction) -> Row:
    """Return the row of a prediction; nothing of it was measured."""
    config = prediction.config
    words = run_overrides(config) if prediction.is_runnable else []
    preset = named_preset(config).strategy.name if words else config.strategy.name
    return {
        "status": None,
        "measured_on": None,
        **config_columns(config, prediction.layout),
        "strategy": preset,
        "launch": "planned",
        "repeat": None,
        "cluster": prediction.cluster.name,
        "stack": prediction.stack.name,
        "datasheet_only": prediction.cluster.hardware.datasheet_only,
        **({"overrides": shlex.join(words)} if words else {}),
        **predicted_columns(prediction),
    }


def run_overrides(config: RunConfig) -> list[str]:
    """Return the overrides that give a run this strategy, checkpointing and micro-batch.

    The first is the preset: of those in conf/strategy the one that needs the fewest further overrides.
    """
    wanted = vars(config.strategy)
    same_library = [preset for preset in strategy_presets() if all(preset[key] == wanted[key] for key in _OF_LIBRARY)]
    strategies = ([f"strategy={preset['name']}", *_changes("strategy", preset, wanted)] for preset in same_library)
    kind = config.checkpointing.name
    defaults = CheckpointingConfig(kind, every=2 if kind == "every_n" else 1)
    checkpointing = _changes("checkpointing", vars(defaults), vars(config.checkpointing))
    words = [*min(strategies, key=len), f"checkpointing={kind}", *checkpointing]
    return [*words, f"train.micro_batch={config.train.micro_batch}"]


def named_preset(config: RunConfig) -> RunConfig:
    """Return the configuration of a layout that a search chose under the name of its preset, and others as they are."""
    if config.strategy.name != SEARCH:
        return config
    name = run_overrides(config)[0].partition("=")[2]
    return dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, name=name))


def run_settings(planned: Sequence[str], config: RunConfig) -> str:
    """Return the settings that run a layout which was found by these overrides of `harness plan`, for a shell."""
    keys = {word: word.lstrip("+").partition("=")[0] for word in planned}
    others = [word for word in planned if not f"{keys[word]}.".startswith(_CHOSEN)]
    return shlex.join([*others, *run_overrides(config)])


@cache
def strategy_presets() -> list[GroupValues]:
    """Return the values of all strategy presets, with defaults for those that a file leaves out.

    The one that stands for all strategies is not among them. A value that depends on the machine is still its formula.
    """
    defaults = vars(StrategyConfig(name=SEARCH))
    paths = files_in("strategy")
    return [defaults | yaml.safe_load(path.read_text()) for name, path in paths.items() if name != SEARCH]


def _changes(group: str, preset: GroupValues, wanted: GroupValues) -> list[str]:
    """Return the overrides in which the values of a group differ from a preset of the same name or library.

    A degree that the preset leaves to the world (-1) follows from the others.
    """
    own, chosen = _flat(preset), _flat(wanted)
    keys = [key for key in chosen if own.get(key) not in (-1, chosen[key])]
    values = {key: str(chosen[key]).lower() if isinstance(chosen[key], bool) else chosen[key] for key in keys}
    missing = [f"~{group}.{key}" for key in own if key not in chosen]
    return [f"{'' if key in own else '+'}{group}.{key}={value}" for key, value in values.items()] + missing


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that an override may change, those of the library's settings by their dotted keys."""
    options = {f"options.{key}": value for key, value in (values.get("options") or {}).items()}
    return {key: value for key, value in values.items() if key not in ("name", "options", *_OF_LIBRARY)} | options


def predicted_columns(prediction: Prediction) -> Cells:
    """Return the predicted step time and its parts, which add up to it, the memory of the fullest rank, and bytes sent.

    Memory is by part at its peak, and each part at its own maximum. Bytes are those of the rank that sends most in a
    step: all, and by axis and operation.
    """
    time, layout, memory, verdict = prediction.time, prediction.layout, prediction.memory, prediction.verdict
    low, high = prediction.step_interval
    sent = {name.replace("+", "_").replace(" ", "_"): size for name, size in prediction.sent_bytes.items() if size}
    return {
        "predicted_step_seconds": prediction.step_seconds,
        "predicted_step_low_seconds": low,
        "predicted_step_high_seconds": high,
        **prediction.step_parts,
        **{f"exposed_{axis}_seconds": time.exposed_communication_seconds.get(axis, 0.0) for axis in reversed(AXES)},
        "overlapped_communication_seconds": time.hidden_communication_seconds,
        **({"pipeline_bubble_theory": prediction.bubble_ratio} if layout.pp_enabled else {}),
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "tokens_per_second_per_device": prediction.tokens_per_second / layout.world_size,
        "model_flops": prediction.model_flops,
        "cost_per_billion_tokens": prediction.cost_per_billion_tokens,
        "predicted_peak_bytes": memory.peak_bytes,
        "peak_rank": memory.rank,
        "peak_phase": memory.phase,
        "peak_reserved_bytes": prediction.reserved_bytes if prediction.cluster.device == "cuda" else None,
        "fits": verdict.fits,
        "predicted_peak_low_bytes": round(verdict.low_bytes),
        "predicted_peak_high_bytes": round(verdict.high_bytes),
        "memory_limit_bytes": prediction.available_bytes,
        "device_bytes": prediction.device_bytes,
        "process_bytes": memory.process_bytes,
        "parameter_bytes": memory.parameter_bytes,
        "gradient_bytes": memory.gradient_bytes,
        "optimizer_bytes": memory.optimizer_bytes,
        "activation_bytes": memory.activation_bytes,
        **{column: memory.at_peak.get(part, 0) for part, column in PEAK_PARTS.items()},
        "host_bytes": memory.host_bytes,
        "communication_bytes": round(sum(sent.values())),
        **{f"communication_{name}_bytes": round(size) for name, size in sent.items()},
        **({"secondary_bytes": round(prediction.secondary_bytes)} if layout.secondary_shards > 1 else {}),
        "between_nodes_bytes": round(prediction.between_nodes_bytes),
    }


def refused_row(reason: str, values: Mapping[str, str]) -> Row:
    """Return the row of a combination that cannot be planned, with what its command line sets and the reason."""
    cells: Cells = {"status": None, "measured_on": None, "launch": "planned", "reason": reason}
    names = {key: key.rpartition(".")[2] for key in values}
    return cells | {name: values[key] for key, name in names.items() if name in COLUMNS and name not in cells}


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as comma-separated values: their places, those of runs.csv in its order, then the others."""
    text, known = io.StringIO(), dict.fromkeys(name for row in rows for name in row)
    names = [name for name in dict.fromkeys((*PLACE_COLUMNS, *COLUMNS, *known)) if name in known]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([csv_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()
