"""train.py: the run's layout in plain calls of its library, around a model that is clearly the user's to change."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent

from harness.export import pieces
from harness.export.pieces import Piece, text
from harness.export.run import Recorded

LINE = "# " + "-" * 117


def train_py(run: Recorded) -> str:
    if run.layout.zero_by_deepspeed:
        return deepspeed_script(run)
    return pipeline_script(run) if run.layout.pp > 1 else torch_script(run)


def torch_script(run: Recorded) -> str:
    """Every rank has the whole depth."""
    before = [*pieces.tensor_parallel(run), *pieces.checkpointing(run), *pieces.fully_shard(run)]
    after = [*pieces.copies(run), pieces.optimizer(run), *pieces.clipping(run)]
    used = [*before, *after]
    passes = "loss = loss_function(model(inputs), targets) / MICRO_BATCHES\nloss.backward()"
    for piece in used:
        passes = inside(f"with {piece.around}:", passes) if piece.around else passes
    knows_last = ["last = index == MICRO_BATCHES - 1"] if any(p.before or p.around for p in used) else []
    passes = "\n".join([*knows_last, *(p.before for p in used if p.before), passes, "total += loss.detach()"])
    passes = inside("for index, (inputs, targets) in enumerate(micro_batches(step)):", passes)
    if run.layout.tp > 1:
        passes = inside("with loss_parallel():  # over logits cut along the vocabulary", passes)
    step = [
        "total = torch.zeros((), device=device)",
        passes,
        *(p.gradients for p in used if p.gradients),
        "optimizer.step()",
        "optimizer.zero_grad()",
        text("""
            dist.all_reduce(total)  # for the mean over ranks
            if dist.get_rank() == 0:
                print(f"step {step} loss {total.item() / dist.get_world_size():.6f}", flush=True)
            """),
    ]
    main = [start(run), *mesh(run), "model = build()", *(p.apply for p in before), "fill(model, device)"]
    main += [*(p.apply for p in after if p.apply), "micro_batches = batches(device)", *loop(step)]
    helpers = [LAYERS] if any("layers(model)" in p.apply for p in used) else []
    helpers += [ENDS] if any("ends(model)" in p.apply for p in used) else []
    return assemble(run, "torch", [*IMPORTS, *mesh_import(run)], used, [BUILD, *helpers, FILL, BATCHES], main)


def pipeline_script(run: Recorded) -> str:
    """Stages of the depth, by torch.distributed.pipelining."""
    from harness.engines.torch.pipeline import LOOPED, SINGLE

    schedule = (SINGLE | LOOPED)[run.layout.schedule].__name__
    stages = "stages[0]" if run.layout.schedule in SINGLE else "stages"
    used = [*pieces.checkpointing(run), pieces.optimizer(run), *pieces.clipping(run)]
    again = [inside("for model in parts:", p.apply) for p in pieces.checkpointing(run)]
    step = [
        text("""
            inputs, targets = (torch.cat(side) for side in zip(*micro_batches(step)))
            losses = []
            given = (inputs,) if stages[0].is_first else ()
            ends = {"target": targets, "losses": losses} if stages[-1].is_last else {}
            schedule.step(*given, **ends, return_outputs=False)
            """),
        *(p.gradients for p in used if p.gradients),
        "optimizer.step()",
        "optimizer.zero_grad()",
        text("""
            if losses:  # the last stage has them
                print(f"step {step} loss {torch.stack(losses).mean().item():.6f}", flush=True)
            """),
    ]
    main = [
        start(run),
        "parts = build()",
        *again,
        "for part in parts:\n    fill(part, device)",
        text(f"""
            own = range(dist.get_rank(), STAGES, dist.get_world_size())
            stages = [PipelineStage(part, index, STAGES, device) for index, part in zip(own, parts, strict=True)]
            schedule = {schedule}({stages}, n_microbatches=MICRO_BATCHES, loss_fn=loss_function)
            """),
        pieces.optimizer(run).apply,
        "micro_batches = batches(device)",
        *loop(step),
    ]
    pipelining = f"from torch.distributed.pipelining import PipelineStage, {schedule}"
    stated = Piece(imports=(pipelining,), settings=f"STAGES = {run.layout.stages}")
    helpers = [LAYERS] if again else []
    return assemble(run, "torch", IMPORTS, [stated, *used], [BUILD_STAGES, *helpers, FILL, BATCHES], main)


def deepspeed_script(run: Recorded) -> str:
    again = list(pieces.checkpointing(run))
    mixed = run.config.precision.mixed
    step = [
        text("""
            total = torch.zeros((), device=device)
            for inputs, targets in micro_batches(step):
                loss = loss_function(engine(inputs), targets)
                engine.backward(loss)  # divides by their number
                engine.step()  # counts them: clips and updates after the last
                total += loss.detach() / MICRO_BATCHES
            dist.all_reduce(total)  # for the mean over ranks
            if dist.get_rank() == 0:
                print(f"step {step} loss {total.item() / dist.get_world_size():.6f}", flush=True)
            """),
    ]
    main = [
        start(run).replace("dist.init_process_group", "deepspeed.init_distributed"),
        "model = build()",
        *(p.apply for p in again),
        "fill(model, device)  # whole at first; deepspeed.zero.Init is for models that do not fit",
        pieces.optimizer(run).apply,
        'engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=str(HERE / "deepspeed.json"))',
        *([MASTERS] if mixed else []),
        "micro_batches = batches(device)",
        *loop(step),
    ]
    stated = Piece(
        imports=("import deepspeed", *(MASTERS_IMPORTS if mixed else [])),
        settings="HERE = Path(__file__).resolve().parent",
    )
    helpers = [LAYERS] if again else []
    used = [stated, *again, pieces.optimizer(run)]
    return assemble(run, "DeepSpeed", IMPORTS, used, [BUILD, *helpers, FILL, BATCHES], main)


def mesh(run: Recorded) -> list[str]:
    layout = run.layout
    axes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    if not mesh_import(run):
        return []
    wanted = pieces.data_axes(layout) if layout.data_parallel == "fsdp" else ()
    names = tuple(name for name, size in axes.items() if size > 1 or name in wanted)
    sizes, quoted = tuple(axes[name] for name in names), str(names).replace("'", '"')
    return [f"mesh = init_device_mesh(device.type, {sizes}, mesh_dim_names={quoted})"]


def mesh_import(run: Recorded) -> list[str]:
    needs = run.layout.tp > 1 or run.layout.data_parallel == "fsdp"
    return ["from torch.distributed.device_mesh import init_device_mesh"] if needs else []


def inside(opening: str, lines: str) -> str:
    return f"{opening}\n{indent(lines, ' ' * 4)}"


def loop(step: Iterable[str]) -> list[str]:
    return [inside("for step in range(STEPS):", "\n".join(step))]


def assemble(
    run: Recorded, library: str, imports: Iterable[str], used: Iterable[Piece], own: Iterable[str], main: Iterable[str]
) -> str:
    """The whole script, in its fixed order."""
    used = list(used)
    train, layout = run.config.train, run.layout
    lines = dict.fromkeys([*imports, *(line for piece in used for line in piece.imports)])
    settings = dict.fromkeys(
        [
            f"STEPS = {train.all_steps}",
            f"MICRO_BATCHES = {run.micro_batches}  # a step and rank: {train.global_batch} sequences in batches of"
            f" {train.micro_batch} over {layout.dp} data-parallel ranks",
            *(piece.settings for piece in used if piece.settings),
        ]
    )
    parts = [
        header(run, library),
        in_order(lines),
        "\n".join(settings),
        f"{LINE}\n# Yours: the model and its data. As it stands they are the run's, so that losses can be compared.",
        OWN_IMPORTS.format(stages=STAGES_IMPORT if layout.pp > 1 else "", run=where(run)),
        "\n\n\n".join(own).replace("DTYPE", start_width(run)),
        LINE,
        *(piece.functions for piece in used if piece.functions),
        inside("def main():", "\n".join(main)),
        END,
    ]
    return "\n\n".join(parts[:5]) + "\n\n\n" + "\n\n\n".join(parts[5:]) + "\n"


def in_order(imports: Iterable[str]) -> str:
    """The standard library's before others; modules before names from them."""

    def place(line: str) -> tuple[bool, bool, str]:
        return line.split()[1].split(".")[0] not in sys.stdlib_module_names, line.startswith("from"), line

    ordered = sorted(imports, key=place)
    standard = [line for line in ordered if not place(line)[0]]
    return "\n".join([*standard, "", *ordered[len(standard) :]])


