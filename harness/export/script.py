"""train.py: the run's layout in plain calls of its library, around a model that is clearly the user's to change."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent

from harness.export import snippets
from harness.export.recorded_run import RecordedRun
from harness.export.snippets import Snippet, dedented

LINE = "# " + "-" * 117


def train_py(run: RecordedRun) -> str:
    if run.layout.uses_deepspeed_zero:
        return deepspeed_script(run)
    return pipeline_script(run) if run.layout.pp > 1 else torch_script(run)


def torch_script(run: RecordedRun) -> str:
    """Every rank has the whole depth."""
    before = [*snippets.tensor_parallel(run), *snippets.checkpointing(run), *snippets.fsdp(run)]
    after = [*snippets.ddp(run), snippets.optimizer(run), *snippets.clipping(run)]
    used = [*before, *after]
    passes = "loss = loss_function(model(inputs), targets) / MICRO_BATCHES\nloss.backward()"
    for piece in used:
        passes = indent_under(f"with {piece.around}:", passes) if piece.around else passes
    knows_last = ["last = index == MICRO_BATCHES - 1"] if any(p.before or p.around for p in used) else []
    passes = "\n".join([*knows_last, *(p.before for p in used if p.before), passes, "total += loss.detach()"])
    passes = indent_under("for index, (inputs, targets) in enumerate(micro_batches(step)):", passes)
    if run.layout.tp > 1:
        passes = indent_under("with loss_parallel():  # over logits cut along the vocabulary", passes)
    step = [
        "total = torch.zeros((), device=device)",
        passes,
        *(p.gradients for p in used if p.gradients),
        "optimizer.step()",
        "optimizer.zero_grad()",
        dedented("""
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


def pipeline_script(run: RecordedRun) -> str:
    """Stages of the depth, by torch.distributed.pipelining."""
    from harness.engines.torch.pipeline_parallel import MULTI_STAGE_SCHEDULES, SINGLE_STAGE_SCHEDULES

    schedule = (SINGLE_STAGE_SCHEDULES | MULTI_STAGE_SCHEDULES)[run.layout.schedule].__name__
    stages = "stages[0]" if run.layout.schedule in SINGLE_STAGE_SCHEDULES else "stages"
    used = [*snippets.checkpointing(run), snippets.optimizer(run), *snippets.clipping(run)]
    again = [indent_under("for model in parts:", p.apply) for p in snippets.checkpointing(run)]
    step = [
        dedented("""
            inputs, targets = (torch.cat(side) for side in zip(*micro_batches(step)))
            losses = []
            given = (inputs,) if stages[0].is_first else ()
            ends = {"target": targets, "losses": losses} if stages[-1].is_last else {}
            schedule.step(*given, **ends, return_outputs=False)
            """),
        *(p.gradients for p in used if p.gradients),
        "optimizer.step()",
        "optimizer.zero_grad()",
        dedented("""
            if losses:  # the last stage has them
                print(f"step {step} loss {torch.stack(losses).mean().item():.6f}", flush=True)
            """),
    ]
    main = [
        start(run),
        "parts = build()",
        *again,
        "for part in parts:\n    fill(part, device)",
        dedented(f"""
            own = range(dist.get_rank(), STAGES, dist.get_world_size())
            stages = [PipelineStage(part, index, STAGES, device) for index, part in zip(own, parts, strict=True)]
            schedule = {schedule}({stages}, n_microbatches=MICRO_BATCHES, loss_fn=loss_function)
            """),
        snippets.optimizer(run).apply,
        "micro_batches = batches(device)",
        *loop(step),
    ]
    pipelining = f"from torch.distributed.pipelining import PipelineStage, {schedule}"
    stated = Snippet(imports=(pipelining,), settings=f"STAGES = {run.layout.num_stages}")
    helpers = [LAYERS] if again else []
    return assemble(run, "torch", IMPORTS, [stated, *used], [BUILD_STAGES, *helpers, FILL, BATCHES], main)


