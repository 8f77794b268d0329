"""Snippets of training scripts: the imports and lines that each parallelism needs in each part of a script.

They are joined in the order in which the torch engine applies them: tensor parallel, checkpointing, sharding, initial
values, wrapping.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

from harness.export.recorded_run import RecordedRun
from harness.layout.layout import Layout


@dataclass(frozen=True)
class Snippet:
    """Lines for the parts of a script; the lines of main() are not indented."""

    imports: tuple[str, ...] = ()
    settings: str = ""  # constants at the top
    functions: str = ""  # above main()
    apply: str = ""  # in main(), between the model and its optimizer
    context: str = ""  # a context manager for the forward and backward of a micro-batch
    before_forward: str = ""  # before the forward of a micro-batch
    after_backward: str = ""  # after the last backward of a step


def dedented(lines: str) -> str:
    """Return lines without their common indentation and without empty lines around them."""
    return dedent(lines).strip("\n")


def checkpointing(run: RecordedRun) -> Iterator[Snippet]:
    """Yield the lines that recompute decoder layers in backward (arXiv 1604.06174)."""
    every = run.config.checkpointing.every
    if run.config.checkpointing.name == "none":
        return
    layers = "layers(model)" if every == 1 else f"layers(model)[{every - 1}::{every}]"
    yield Snippet(
        imports=("import functools", "from torch.utils.checkpoint import checkpoint"),
        apply=dedented(f"""
            for layer in {layers}:  # keeps only its input, and runs again in backward
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            """),
    )


def tensor_parallel(run: RecordedRun) -> Iterator[Snippet]:
    """Yield Megatron-LM's tensor parallelism (arXiv 1909.08053), and sequence parallelism (arXiv 2205.05198)."""
    if not run.layout.tp_enabled:
        return
    sequence_parallel = run.layout.sequence_parallel
    gate = "" if run.config.model.architecture.learned_positions else '"mlp.gate_proj": ColwiseParallel(), '
    rotary = "," if run.config.model.architecture.learned_positions else ", None, None"
    outside = (
        "Shard(1)  # between sharded matrices each rank has a part of the sequence"
        if sequence_parallel
        else "Replicate()"
    )
    norms = dedented("""
        PLAN |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        ENDS |= {"norm": SequenceParallel()}
        """)
    styles = "ColwiseParallel, PrepareModuleInput, RowwiseParallel" + (
        ", SequenceParallel" if sequence_parallel else ""
    )
    yield Snippet(
        imports=(
            f"from torch.distributed.tensor import DTensor, Replicate{', Shard' if sequence_parallel else ''}",
            f"from torch.distributed.tensor.parallel import {styles}, loss_parallel, parallelize_module",
        ),
        settings=dedented(f"""
            OUTSIDE = {outside}
            # For every layer. Each pair of a column and a row style costs one all-reduce forward and one backward.
            PLAN = {{
                "self_attn": PrepareModuleInput(
                    input_layouts=(OUTSIDE{rotary}), desired_input_layouts=(Replicate(){rotary})
                ),
                "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(output_layouts=OUTSIDE),
                "mlp": PrepareModuleInput(input_layouts=(OUTSIDE,), desired_input_layouts=(Replicate(),)),
                {gate}"mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=OUTSIDE),
            }}
            ENDS = {{
                "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=OUTSIDE),
                "lm_head": ColwiseParallel(input_layouts=OUTSIDE, use_local_output=False),  # the logits stay sharded
            }}
            """)
        + ("\n" + norms if sequence_parallel else ""),
        apply=dedented("""
            for layer in layers(model):
                parallelize_module(layer, mesh["tp"], PLAN)
            parallelize_module(model, mesh["tp"], ENDS)
            """),
        after_backward=dedented("""
            for parameter in model.parameters():  # norms saw a part of the sequence: sum their gradients over ranks
                if any(part.is_partial() for part in getattr(parameter.grad, "placements", ())):
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            """)
        if sequence_parallel
        else "",
    )


