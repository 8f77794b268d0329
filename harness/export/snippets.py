"""Text of a training script, piece by piece: each parallelism brings its imports and the lines it needs in each place.

Pieces are joined in the order in which the torch engine applies them: cut, checkpoint, shard, fill, wrap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

from harness.cost_model.buffers import ddp_options
from harness.export.recorded_run import RecordedRun
from harness.layout.layout import Layout


@dataclass(frozen=True)
class Snippet:
    """Lines for the places of a script; the lines of main() without their indentation."""

    imports: tuple[str, ...] = ()
    settings: str = ""  # constants at the top
    functions: str = ""  # above main()
    apply: str = ""  # in main(), between the model and its optimizer
    around: str = ""  # a context of a micro-batch's forward and backward
    before: str = ""  # before a micro-batch's forward
    gradients: str = ""  # after the last backward


def dedented(lines: str) -> str:
    return dedent(lines).strip("\n")


def checkpointing(run: RecordedRun) -> Iterator[Snippet]:
    every = run.config.checkpointing.every
    if run.config.checkpointing.name == "none":
        return
    which = "layers(model)" if every == 1 else f"layers(model)[{every - 1}::{every}]"
    yield Snippet(
        imports=("import functools", "from torch.utils.checkpoint import checkpoint"),
        apply=dedented(f"""
            for layer in {which}:  # keeps its input alone, and runs again in backward
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            """),
    )


def tensor_parallel(run: RecordedRun) -> Iterator[Snippet]:
    """Megatron-LM's cuts (arXiv 1909.08053), and with sequence parallelism (arXiv 2205.05198) what lies between."""
    if run.layout.tp == 1:
        return
    sequence = run.layout.sequence_parallel
    gate = "" if run.config.model.architecture.learned_positions else '"mlp.gate_proj": ColwiseParallel(), '
    rotary = "," if run.config.model.architecture.learned_positions else ", None, None"
    outside = "Shard(1)  # between cut matrices each rank has a part of the sequence" if sequence else "Replicate()"
    norms = dedented("""
        PLAN |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        ENDS |= {"norm": SequenceParallel()}
        """)
    styles = "ColwiseParallel, PrepareModuleInput, RowwiseParallel" + (", SequenceParallel" if sequence else "")
    yield Snippet(
        imports=(
            f"from torch.distributed.tensor import DTensor, Replicate{', Shard' if sequence else ''}",
            f"from torch.distributed.tensor.parallel import {styles}, loss_parallel, parallelize_module",
        ),
        settings=dedented(f"""
            OUTSIDE = {outside}
            # Of every layer; each pair of column and row is one sum over the ranks forward, and one backward.
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
                "lm_head": ColwiseParallel(input_layouts=OUTSIDE, use_local_output=False),  # logits stay cut
            }}
            """)
        + ("\n" + norms if sequence else ""),
        apply=dedented("""
            for layer in layers(model):
                parallelize_module(layer, mesh["tp"], PLAN)
            parallelize_module(model, mesh["tp"], ENDS)
            """),
        gradients=dedented("""
            for parameter in model.parameters():  # a norm saw its part of the sequence: the ranks' gradients add up
                if any(part.is_partial() for part in getattr(parameter.grad, "placements", ())):
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            """)
        if sequence
        else "",
    )


def fsdp(run: RecordedRun) -> Iterator[Snippet]:
    layout, precision = run.layout, run.config.precision
    if layout.data_parallel != "fsdp":
        return
    two = len(data_axes(layout)) > 1
    mesh = 'mesh["dp_replicate", "dp_shard"]  # copies of shards' if two else 'mesh["dp_shard"]'
    policy = ""
    if precision.is_mixed:
        policy = f"param_dtype=torch.{precision.compute}, reduce_dtype=torch.{precision.reduce}"
    between = ["model.set_requires_all_reduce(last)  # copies synchronise once a step"] if two else []
    if layout.zero_stage < 3:
        between.append("model.set_reshard_after_backward(last)  # parameters stay gathered for the whole step")
    between.append("model.set_is_last_backward(last)")
    yield Snippet(
        imports=("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",),
        apply=dedented(f"""
            data = {mesh}
            policy = MixedPrecisionPolicy({policy})
            for group in [*layers(model), *ends(model), model]:  # the root too: by itself it would stay gathered
                fully_shard(group, mesh=data, mp_policy=policy, reshard_after_forward={layout.zero_stage == 3})
            """),
        before="\n".join(between) if run.micro_batches > 1 else "",
    )


def data_axes(layout: Layout) -> tuple[str, ...]:
    """Of the mesh that fully_shard is given: with copies of shards it has two."""
    two = layout.dp_replicate > 1 or layout.zero_stage == 0
    return ("dp_replicate", "dp_shard") if two else ("dp_shard",)


def ddp(run: RecordedRun) -> Iterator[Snippet]:
    """DistributedDataParallel, which wraps what is filled."""
    if run.layout.data_parallel != "ddp":
        return
    options = "".join(f", {key}={value!r}" for key, value in sorted(ddp_options(run.config).items()))
    yield Snippet(
        imports=("from contextlib import nullcontext", "from torch.nn.parallel import DistributedDataParallel"),
        apply=f"model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None{options})",
        around="nullcontext() if last else model.no_sync()" if run.micro_batches > 1 else "",
    )


def optimizer(run: RecordedRun) -> Snippet:
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
    if run.layout.tp > 1:
        lines = dedented("""
            groups = {}  # one kernel takes plain tensors, or those of one mesh
            for parameter in model.parameters():
                groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
            optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], **ADAMW)
            """)
    elif run.layout.pp > 1:
        lines = "optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], **ADAMW)"
    return Snippet(settings=f"ADAMW = dict({settings})", apply=lines)


def clipping(run: RecordedRun) -> Iterator[Snippet]:
    layout, most = run.layout, run.config.train.gradient_clipping
    if not most:
        return
    if layout.tp == layout.pp == 1:
        yield Snippet(
            settings=f"CLIPPING = {most}", gradients="torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)"
        )
        return
    whole = "norm.full_tensor() if isinstance(norm, DTensor) else norm" if layout.tp > 1 else "norm"
    every = "    dist.all_reduce(square)  # every stage has its part\n" if layout.pp > 1 else ""
    parameters = "model.parameters()" if layout.pp == 1 else "[p for part in parts for p in part.parameters()]"
    yield Snippet(
        settings=f"CLIPPING = {most}",
        functions=(
            "def clip(parameters):\n"
            '    """By the norm over all ranks; torch\'s own takes the tensors of one mesh, and of one stage."""\n'
            "    gradients = [parameter.grad for parameter in parameters]\n"
            "    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]\n"
            f"    square = torch.stack([{whole} for norm in norms]).square().sum()\n"
            f"{every}"
            "    for gradient in gradients:\n"
            "        gradient.mul_((CLIPPING / (square.sqrt() + 1e-6)).clamp(max=1.0).item())"
        ),
        gradients=f"clip({parameters})",
    )
