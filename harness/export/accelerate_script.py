"""train_accelerate.py: the run's layout through Accelerator.prepare, started by accelerate launch."""

from harness.export import snippets
from harness.export.assemble import assemble, step_loop
from harness.export.recorded_run import RecordedRun
from harness.export.snippets import Snippet, dedented
from harness.export.templates import BATCHES, BUILD, FILL, IMPORTS, LAYERS, MASTERS, MASTERS_IMPORTS

# The parts that differ between kinds of data parallelism: the imports and the creation of the accelerator, the lines
# after prepare(), and the lines of one step.
AccelerateParts = tuple[Snippet, list[str], str]


def train_accelerate_py(run: RecordedRun) -> str:
    """Return the script for `accelerate launch --config_file accelerate.yaml train_accelerate.py`."""
    if run.layout.uses_deepspeed_zero:
        creation, after_prepare, step = deepspeed_parts(run)
    elif run.layout.data_parallel == "fsdp":
        creation, after_prepare, step = fsdp_parts(run)
    else:
        creation, after_prepare, step = ddp_parts(run)
    checkpointing = list(snippets.checkpointing(run))
    optimizer = snippets.optimizer(run)
    main = [
        creation.apply,
        "device = accelerator.device",
        "model = build()",
        *(snippet.apply for snippet in checkpointing),
        "fill(model, device)",
        optimizer.apply,
        "model, optimizer = accelerator.prepare(model, optimizer)",
        *after_prepare,
        "micro_batches = batches(device)",
        step_loop([step, PRINT]),
    ]
    fill = FILL
    if run.layout.data_parallel == "fsdp":  # no device may have room for all parameters before they are sharded
        fill = FILL.replace("DTYPE)", 'DTYPE, storage_device=torch.device("cpu"))')
    user_part = [BUILD, *([LAYERS] if checkpointing else []), fill, BATCHES]
    header = Snippet(
        imports=("from accelerate import Accelerator", *creation.imports),
        settings=f"CLIPPING = {run.config.train.gradient_clipping}" if clips(run) else "",
    )
    return assemble(run, "Accelerate", IMPORTS, [header, *checkpointing, optimizer], user_part, main)


def clips(run: RecordedRun) -> bool:
    """Return whether the script clips gradients. DeepSpeed does it by itself, as deepspeed.json says."""
    return run.config.train.gradient_clipping > 0 and not run.layout.uses_deepspeed_zero


def ddp_parts(run: RecordedRun) -> AccelerateParts:
    """Return the parts of DistributedDataParallel."""
    options = ", ".join(f"{key}={value!r}" for key, value in sorted(run.config.strategy.ddp_options.items()))
    creation = Snippet(
        imports=("from accelerate.utils import DistributedDataParallelKwargs",),
        apply=dedented(f"""
            accelerator = Accelerator(
                cpu=not torch.cuda.is_available(),
                gradient_accumulation_steps=MICRO_BATCHES,
                kwargs_handlers=[DistributedDataParallelKwargs({options})],
            )
            """),
    )
    return creation, [], accumulate_loop(clips(run))


def deepspeed_parts(run: RecordedRun) -> AccelerateParts:
    """Return the parts of DeepSpeed's ZeRO."""
    creation = Snippet(
        imports=("from accelerate.utils import InitProcessGroupKwargs",),
        apply=dedented("""
            backend = "nccl" if torch.cuda.is_available() else "gloo"  # without it every CPU process trains alone
            accelerator = Accelerator(
                gradient_accumulation_steps=MICRO_BATCHES, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)]
            )
            """),
    )
    if not run.config.precision.is_mixed:
        return creation, [], accumulate_loop(clips=False)
    return (
        Snippet(imports=(*creation.imports, *MASTERS_IMPORTS), apply=creation.apply),
        [MASTERS.replace("engine.", "model.")],
        accumulate_loop(clips=False),
    )


def fsdp_parts(run: RecordedRun) -> AccelerateParts:
    """Return the parts of FSDP2, which Accelerate uses on GPUs only."""
    precision, reshards = run.config.precision, run.layout.zero_stage == 3
    plugin, imports = "", ["from torch.distributed.fsdp import FSDPModule"]
    without_gpu = (
        'accelerator.print("no GPU: Accelerate does not shard here, and trains plain DistributedDataParallel")'
    )
    if precision.is_mixed:
        widths = f"param_dtype=torch.{precision.compute}, reduce_dtype=torch.{precision.reduce}"
        policy = f"mixed_precision_policy=MixedPrecisionPolicy({widths})"
        plugin = f", fsdp_plugin=FullyShardedDataParallelPlugin({policy})"
        imports.append("from torch.distributed.fsdp import MixedPrecisionPolicy")
        imports.append("from accelerate.utils import FullyShardedDataParallelPlugin")
        without_gpu = 'raise SystemExit("no GPU: Accelerate would train plain DistributedDataParallel in fp32")'
    creation = Snippet(
        imports=tuple(imports), apply=f"accelerator = Accelerator(cpu=not torch.cuda.is_available(){plugin})"
    )
    after_prepare = dedented(f"""
        sharded = isinstance(model, FSDPModule)
        if sharded:
            model.set_reshard_after_forward({reshards})  # for all groups: Accelerate leaves norm and root unsharded
        else:
            {without_gpu}
        """)
    (fsdp,) = snippets.fsdp(run)
    switches = [
        "last = index == MICRO_BATCHES - 1",
        "if sharded:",
        *("    " + line for line in fsdp.before_forward.split("\n")),
    ]
    lines = [
        "total = torch.zeros((), device=device)",
        "for index, (inputs, targets) in enumerate(micro_batches(step)):",
        *("    " + line for line in (switches if fsdp.before_forward else [])),
        "    loss = loss_function(model(inputs), targets) / MICRO_BATCHES",
        "    accelerator.backward(loss)",
        "    total += loss.detach()",
        *(["accelerator.clip_grad_norm_(model.parameters(), CLIPPING)"] if clips(run) else []),
        "optimizer.step()",
        "optimizer.zero_grad()",
    ]
    return creation, [after_prepare], "\n".join(lines)


def accumulate_loop(clips: bool) -> str:
    """Return the lines of one step by Accelerate's own gradient accumulation."""
    lines = [
        "total = torch.zeros((), device=device)",
        "for inputs, targets in micro_batches(step):",
        "    with accelerator.accumulate(model):  # synchronizes and steps only in the last micro-batch",
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