def fsdp(run: RecordedRun) -> Iterator[Snippet]:
    """Yield fully_shard (FSDP2) over the data-parallel ranks, as full, hybrid, gradient-only or no sharding."""
    layout, precision = run.layout, run.config.precision
    if layout.data_parallel != "fsdp":
        return
    has_replicas = len(data_axes(layout)) > 1
    mesh = 'mesh["dp_replicate", "dp_shard"]  # replicas of the shards' if has_replicas else 'mesh["dp_shard"]'
    policy = ""
    if precision.is_mixed:
        policy = f"param_dtype=torch.{precision.compute}, reduce_dtype=torch.{precision.reduce}"
    switches = ["model.set_requires_all_reduce(last)  # replicas synchronize once a step"] if has_replicas else []
    if layout.zero_stage < 3:
        switches.append("model.set_reshard_after_backward(last)  # parameters stay unsharded for the whole step")
    switches.append("model.set_is_last_backward(last)")
    yield Snippet(
        imports=("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",),
        apply=dedented(f"""
            data = {mesh}
            policy = MixedPrecisionPolicy({policy})
            for group in [*layers(model), *ends(model), model]:  # the root too: alone it would stay unsharded
                fully_shard(group, mesh=data, mp_policy=policy, reshard_after_forward={layout.zero_stage == 3})
            """),
        before_forward="\n".join(switches) if run.micro_batches > 1 else "",
    )


def data_axes(layout: Layout) -> tuple[str, ...]:
    """Return the axes of the mesh for fully_shard: two if shards are replicated."""
    has_replicas = layout.dp_replicate > 1 or layout.zero_stage == 0
    return ("dp_replicate", "dp_shard") if has_replicas else ("dp_shard",)


def ddp(run: RecordedRun) -> Iterator[Snippet]:
    """Yield DistributedDataParallel, which wraps a model that has its initial values."""
    if run.layout.data_parallel != "ddp":
        return
    options = "".join(f", {key}={value!r}" for key, value in sorted(run.config.strategy.ddp_options.items()))
    yield Snippet(
        imports=("from contextlib import nullcontext", "from torch.nn.parallel import DistributedDataParallel"),
        apply=f"model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None{options})",
        context="nullcontext() if last else model.no_sync()" if run.micro_batches > 1 else "",
    )


def optimizer(run: RecordedRun) -> Snippet:
    """Return the optimizer: torch's AdamW, sharded by ZeroRedundancyOptimizer if the layout is."""
    train = run.config.train
    settings = (
        f"lr={train.lr!r}, betas={train.betas!r}, eps={train.eps!r}, weight_decay={train.weight_decay!r},"
        f" fused={train.fused_optimizer}"
    )
    if run.layout.partitions_by_parameter:
        return Snippet(
            imports=("from torch.distributed.optim import ZeroRedundancyOptimizer",),
            settings=f"ADAMW = dict({settings})",
            apply="optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)",
        )
    lines = "optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)"
    if run.layout.tp_enabled:
        lines = dedented("""
            groups = {}  # one fused kernel takes plain tensors, or DTensors of one mesh
            for parameter in model.parameters():
                groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
            optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], **ADAMW)
            """)
    elif run.layout.pp_enabled:
        lines = "optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], **ADAMW)"
    return Snippet(settings=f"ADAMW = dict({settings})", apply=lines)


def clipping(run: RecordedRun) -> Iterator[Snippet]:
    """Yield gradient clipping by the global norm."""
    layout, max_norm = run.layout, run.config.train.gradient_clipping
    if not max_norm:
        return
    if not layout.tp_enabled and not layout.pp_enabled:
        yield Snippet(
            settings=f"CLIPPING = {max_norm}",
            after_backward="torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)",
        )
        return
    full_norm = "norm.full_tensor() if isinstance(norm, DTensor) else norm" if layout.tp_enabled else "norm"
    sum_stages = "    dist.all_reduce(square)  # over the pipeline stages\n" if layout.pp_enabled else ""
    parameters = "model.parameters()" if not layout.pp_enabled else "[p for part in parts for p in part.parameters()]"
    yield Snippet(
        settings=f"CLIPPING = {max_norm}",
        functions=(
            "def clip(parameters):\n"
            '    """Clip by the norm over all ranks; torch\'s own takes tensors of one mesh and stage."""\n'
            "    gradients = [parameter.grad for parameter in parameters]\n"
            "    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]\n"
            f"    square = torch.stack([{full_norm} for norm in norms]).square().sum()\n"
            f"{sum_stages}"
            "    for gradient in gradients:\n"
            "        gradient.mul_((CLIPPING / (square.sqrt() + 1e-6)).clamp(max=1.0).item())"
        ),
        after_backward=f"clip({parameters})",
    )