def deepspeed_script(run: RecordedRun) -> str:
    again = list(snippets.checkpointing(run))
    mixed = run.config.precision.is_mixed
    step = [
        dedented("""
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
        snippets.optimizer(run).apply,
        'engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=str(HERE / "deepspeed.json"))',
        *([MASTERS] if mixed else []),
        "micro_batches = batches(device)",
        *loop(step),
    ]
    stated = Snippet(
        imports=("import deepspeed", *(MASTERS_IMPORTS if mixed else [])),
        settings="HERE = Path(__file__).resolve().parent",
    )
    helpers = [LAYERS] if again else []
    used = [stated, *again, snippets.optimizer(run)]
    return assemble(run, "DeepSpeed", IMPORTS, used, [BUILD, *helpers, FILL, BATCHES], main)


def mesh(run: RecordedRun) -> list[str]:
    layout = run.layout
    axes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    if not mesh_import(run):
        return []
    wanted = snippets.data_axes(layout) if layout.data_parallel == "fsdp" else ()
    names = tuple(name for name, size in axes.items() if size > 1 or name in wanted)
    sizes, quoted = tuple(axes[name] for name in names), str(names).replace("'", '"')
    return [f"mesh = init_device_mesh(device.type, {sizes}, mesh_dim_names={quoted})"]


def mesh_import(run: RecordedRun) -> list[str]:
    needs = run.layout.tp > 1 or run.layout.data_parallel == "fsdp"
    return ["from torch.distributed.device_mesh import init_device_mesh"] if needs else []


def indent_under(opening: str, lines: str) -> str:
    return f"{opening}\n{indent(lines, ' ' * 4)}"


def loop(step: Iterable[str]) -> list[str]:
    return [indent_under("for step in range(STEPS):", "\n".join(step))]


def assemble(
    run: RecordedRun,
    library: str,
    imports: Iterable[str],
    used: Iterable[Snippet],
    own: Iterable[str],
    main: Iterable[str],
) -> str:
    """The whole script, in its fixed order."""
    used = list(used)
    train, layout = run.config.train, run.layout
    lines = dict.fromkeys([*imports, *(line for piece in used for line in piece.imports)])
    settings = dict.fromkeys(
        [
            f"STEPS = {train.total_steps}",
            f"MICRO_BATCHES = {run.micro_batches}  # a step and rank: {train.global_batch} sequences in batches of"
            f" {train.micro_batch} over {layout.dp} data-parallel ranks",
            *(piece.settings for piece in used if piece.settings),
        ]
    )
    parts = [
        header(run, library),
        sorted_imports(lines),
        "\n".join(settings),
        f"{LINE}\n# Yours: the model and its data. As it stands they are the run's, so that losses can be compared.",
        OWN_IMPORTS.format(stages=STAGES_IMPORT if layout.pp > 1 else "", run=run_folder_expression(run)),
        "\n\n\n".join(own).replace("DTYPE", init_dtype(run)),
        LINE,
        *(piece.functions for piece in used if piece.functions),
        indent_under("def main():", "\n".join(main)),
        END,
    ]
    return "\n\n".join(parts[:5]) + "\n\n\n" + "\n\n\n".join(parts[5:]) + "\n"


def sorted_imports(imports: Iterable[str]) -> str:
    """The standard library's before others; modules before names from them."""

    def place(line: str) -> tuple[bool, bool, str]:
        return line.split()[1].split(".")[0] not in sys.stdlib_module_names, line.startswith("from"), line

    ordered = sorted(imports, key=place)
    standard = [line for line in ordered if not place(line)[0]]
    return "\n".join([*standard, "", *ordered[len(standard) :]])


def header(run: RecordedRun, library: str) -> str:
    config = run.config
    return (
        f'"""{config.strategy.name} in plain {library}: {run.layout.world_size} ranks, {config.precision.name},'
        f" checkpointing {config.checkpointing.name}.\n\nMade from the run {run.directory.name}; prints every"
        ' step\'s loss, to be held against its steps.jsonl.\n"""'
    )


def run_folder_expression(run: RecordedRun) -> str:
    if run.target == run.directory / "export":
        return "Path(__file__).resolve().parents[1]"
    return f"Path({os.fspath(Path(run.directory))!r})"


def init_dtype(run: RecordedRun) -> str:
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

BUILD = dedented('''
    def build():
        """The model without memory: parameters get it when they are cut."""
        return build_model(RUN.config.model)
    ''')

BUILD_STAGES = dedented('''
    def build():
        """This rank's stages of the depth, without memory; inside they take and return hidden states."""
        stages = stages_of_rank(RUN.config.model, RUN.layout, dist.get_rank())
        return [build_model(RUN.config.model, stage) for stage in stages]
    ''')

LAYERS = dedented('''
    def layers(model):
        """The decoder layers in their order."""
        return list(model.layers_by_index().values())
    ''')

ENDS = dedented('''
    def ends(model):
        """What is gathered at once beside the layers: embeddings, and norm with head; tied they are the root's."""
        return model.embedding_and_head_groups() if len(model.embedding_and_head_groups()) > 1 else []
    ''')

FILL = dedented('''
    def fill(model, device):
        """Initial values, of a cut parameter this rank's part; a checkpoint's would go here."""
        materialise(model, RUN.config.model, RUN.config.train.seed, device, DTYPE)
    ''')

BATCHES = dedented('''
    def batches(device):
        """By step the micro-batches of this rank: (inputs, targets), token ids of (batch, sequence)."""
        return Batches(RUN.corpus, RUN.config, RUN.layout, dist.get_rank(), device)
    ''')

MASTERS_IMPORTS = ("from deepspeed.utils import safe_set_full_fp32_param", "from harness.weights import initial_value")

MASTERS = dedented("""
    for name, parameter in engine.module.named_parameters():  # DeepSpeed made its fp32 masters of rounded weights
        shape = getattr(parameter, "ds_shape", parameter.shape)
        value = initial_value(name, shape, RUN.config.model, RUN.config.train.seed, device)
        safe_set_full_fp32_param(parameter, value)
    """)

END = dedented("""
    if __name__ == "__main__":
        main()
        dist.destroy_process_group()  # when the model is gone: a DistributedDataParallel that outlives it can hang
    """)

START = dedented("""
    on_gpu = {on_gpu}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    """)


def start(run: RecordedRun) -> str:
    """On the run's kind of device: another's random weights are others."""
    found = "torch.cuda.is_available()"
    return START.format(
        on_gpu=found if run.device == "cuda" else f"False  # as in the run; {found} where there are GPUs"
    )
