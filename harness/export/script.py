"""train.py: the run's layout in plain calls of its library, around a model that is the user's to replace."""

from harness.export import snippets
from harness.export.assemble import assemble, indent_under, step_loop
from harness.export.recorded_run import RecordedRun
from harness.export.snippets import Snippet, dedented
from harness.export.templates import (
    BATCHES,
    BUILD,
    BUILD_STAGES,
    ENDS,
    FILL,
    IMPORTS,
    LAYERS,
    MASTERS,
    MASTERS_IMPORTS,
    start,
)

PRINT_MEAN_LOSS = dedented("""
    dist.all_reduce(total)  # for the mean over ranks
    if dist.get_rank() == 0:
        print(f"step {step} loss {total.item() / dist.get_world_size():.6f}", flush=True)
    """)

UPDATE = ["optimizer.step()", "optimizer.zero_grad()"]


def train_py(run: RecordedRun) -> str:
    """Return the script for torchrun."""
    if run.layout.uses_deepspeed_zero:
        return deepspeed_script(run)
    return pipeline_script(run) if run.layout.pp_enabled else torch_script(run)


def torch_script(run: RecordedRun) -> str:
    """Return the script of a layout in which every rank has all layers."""
    before_fill = [*snippets.tensor_parallel(run), *snippets.checkpointing(run), *snippets.fsdp(run)]
    after_fill = [*snippets.ddp(run), snippets.optimizer(run), *snippets.clipping(run)]
    used = [*before_fill, *after_fill]
    main = [
        start(run),
        *mesh(run),
        "model = build()",
        *(snippet.apply for snippet in before_fill),
        "fill(model, device)",
        *(snippet.apply for snippet in after_fill if snippet.apply),
        "micro_batches = batches(device)",
        step_loop(
            [
                "total = torch.zeros((), device=device)",
                accumulation_loop(run, used),
                *(snippet.after_backward for snippet in used if snippet.after_backward),
                *UPDATE,
                PRINT_MEAN_LOSS,
            ]
        ),
    ]
    helpers = [LAYERS] if any("layers(model)" in snippet.apply for snippet in used) else []
    helpers += [ENDS] if any("ends(model)" in snippet.apply for snippet in used) else []
    return assemble(run, "torch", [*IMPORTS, *mesh_import(run)], used, [BUILD, *helpers, FILL, BATCHES], main)


def accumulation_loop(run: RecordedRun, used: list[Snippet]) -> str:
    """Return the loop over a step's micro-batches: forward and backward, inside the snippets' contexts."""
    lines = "loss = loss_function(model(inputs), targets) / MICRO_BATCHES\nloss.backward()"
    for snippet in used:
        lines = indent_under(f"with {snippet.context}:", lines) if snippet.context else lines
    needs_last = any(snippet.before_forward or snippet.context for snippet in used)
    last = ["last = index == MICRO_BATCHES - 1"] if needs_last else []
    before_forward = [snippet.before_forward for snippet in used if snippet.before_forward]
    lines = "\n".join([*last, *before_forward, lines, "total += loss.detach()"])
    lines = indent_under("for index, (inputs, targets) in enumerate(micro_batches(step)):", lines)
    if run.layout.tp_enabled:
        lines = indent_under("with loss_parallel():  # the logits are sharded along the vocabulary", lines)
    return lines


