"""train_accelerate.py: the run's layout through Accelerator.prepare, for accelerate launch with accelerate.yaml."""

from harness.cost_model.buffers import ddp_options
from harness.export import snippets
from harness.export.recorded_run import RecordedRun
from harness.export.script import BATCHES, BUILD, FILL, IMPORTS, LAYERS, MASTERS, MASTERS_IMPORTS, assemble, loop
from harness.export.snippets import Snippet, dedented


def train_accelerate_py(run: RecordedRun) -> str:
    if run.layout.uses_deepspeed_zero:
        start, after, step = deepspeed_snippets(run)
    elif run.layout.data_parallel == "fsdp":
        start, after, step = fsdp_snippets(run)
    else:
        start, after, step = ddp_snippets(run)
    again = list(snippets.checkpointing(run))
    optimizer = snippets.optimizer(run)
    main = [
        start.apply,
        "device = accelerator.device",
        "model = build()",
        *(p.apply for p in again),
        "fill(model, device)",
        optimizer.apply,
        "model, optimizer = accelerator.prepare(model, optimizer)",
        *after,
        "micro_batches = batches(device)",
        *loop([step, PRINT]),
    ]
    fill = FILL
    if run.layout.data_parallel == "fsdp":  # Accelerate shards what has values, and only then is a part enough
        fill = FILL.replace("DTYPE)", 'DTYPE, kept=torch.device("cpu"))')
    own = [BUILD, *([LAYERS] if again else []), fill, BATCHES]
    stated = Snippet(
        imports=("from accelerate import Accelerator", *start.imports),
        settings=f"CLIPPING = {run.config.train.gradient_clipping}" if clips(run) else "",
    )
    imports = [line for line in IMPORTS if line != "import os"]
    return assemble(run, "Accelerate", imports, [stated, *again, optimizer], own, main)


Snippets = tuple[Snippet, list[str], str]


def clips(run: RecordedRun) -> bool:
    return run.config.train.gradient_clipping > 0 and not run.layout.uses_deepspeed_zero  # whose configuration says it


def ddp_snippets(run: RecordedRun) -> Snippets:
    options = ", ".join(f"{key}={value!r}" for key, value in sorted(ddp_options(run.config).items()))
    start = Snippet(
        imports=("from accelerate.utils import DistributedDataParallelKwargs",),
        apply=dedented(f"""
            accelerator = Accelerator(
                cpu=not torch.cuda.is_available(),
                gradient_accumulation_steps=MICRO_BATCHES,
                kwargs_handlers=[DistributedDataParallelKwargs({options})],
            )
            """),
    )
    return start, [], accumulate_loop(clips(run))


def deepspeed_snippets(run: RecordedRun) -> Snippets:
    start = Snippet(
        imports=("from accelerate.utils import InitProcessGroupKwargs",),
        apply=dedented("""
            backend = "nccl" if torch.cuda.is_available() else "gloo"  # not told, every CPU process trains alone
            accelerator = Accelerator(
                gradient_accumulation_steps=MICRO_BATCHES, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)]
            )
            """),
    )
    if not run.config.precision.is_mixed:
        return start, [], accumulate_loop(clips=False)
    return (
        Snippet(imports=(*start.imports, *MASTERS_IMPORTS), apply=start.apply),
        [MASTERS.replace("engine.", "model.")],
        accumulate_loop(clips=False),
    )


def fsdp_snippets(run: RecordedRun) -> Snippets:
    precision, full = run.config.precision, run.layout.zero_stage == 3
    plugin, imports = "", ["from torch.distributed.fsdp import FSDPModule"]
    alone = 'accelerator.print("no GPU: Accelerate does not shard here, and trains plain DistributedDataParallel")'
    if precision.is_mixed:
        widths = f"param_dtype=torch.{precision.compute}, reduce_dtype=torch.{precision.reduce}"
        policy = f"mixed_precision_policy=MixedPrecisionPolicy({widths})"
        plugin = f", fsdp_plugin=FullyShardedDataParallelPlugin({policy})"
        imports.append("from torch.distributed.fsdp import MixedPrecisionPolicy")
        imports.append("from accelerate.utils import FullyShardedDataParallelPlugin")
        alone = 'raise SystemExit("no GPU: Accelerate would train plain DistributedDataParallel in fp32")'
    start = Snippet(
        imports=tuple(imports), apply=f"accelerator = Accelerator(cpu=not torch.cuda.is_available(){plugin})"
    )
    after = dedented(f"""
        sharded = isinstance(model, FSDPModule)
        if sharded:
            model.set_reshard_after_forward({full})  # of all groups: Accelerate leaves norm and root gathered
        else:
            {alone}
        """)
    (piece,) = snippets.fsdp(run)
    switches = [
        "last = index == MICRO_BATCHES - 1",
        "if sharded:",
        *("    " + line for line in piece.before.split("\n")),
    ]
    lines = [
        "total = torch.zeros((), device=device)",
        "for index, (inputs, targets) in enumerate(micro_batches(step)):",
        *("    " + line for line in (switches if piece.before else [])),
        "    loss = loss_function(model(inputs), targets) / MICRO_BATCHES",
        "    accelerator.backward(loss)",
        "    total += loss.detach()",
        *(["accelerator.clip_grad_norm_(model.parameters(), CLIPPING)"] if clips(run) else []),
        "optimizer.step()",
        "optimizer.zero_grad()",
    ]
    return start, [after], "\n".join(lines)


def accumulate_loop(clips: bool) -> str:
    """Accelerate's own way of several micro-batches a step."""
    lines = [
        "total = torch.zeros((), device=device)",
        "for inputs, targets in micro_batches(step):",
        "    with accelerator.accumulate(model):  # synchronises and steps in the last of them",
        "        loss = loss_function(model(inputs), targets)",
        "        accelerator.backward(loss)",
    ]
    if clips:
        lines += [
            "        if accelerator.sync_gradients:",
            "            accelerator.clip_grad_norm_(model.parameters(), CLIPPING)",
        ]
    lines += [
        "        optimizer.step()",
        "        optimizer.zero_grad()",
        "    total += loss.detach() / MICRO_BATCHES",
    ]
    return "\n".join(lines)


PRINT = dedented("""
    mean = accelerator.reduce(total, "mean")
    accelerator.print(f"step {step} loss {mean.item():.6f}", flush=True)
    """)
