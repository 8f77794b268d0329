"""train.py and train_accelerate.py: a run's layout in plain calls of a library, around a model that is the user's.

The templates in harness/export/scripts read like the scripts; this has what they ask of a run.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.config.strategy import DEGREES
from harness.export import runtime
from harness.export.recorded_run import RecordedRun
from harness.layout.layout import Layout

LIBRARIES = {"deepspeed": "DeepSpeed", "accelerate": "Accelerate"}  # others are written in plain torch


def train_py(run: RecordedRun) -> str:
    """Return the script for torchrun."""
    if run.layout.uses_deepspeed_zero:
        return script(run, "deepspeed")
    return script(run, "pipeline" if run.layout.pp_enabled else "torch")


def train_accelerate_py(run: RecordedRun) -> str:
    """Return the script for `accelerate launch --config_file accelerate.yaml train_accelerate.py`."""
    return script(run, "accelerate")


def script(run: RecordedRun, name: str) -> str:
    """Return the script of one of the templates."""
    template, facts = templates().get_template(f"{name}.py.j2"), script_facts(run, name)
    code = template.render(facts, names=())
    used = [word for word in runtime.__all__ if word == "read_run_spec" or re.search(rf"\b{word}\b", code)]
    return template.render(facts, names=used)


@cache
def templates() -> Environment:
    """Return the scripts' templates, in which a line that has a tag alone leaves nothing."""
    loader = PackageLoader("harness.export", "scripts")
    return Environment(
        loader=loader,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )


def script_facts(run: RecordedRun, name: str) -> dict[str, Any]:
    """Return what the templates know of a run."""
    config, layout = run.config, run.layout
    is_fsdp, is_ddp = layout.data_parallel == "fsdp", layout.data_parallel == "ddp"
    is_accelerate, recomputes = name == "accelerate", config.checkpointing.name != "none"
    shards = is_fsdp and not is_accelerate
    needs_last = run.micro_batches > 1 and (is_fsdp or (is_ddp and not is_accelerate))
    inside = run.target == run.directory / "export"
    options = sorted(config.strategy.ddp_options.items())
    return {
        "run": run,
        "config": config,
        "layout": layout,
        "library": LIBRARIES.get(name, "torch"),
        "ruler": "# " + "-" * 117,
        "run_folder": "Path(__file__).resolve().parents[1]" if inside else f"Path({os.fspath(Path(run.directory))!r})",
        "is_fsdp": is_fsdp,
        "is_ddp": is_ddp,
        "has_replicas": len(data_axes(layout)) > 1,
        "clips": config.train.gradient_clipping > 0 and not (is_accelerate and layout.uses_deepspeed_zero),
        "layers_are_recomputed": recomputes,
        "skips_synchronization": is_ddp and needs_last and not layout.pp_enabled,
        "needs_last": needs_last,
        "needs_layers": recomputes or shards or layout.tp_enabled,
        "needs_ends": shards,
        "needs_mesh": shards or layout.tp_enabled,
        "mesh_sizes": tuple(mesh(layout).values()),
        "mesh_axes": str(tuple(mesh(layout))).replace("'", '"'),
        "ddp_options": "".join(f", {key}={value!r}" for key, value in options),
        # No device may have room for all parameters before they are sharded.
        "storage_device": ', storage_device=torch.device("cpu")' if is_accelerate and is_fsdp else "",
        **pipeline_facts(layout),
    }


def data_axes(layout: Layout) -> tuple[str, ...]:
    """Return the axes of the mesh for fully_shard: two if shards are replicated."""
    has_replicas = layout.dp_replicate > 1 or layout.zero_stage == 0
    return ("dp_replicate", "dp_shard") if has_replicas else ("dp_shard",)


def mesh(layout: Layout) -> dict[str, int]:
    """Return the axes of the device mesh with their sizes: those that divide something, and those of fully_shard."""
    required = data_axes(layout) if layout.data_parallel == "fsdp" else ()
    sizes = layout.axis_sizes
    return {axis: sizes[axis] for axis in DEGREES if axis in required or (sizes[axis] > 1 and axis != "pp")}


def pipeline_facts(layout: Layout) -> dict[str, str]:
    """Return the class of a pipeline's schedule and the stages that it takes; nothing without a pipeline."""
    from harness.engines.torch.pipeline_parallel import MULTI_STAGE_SCHEDULES, SINGLE_STAGE_SCHEDULES

    if not layout.pp_enabled:
        return {}
    schedule = (SINGLE_STAGE_SCHEDULES | MULTI_STAGE_SCHEDULES)[layout.schedule].__name__
    return {"schedule": schedule, "scheduled": "stages[0]" if layout.schedule in SINGLE_STAGE_SCHEDULES else "stages"}