def pipeline_script(run: RecordedRun) -> str:
    """Return the script of a pipeline, by torch.distributed.pipelining."""
    from harness.engines.torch.pipeline_parallel import MULTI_STAGE_SCHEDULES, SINGLE_STAGE_SCHEDULES

    schedule = (SINGLE_STAGE_SCHEDULES | MULTI_STAGE_SCHEDULES)[run.layout.schedule].__name__
    stages = "stages[0]" if run.layout.schedule in SINGLE_STAGE_SCHEDULES else "stages"
    checkpointing = list(snippets.checkpointing(run))
    used = [*checkpointing, snippets.optimizer(run), *snippets.clipping(run)]
    step = [
        dedented("""
            inputs, targets = (torch.cat(side) for side in zip(*micro_batches(step)))
            losses = []
            arguments = (inputs,) if stages[0].is_first else ()
            ends = {"target": targets, "losses": losses} if stages[-1].is_last else {}
            schedule.step(*arguments, **ends, return_outputs=False)
            """),
        *(snippet.after_backward for snippet in used if snippet.after_backward),
        *UPDATE,
        dedented("""
            if losses:  # only the last stage has them
                print(f"step {step} loss {torch.stack(losses).mean().item():.6f}", flush=True)
            """),
    ]
    main = [
        start(run),
        "parts = build()",
        *(indent_under("for model in parts:", snippet.apply) for snippet in checkpointing),
        "for part in parts:\n    fill(part, device)",
        dedented(f"""
            own = range(dist.get_rank(), STAGES, dist.get_world_size())
            stages = [PipelineStage(part, index, STAGES, device) for index, part in zip(own, parts, strict=True)]
            schedule = {schedule}({stages}, n_microbatches=MICRO_BATCHES, loss_fn=loss_function)
            """),
        snippets.optimizer(run).apply,
        "micro_batches = batches(device)",
        step_loop(step),
    ]
    pipelining = f"from torch.distributed.pipelining import PipelineStage, {schedule}"
    header = Snippet(imports=(pipelining,), settings=f"STAGES = {run.layout.num_stages}")
    helpers = [LAYERS] if checkpointing else []
    return assemble(run, "torch", IMPORTS, [header, *used], [BUILD_STAGES, *helpers, FILL, BATCHES], main)


def deepspeed_script(run: RecordedRun) -> str:
    """Return the script of DeepSpeed's ZeRO, with the configuration in deepspeed.json."""
    checkpointing = list(snippets.checkpointing(run))
    is_mixed = run.config.precision.is_mixed
    step = [
        dedented("""
            total = torch.zeros((), device=device)
            for inputs, targets in micro_batches(step):
                loss = loss_function(engine(inputs), targets)
                engine.backward(loss)  # divides the loss by the number of micro-batches
                engine.step()  # counts micro-batches: clips and updates after the last
                total += loss.detach() / MICRO_BATCHES
            """),
        PRINT_MEAN_LOSS,
    ]
    without_build = [
        "# Otherwise every rank compiles DeepSpeed's collective for inference, which training does not call.",
        'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False',
    ]
    main = [
        *(without_build if run.device == "cpu" else []),
        start(run).replace("dist.init_process_group", "deepspeed.init_distributed"),
        "model = build()",
        *(snippet.apply for snippet in checkpointing),
        "fill(model, device)  # whole at first; deepspeed.zero.Init is for models that do not fit",
        snippets.optimizer(run).apply,
        'engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=str(HERE / "deepspeed.json"))',
        *([MASTERS] if is_mixed else []),
        "micro_batches = batches(device)",
        step_loop(step),
    ]
    header = Snippet(
        imports=("import deepspeed", *(MASTERS_IMPORTS if is_mixed else [])),
        settings="HERE = Path(__file__).resolve().parent",
    )
    helpers = [LAYERS] if checkpointing else []
    used = [header, *checkpointing, snippets.optimizer(run)]
    return assemble(run, "DeepSpeed", IMPORTS, used, [BUILD, *helpers, FILL, BATCHES], main)


def mesh(run: RecordedRun) -> list[str]:
    """Return the line that makes the device mesh, with the axes that the layout uses; empty if it uses none."""
    layout = run.layout
    axes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    if not mesh_import(run):
        return []
    required = snippets.data_axes(layout) if layout.data_parallel == "fsdp" else ()
    names = tuple(name for name, size in axes.items() if size > 1 or name in required)
    sizes, quoted = tuple(axes[name] for name in names), str(names).replace("'", '"')
    return [f"mesh = init_device_mesh(device.type, {sizes}, mesh_dim_names={quoted})"]


def mesh_import(run: RecordedRun) -> list[str]:
    """Return the import that a device mesh needs; empty if the script needs no mesh."""
    needs_mesh = run.layout.tp_enabled or run.layout.data_parallel == "fsdp"
    return ["from torch.distributed.device_mesh import init_device_mesh"] if needs_mesh else []
