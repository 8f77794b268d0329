"""The text of exported files: a run's layout in a library's own calls and settings, around a model that is the user's.

The templates in harness/export/scripts read like the files; this has what they ask of a run.
"""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from harness.config.strategy import DEGREES
from harness.engines.deepspeed.config import deepspeed_config
from harness.engines.deepspeed.widths import reduces_to_owner_rank
from harness.engines.torch.pipeline_parallel import SCHEDULES
from harness.export import runtime
from harness.export.recorded_run import RecordedRun
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.util.text import sanitize


def refusals(run: RecordedRun, kind: str) -> list[str]:
    """Return the reasons why a kind of file cannot be written, a line each: those of a macro of refusals.j2."""
    macros = templates().get_template("refusals.j2").make_module(facts_of(run))
    return list(filter(None, str(getattr(macros, kind)()).splitlines()))


def file_text(run: RecordedRun, name: str) -> str:
    """Return the text of a file by its template; a script imports those names of the runtime that it uses."""
    template, facts = templates().get_template(f"{name}.j2"), facts_of(run, is_accelerate=name == "train_accelerate.py")
    code = template.render(facts, names=())
    used = [word for word in runtime.__all__ if word == "read_run_spec" or re.search(rf"\b{word}\b", code)]
    return template.render(facts, names=used)


@cache
def templates() -> Environment:
    """Return the templates of all files, in which a line that has a tag alone leaves nothing."""
    loader = PackageLoader("harness.export", "scripts")
    environment = Environment(
        loader=loader,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["line"] = sanitize  # for names in comments, which no other character than a line break ends
    return environment


def facts_of(run: RecordedRun, is_accelerate: bool = False) -> dict[str, Any]:
    """Return what the templates know of a run."""
    config, layout = run.config, run.layout
    is_fsdp, is_ddp = layout.data_parallel == "fsdp", layout.data_parallel == "ddp"
    recomputes = config.checkpointing.name != "none"
    shards = is_fsdp and not is_accelerate
    needs_last = run.micro_batches > 1 and (is_fsdp or (is_ddp and not is_accelerate))
    inside = run.target == run.directory / "export"
    options = sorted(config.strategy.ddp_options.items())
    own_library = "DeepSpeed" if layout.uses_deepspeed_zero else "torch"
    return {
        "run": run,
        "config": config,
        "layout": layout,
        "nodes": config.cluster.nodes,
        "is_project_decoder": model_profile(config.model).is_project_decoder,
        "reduces_to_owner_rank": reduces_to_owner_rank,
        "deepspeed_json": deepspeed_json,
        "library": "Accelerate" if is_accelerate else own_library,
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


def deepspeed_json(run: RecordedRun) -> str:
    """Return what the run passed to deepspeed.initialize, with the global batch that follows from it."""
    values = deepspeed_config(run.config, run.layout, torch.device(run.device))
    return json.dumps({"train_batch_size": run.config.train.global_batch} | values, indent=2)


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
    if not layout.pp_enabled:
        return {}
    schedule = SCHEDULES[layout.schedule]
    scheduled = "stages" if issubclass(schedule, PipelineScheduleMulti) else "stages[0]"
    return {"schedule": schedule.__name__, "scheduled": scheduled}
