"""The text of exported files: a run's layout in a library's own calls and settings, around a model that is the user's.

The templates in harness/export/scripts read like the files; this has what they ask of a run.
"""

import json
import os
import re
import textwrap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from harness.engines.deepspeed.config import deepspeed_config
from harness.engines.deepspeed.widths import reduces_to_owner_rank
from harness.engines.torch.pipeline_parallel import SCHEDULES, stage_io_shape
from harness.export import runtime
from harness.export.recorded_run import RecordedRun
from harness.layout.layer_spec import layer_matrices
from harness.layout.layout import Layout
from harness.layout.model_profile import model_profile
from harness.layout.partition import balancing_weight, fsdp_dim, parameters_of_stage, split_into_stages, whole_model
from harness.models.activation_checkpoint import PROJECTION_OPS, SAVED_OPS
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
    return re.sub(r"\n{4,}", "\n\n\n", template.render(facts, names=used))


@cache
def templates() -> Environment:
    """Return the templates of all files, in which a line that has a tag alone leaves nothing."""
    environment = Environment(
        loader=PackageLoader("harness.export", "scripts"),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["line"] = sanitize  # for names in comments, which no other character than a line break ends
    environment.filters["inside"] = lambda lines, width: textwrap.indent(lines, " " * width)
    return environment


def facts_of(run: RecordedRun, is_accelerate: bool = False) -> dict[str, Any]:
    """Return what the templates know of a run."""
    config, layout, precision = run.config, run.layout, run.config.precision
    checkpointing, zero, pp = config.checkpointing, layout.uses_deepspeed_zero, layout.pp_enabled
    is_fsdp, is_ddp = layout.data_parallel == "fsdp", layout.data_parallel == "ddp"
    recomputes = checkpointing.name != "none"
    transforms = recomputes or config.train.compile or layout.cp_enabled
    shards = is_fsdp and not is_accelerate
    experts, divides_experts = config.model.num_experts > 0, layout.ep_enabled or layout.tp_enabled
    has_own_masters = (precision.is_mixed or layout.ep_enabled) and not is_fsdp and not zero
    needs_last = run.micro_batches > 1 and not pp and (is_fsdp or (is_ddp and not is_accelerate))
    inside = run.target == run.directory / "export"
    others = "Path(__file__).resolve().parent" if run.is_planned else f"Path({os.fspath(Path(run.directory))!r})"
    options = sorted(config.strategy.ddp_options.items())
    own_library = "DeepSpeed" if zero else "torch"
    stage_1 = zero and layout.zero_stage == 1 and precision.is_mixed
    splits_tables = pp and config.model.tie_word_embeddings
    # Experts that are fewer than fully_shard's shards are divided along their second dimension.
    parameters = parameters_of_stage(config.model, whole_model(config.model))
    own_shapes = [each.local_shape(layout.tp, 1, layout.ep) for each in parameters if each.is_expert]
    expert_shards = layout.of_experts.axes_size(layout.of_experts.sharding_axes)
    second_rows = ["Shard"] if is_fsdp and any(fsdp_dim(shape, expert_shards) for shape in own_shapes) else []
    fp32_calls = {
        "safe_get_full_fp32_param": config.model.adapter.is_enabled,
        "safe_set_full_fp32_param": precision.is_mixed,
    }
    own_clip = pp or divides_experts or layout.offload != "none"
    # No device may have room for all parameters before they are sharded.
    on_host = ', storage_device=torch.device("cpu")' if is_fsdp and (is_accelerate or layout.offload != "none") else ""
    return {
        "run": run,
        "config": config,
        "layout": layout,
        "balancing_weight": balancing_weight(config, layout),
        "nodes": config.cluster.nodes,
        "is_project_decoder": model_profile(config.model).is_project_decoder,
        "deepspeed_json": deepspeed_json,
        "library": "Accelerate" if is_accelerate else own_library,
        "ruler": "# " + "-" * 117,
        "run_folder": "Path(__file__).resolve().parents[1]" if inside else others,
        "is_fsdp": is_fsdp,
        "is_ddp": is_ddp,
        "offloads": layout.offload != "none",
        "experts": experts,
        "shards_experts": experts and divides_experts,
        "shares_experts": layout.of_experts.axes_size(layout.of_experts.sharding_axes) > 1,
        "has_replicas": len(data_axes(layout)) > 1,
        "has_own_masters": has_own_masters,
        "replaces_optimizer_choice": stage_1 and reduces_to_owner_rank(config),
        "partitions_while_filling": zero and layout.zero_stage == 3,
        "has_masters": precision.is_mixed and not zero,
        "clips": config.train.gradient_clipping > 0 and not zero,
        "own_clip": own_clip,
        "has_copy": splits_tables,
        "adapted_modules": [matrix.name for matrix in layer_matrices(config.model) if matrix.rank],
        "fp32_calls": [name for name, is_used in fp32_calls.items() if is_used],
        "recomputes": recomputes,
        "selects": checkpointing.name == "selective" and not (zero and layout.zero_stage == 3),
        "saved": sorted(map(str, SAVED_OPS)),
        "products": sorted(map(str, PROJECTION_OPS)),
        "uses_functools": recomputes or config.train.loss_chunks > 1,
        "own_stage": pp and (is_fsdp or has_own_masters or (layout.splits_backward and recomputes)),
        "skips_synchronization": is_ddp and needs_last and not has_own_masters,
        "needs_last": needs_last,
        "needs_layers": transforms or shards or layout.tp_enabled or precision.has_recipe,
        "needs_ends": shards,
        "needs_mesh": bool(mesh(layout)),
        "mesh_sizes": tuple(mesh(layout).values()),
        "mesh_axes": quoted(mesh(layout)),
        "sequence_sizes": (layout.world_size // (layout.cp * layout.tp), layout.cp, layout.tp),
        "second_rows": second_rows,
        "tensor_names": sorted({*tensor_names(layout, own_clip and config.train.gradient_clipping > 0), *second_rows}),
        "ddp_options": "".join(f", {key}={value!r}" for key, value in options),
        "trainer_ddp": {"find_unused_parameters": False, **dict(options)},
        "storage_device": on_host,
        **pipeline_facts(run),
    }


def deepspeed_json(run: RecordedRun) -> str:
    """Return what the run passed to deepspeed.initialize, with the global batch that follows from it.

    Offloaded state is pinned, as on GPUs; on a CPU DeepSpeed ignores that.
    """
    values = deepspeed_config(run.config, run.layout, torch.device("cuda"))
    return json.dumps({"train_batch_size": run.config.train.global_batch} | values, indent=2)


def data_axes(layout: Layout) -> tuple[str, ...]:
    """Return the axes of the mesh for fully_shard: two if shards are replicated."""
    has_replicas = layout.axes_size(layout.replica_axes) > 1 or layout.zero_stage == 0
    return ("dp_replicate", "dp_shard") if has_replicas else ("dp_shard",)


def mesh(layout: Layout) -> dict[str, int]:
    """Return the axes of the device mesh with their sizes, outermost first: those that divide something.

    Ranks that divide sequences are among those that shard the model's state, or that have copies of it. Data
    parallelism by itself needs an axis for fully_shard alone. Where ranks divide experts, these are groups along other
    axes than all other parameters, and the mesh has all axes.
    """
    if layout.ep_enabled:
        return layout.axis_sizes
    sizes = {"pp": layout.pp}
    if layout.data_parallel == "fsdp":
        axes = {"dp_replicate": layout.replica_axes, "dp_shard": layout.sharding_axes}
        sizes |= {axis: layout.axes_size(axes[axis]) for axis in data_axes(layout)}
    elif layout.pp_enabled:
        sizes["dp"] = layout.dp * layout.cp
    sizes["tp"] = layout.tp
    return {axis: size for axis, size in sizes.items() if size > 1 or axis in ("dp_replicate", "dp_shard")}


def quoted(names: Iterable[str]) -> str:
    """Return names as a tuple in Python, with the quotes of the scripts."""
    return str(tuple(names)).replace("'", '"')


def tensor_names(layout: Layout, clips: bool) -> list[str]:
    """Return what a script imports from torch.distributed.tensor."""
    used = {
        "DTensor": clips and (layout.tp_enabled or layout.ep_enabled or layout.data_parallel == "fsdp"),
        "Replicate": layout.tp_enabled,
        "Shard": layout.sequence_parallel,
    }
    return [name for name, is_used in used.items() if is_used]


def pipeline_facts(run: RecordedRun) -> dict[str, Any]:
    """Return a pipeline's schedule, what it takes, this rank's tokens and the stages; nothing without a pipeline."""
    layout = run.layout
    if not layout.pp_enabled:
        return {}
    schedule = SCHEDULES[layout.schedule]
    scheduled = "stages" if issubclass(schedule, PipelineScheduleMulti) else "stages[0]"
    local_seq_len = stage_io_shape(run.config, layout)[1]
    stages = split_into_stages(run.config.model, layout)
    return {"schedule": schedule.__name__, "scheduled": scheduled, "local_seq_len": local_seq_len, "stages": stages}