def header(run: Recorded, library: str) -> str:
    config = run.config
    return (
        f'"""{config.strategy.name} in plain {library}: {run.layout.world_size} ranks, {config.precision.name},'
        f" checkpointing {config.checkpointing.name}.\n\nMade from the run {run.directory.name}; prints every"
        ' step\'s loss, to be held against its steps.jsonl.\n"""'
    )


def where(run: Recorded) -> str:
    if run.target == run.directory / "export":
        return "Path(__file__).resolve().parents[1]"
    return f"Path({os.fspath(Path(run.directory))!r})"


def start_width(run: Recorded) -> str:
    """What parameters are filled in: the masters' width where the library makes 16-bit copies of them."""
    return f"torch.{run.config.precision.master}"


IMPORTS = ["import os", "from pathlib import Path", "import torch", "import torch.distributed as dist"]
STAGES_IMPORT = "from harness.placement import stages_of_rank\n"
OWN_IMPORTS = """from harness import job
from harness.data import Batches
from harness.model import build_model, loss_function
from harness.weights import materialise
{stages}
RUN = job.read({run})"""
BUILD = text('''
    def build():
        """The model without memory: parameters get it when they are cut."""
        return build_model(RUN.config.model)
    ''')
BUILD_STAGES = text('''
    def build():
        """This rank's stages of the depth, without memory; inside they take and return hidden states."""
        stages = stages_of_rank(RUN.config.model, RUN.layout, dist.get_rank())
        return [build_model(RUN.config.model, stage) for stage in stages]
    ''')
LAYERS = text('''
    def layers(model):
        """The decoder layers in their order."""
        return list(model.blocks().values())
    ''')
ENDS = text('''
    def ends(model):
        """What is gathered at once beside the layers: embeddings, and norm with head; tied they are the root's."""
        return model.ends() if len(model.ends()) > 1 else []
    ''')
FILL = text('''
    def fill(model, device):
        """Initial values, of a cut parameter this rank's part; a checkpoint's would go here."""
        materialise(model, RUN.config.model, RUN.config.train.seed, device, DTYPE)
    ''')
BATCHES = text('''
    def batches(device):
        """By step the micro-batches of this rank: (inputs, targets), token ids of (batch, sequence)."""
        return Batches(RUN.corpus, RUN.config, RUN.layout, dist.get_rank(), device)
    ''')
MASTERS_IMPORTS = ("from deepspeed.utils import safe_set_full_fp32_param", "from harness.weights import initial_value")
MASTERS = text("""
    for name, parameter in engine.module.named_parameters():  # DeepSpeed made its fp32 masters of rounded weights
        shape = getattr(parameter, "ds_shape", parameter.shape)
        value = initial_value(name, shape, RUN.config.model, RUN.config.train.seed, device)
        safe_set_full_fp32_param(parameter, value)
    """)
END = text("""
    if __name__ == "__main__":
        main()
        dist.destroy_process_group()  # when the model is gone: a DistributedDataParallel that outlives it can hang
    """)
START = text("""
    on_gpu = {on_gpu}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    """)


def start(run: Recorded) -> str:
    """On the run's kind of device: another's random weights are others."""
    found = "torch.cuda.is_available()"
    return START.format(
        on_gpu=found if run.device == "cuda" else f"False  # as in the run; {found} where there are GPUs"
    )
