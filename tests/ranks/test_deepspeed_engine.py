"""DeepSpeed on real ranks over gloo, compared with one plain process: training, held shards, and sent bytes."""

import dataclasses
import functools
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from harness.config.command import read_run_config
from harness.config.schema import RunConfig
from harness.config.strategy import AXES, DataParallel
from harness.cost_model.communication import expected_bytes
from harness.engines.base import Batch, Engine, load_engine
from harness.engines.deepspeed.compatibility import FLAGS, SIZES
from harness.engines.torch.compatibility import DDP_FLAGS, DDP_SIZES
from harness.hardware.machine import Machine
from harness.launcher.forkserver import start_forkserver
from harness.layout.layout import resolve_layout
from harness.layout.state_widths import STATE_KINDS, StateKind
from harness.measure.communication import bytes_sent
from harness.measure.gradient_fingerprint import Fingerprinter
from harness.measure.memory import DeviceMemory
from harness.measure.memory_ownership import shard_bytes
from harness.measure.step_profiler import profile_step
from harness.models.build import build_model
from harness.models.decoder import loss_function
from harness.models.init_weights import initial_value, materialize
from harness.probe import Listener, Probe
from harness.tensors.shard import Shard

STRATEGIES = Path(__file__).parents[2] / "conf" / "strategy"

STEPS = 4

MODEL = {
    "name": "small", "family": "llama", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 352, "vocab_size": 259, "tie_word_embeddings": False,
    "context_length": 16, "parameters": 804736, "source": "test",
}  # fmt: skip

PRECISIONS = {
    "fp32": dict.fromkeys(("compute", "master", "accumulate", "reduce"), "float32"),
    "bf16_mixed": {"compute": "bfloat16"} | dict.fromkeys(("master", "accumulate", "reduce"), "float32"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of STEPS steps on `world` ranks."""

    strategy: str
    world: int = 2
    accumulation: int = 1
    clipping: float = 0.0
    precision: str = "fp32"
    checkpointing: str = "none"
    tied: bool = False
    reduce_bucket_size: int = 0  # 0: the strategy's own

    def config(self) -> RunConfig:
        strategy = yaml.safe_load((STRATEGIES / f"{self.strategy}.yaml").read_text())
        if self.reduce_bucket_size:
            strategy["options"]["reduce_bucket_size"] = self.reduce_bucket_size
        train = {
            "global_batch": 2 * self.accumulation * self.world, "micro_batch": 2, "seq_len": 16, "steps": STEPS,
            "warmup_steps": 1, "seed": 3, "lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8,
            "gradient_clipping": self.clipping,
        }  # fmt: skip
        values = {
            "name": "test", "results_dir": "results", "model": MODEL | {"tie_word_embeddings": self.tied},
            "strategy": strategy, "checkpointing": {"name": self.checkpointing},
            "precision": {"name": self.precision} | PRECISIONS[self.precision],
            "data": {"name": "synthetic", "kind": "synthetic"}, "cluster": {"name": "local", "device": "cpu"},
            "train": train, "proof": {}, "tracking": {"name": "none"}, "world_size": self.world,
        }  # fmt: skip
        return read_run_config(values)


LITERATURE = [Case(f"zero{stage}") for stage in (1, 2, 3)]

ACCUMULATED = [
    Case(f"zero{stage}", accumulation=2, clipping=0.1, reduce_bucket_size=20_000, tied=stage != 2)
    for stage in (1, 2, 3)
]

FOUR = [Case("zero1", 4), Case("zero2", 4, 2), Case("zero3", 4, checkpointing="full")]

MIXED = [Case(f"zero{stage}", accumulation=2, clipping=1.0, precision="bf16_mixed") for stage in (1, 2, 3)]

MIXED += [
    Case("zero2", precision="bf16_mixed", reduce_bucket_size=1000),
    Case("zero1_defaults", accumulation=2, precision="bf16_mixed"),
]

DEFAULTS = [Case(f"zero{stage}_defaults") for stage in (1, 2, 3)]

EXACT = LITERATURE + ACCUMULATED + FOUR + DEFAULTS

CASES = EXACT + MIXED


def batch_of(config: RunConfig, step: int) -> Batch:
    """Return the global batch of a step: runs of counting tokens, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    train = config.train
    first = torch.randint(0, config.model.vocab_size, (train.global_batch, 1), generator=generator)
    tokens = (first + torch.arange(train.seq_len + 1) * 3) % config.model.vocab_size
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def micro_batches(config: RunConfig, step: int, part: int, parts: int) -> list[Batch]:
    """Return the part of a step's batch that one of `parts` ranks trains on."""
    mine = [tensor.chunk(parts)[part] for tensor in batch_of(config, step)]
    split = [tensor.split(config.train.micro_batch) for tensor in mine]
    return [Batch(*pair) for pair in zip(*split, strict=True)]


def reference_of(case: Case) -> list[dict[str, Any]]:
    """Return the result of one process, which is the same for all cases that differ only in their layout."""
    return reference(Case("zero1", case.world * case.accumulation, clipping=case.clipping, tied=case.tied))


@functools.cache
def reference(case: Case) -> list[dict[str, Any]]:
    """Train the whole batch in one plain process in fp32, with torch's own AdamW and clipping."""
    config = case.config()
    train = config.train
    model = build_model(config.model)
    materialize(model, config.model, train.seed, torch.device("cpu"), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), train.lr, train.betas, train.eps, train.weight_decay)
    steps = []
    for step in range(STEPS):
        inputs, targets = batch_of(config, step)
        loss = loss_function(model(inputs), targets)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        bound = train.gradient_clipping or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": loss.item(), "norm": float(norm), "gradients": gradients})
    return steps


class Ready(Listener):
    """A listener that keeps the gradients of every step when they are ready."""

    def __init__(self) -> None:
        self.gradients: list[list[Shard]] = []

    def gradients_ready(self, engine: Engine) -> None:
        self.gradients.append(copies(engine, "gradients"))


def copies(engine: Engine, kind: StateKind) -> list[Shard]:
    return [piece._replace(local=piece.local.clone()) for piece in engine.local_shards(kind)]


def run_case(case: Case, rank: int) -> dict[str, Any]:
    config = case.config()
    layout = resolve_layout(config.strategy, case.world)
    device = torch.device("cpu")
    mesh = init_device_mesh("cpu", layout.mesh_shape, mesh_dim_names=AXES)
    probe, ready = Probe(), Ready()
    engine = load_engine("deepspeed").build(config, layout, mesh, device, probe)
    started = {"masters": copies(engine, "optimizer"), "parameters": copies(engine, "parameters")}
    results = []
    for step in range(STEPS):
        batches = micro_batches(config, step, layout.data_rank(rank), layout.dp)
        if step < STEPS - 1:
            with probe.listen(ready):
                results.append(engine.step(batches))
        else:
            fingerprinter = Fingerprinter(config.model, config.train.seed, device)
            with profile_step(engine, probe, DeviceMemory(device), fingerprinter, layout) as profiled:
                results.append(engine.step(batches))
    measured = profiled.result(timed_log=None)
    outcome = started | {
        "losses": [float(result.loss) for result in results if result.loss is not None],
        "norms": [float(result.grad_norm) for result in results],
        "gradients": ready.gradients,
        "traffic": measured.communication,
        "most_gradient_bytes": measured.gradient_bytes,
        "rest": {kind: shard_bytes(engine.local_shards(kind)) for kind in STATE_KINDS},
    }
    engine.close()
    return outcome


def rank_main(rank: int, world: int, cases: Sequence[Case], port: int, folder: str) -> None:
    torch.set_num_threads(1)
    extensions = Path(folder) / "extensions"  # where torch compiles operators
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), TORCH_EXTENSIONS_DIR=str(extensions)
    )
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    for case in cases:
        torch.save(run_case(case, rank), Path(folder) / f"{CASES.index(case)}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[dict[str, Any]]]:
    """Return the measurements of every rank by case; none of the ranks compiles an operator of DeepSpeed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    start_forkserver("cpu")  # it has imported torch and DeepSpeed
    for world in (2, 4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cases = [case for case in CASES if case.world == world]
        arguments = (world, cases, port, str(folder))
        start_processes(rank_main, arguments, nprocs=world, start_method="forkserver")
    assert not (folder / "extensions").exists()
    return {
        case: [torch.load(folder / f"{index}-{rank}.pt", weights_only=False) for rank in range(case.world)]
        for index, case in enumerate(CASES)
    }


def assembled(ranks: Sequence[Sequence[Shard]], slot: str) -> dict[str, Tensor]:
    """Return whole flattened tensors from the pieces of all ranks, which must cover every element."""
    wholes: dict[str, Tensor] = {}
    for piece in (piece for pieces in ranks for piece in pieces if piece.state_name == slot):
        numel = 1
        for size in piece.shape:
            numel *= size
        flat = wholes.setdefault(piece.name, torch.full((numel,), float("nan")))
        if len(piece.shape) == 1:
            ((start, stop),) = piece.box
        else:
            assert piece.box == tuple((0, size) for size in piece.shape)
            start, stop = 0, numel
        assert piece.local.numel() == stop - start
        flat[start:stop] = piece.local.reshape(-1).float()
    for name, flat in wholes.items():
        assert not flat.isnan().any(), f"{name} is not covered"
    return wholes


def parameters_of(case: Case) -> int:
    return MODEL["parameters"] - (MODEL["vocab_size"] * MODEL["hidden_size"] if case.tied else 0)  # type: ignore


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_trains_as_one_process(case: Case, outcomes: dict[Case, list[dict[str, Any]]]) -> None:
    expected, ranks = reference_of(case), outcomes[case]
    for step in range(STEPS):
        loss = sum(rank["losses"][step] for rank in ranks) / case.world
        assert loss == pytest.approx(expected[step]["loss"], rel=1e-5)
        for rank in ranks:
            assert rank["norms"][step] == pytest.approx(expected[step]["norm"], rel=1e-5)
        if step == STEPS - 1:
            break  # that step was profiled
        gradients = assembled([rank["gradients"][step] for rank in ranks], "")
        assert gradients.keys() == expected[step]["gradients"].keys()
        for name, gradient in expected[step]["gradients"].items():
            assert relative(gradients[name], gradient.view(-1)) < (1e-5 if step == 0 else 1e-4), name


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_mixed_precision_starts_from_exact_masters(case: Case, outcomes: dict[Case, list[dict[str, Any]]]) -> None:
    config, ranks = case.config(), outcomes[case]
    masters = assembled([rank["masters"] for rank in ranks], "master")
    parameters = assembled([rank["parameters"] for rank in ranks], "")
    expected = reference_of(case)
    for name, gradient in expected[0]["gradients"].items():
        start = initial_value(name, gradient.shape, config.model, config.train.seed, torch.device("cpu")).view(-1)
        assert torch.equal(masters[name], start), name
        assert torch.equal(parameters[name], start.bfloat16().float()), name
    for step in range(STEPS):
        loss = sum(rank["losses"][step] for rank in ranks) / case.world
        assert loss == pytest.approx(expected[step]["loss"], rel=5e-3)
        if step == STEPS - 1:
            break  # that step was profiled
        gradients = assembled([rank["gradients"][step] for rank in ranks], "")
        for name, gradient in expected[step]["gradients"].items():
            assert relative(gradients[name], gradient.view(-1)) < 0.05, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_has_the_engines_widths(case: Case, outcomes: dict[Case, list[dict[str, Any]]]) -> None:
    config, total = case.config(), parameters_of(case)
    layout = resolve_layout(config.strategy, case.world)
    widths = load_engine("deepspeed").state_widths(config, layout)
    share = total / layout.shard_count("gradients") * widths.gradients
    for rank in outcomes[case]:
        assert rank["rest"]["optimizer"] == pytest.approx(widths.optimizer * total / case.world, rel=0.02)
        parameters = widths.parameters * total / layout.shard_count("parameters")
        if case.strategy == "zero3_defaults":
            parameters += widths.gathered * total  # smaller than its threshold: whole as well
        assert rank["rest"]["parameters"] == pytest.approx(parameters, rel=0.02)
        if layout.zero_stage == 3:
            assert rank["most_gradient_bytes"] == pytest.approx(share, rel=0.02)
        elif layout.zero_stage == 1:  # whole, and the part while it is being filled
            assert 0.98 * share <= rank["most_gradient_bytes"] <= 1.02 * (share + 4 * total / case.world)
    if layout.zero_stage == 2:
        # A part ends inside a parameter, and one gradient is just being reduced: parameters of at most 6 % of all.
        most = max(rank["most_gradient_bytes"] for rank in outcomes[case])
        assert 0.98 * share <= most <= share + 2 * widths.gradients * 0.06 * total


# The ring volume of a step over that of fp32 DDP without accumulation, which is a reduction and a gather.
VOLUMES = {case: {1: 1.0, 2: (case.accumulation + 1) / 2, 3: 1.5 * case.accumulation}[i % 3 + 1] for i, case in
           enumerate(LITERATURE + ACCUMULATED)}  # fmt: skip

VOLUMES |= dict(zip(DEFAULTS, (1.5, 1.5, 1.0), strict=True))

VOLUMES |= dict(zip(MIXED, (0.75, 1.25, 2.0, 0.75, 1.25), strict=True))

VOLUMES |= dict(zip(FOUR, (1.0, 1.5, 1.85), strict=True))  # layers are gathered once more when recomputed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_volume_is_the_papers(case: Case, outcomes: dict[Case, list[dict[str, Any]]]) -> None:
    config = case.config()
    layout = resolve_layout(config.strategy, case.world)
    plain = 2 * 4 * parameters_of(case) * (case.world - 1) / case.world
    for rank in outcomes[case]:
        sent = bytes_sent(rank["traffic"])
        assert sent / plain == pytest.approx(VOLUMES[case], rel=0.05)
        gradients = [t for t in rank["traffic"] if t.operation != "all_gather" and t.bytes_sent > 0.01 * plain]
        assert {t.dtype for t in gradients} == {"float32"}
        if config.strategy.literature:
            widths = load_engine("deepspeed").state_widths(config, layout)
            assert sent == pytest.approx(sum(expected_bytes(config, layout, widths, rank=0).values()), rel=0.02)


MACHINE = Machine("cpu", "cpu", nodes=1, ranks_per_node=2, devices=0, free_bytes=(2**34,), cores=2)


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        ({"dp_replicate": 2, "dp_shard": 1}, "dp_replicate=2", "choose 1, and -1 for strategy.dp_shard"),
        ({"zero_stage": 0}, "zero_stage=0", "choose 1, 2 or 3"),
        ({"dp_shard": 1, "cp": 2}, "cp=2", "choose 1"),
        (
            {"options": {"reduce_scater": True}},
            "options.reduce_scater=True",
            f"choose among {', '.join(sorted({*FLAGS, *SIZES}))}",
        ),
        ({"options": {"stage": 3}}, "options.stage=3", f"choose among {', '.join(sorted({*FLAGS, *SIZES}))}"),
    ],
)
def test_unsupported_strategies_are_refused(changes: dict[str, Any], key: str, remedy: str) -> None:
    config = Case("zero2").config()
    config = dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, **changes))
    (problem,) = load_engine("deepspeed").unsupported(config, resolve_layout(config.strategy, 2), MACHINE)
    assert problem == f"strategy.{key} is not supported by strategy.engine=deepspeed: {remedy}"


def test_every_case_is_supported() -> None:
    for case in CASES:
        config = case.config()
        assert not list(
            load_engine("deepspeed").unsupported(config, resolve_layout(config.strategy, case.world), MACHINE)
        )


def test_supported_options_are_deepspeeds_own() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    types = {field.alias or name: field.annotation for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert {types[name] for name in FLAGS} == {bool, bool | None}
    assert {types[name] for name in SIZES} == {int}
    DeepSpeedZeroConfig.model_validate(SIZES)


@pytest.mark.parametrize("value", ("auto", "true", [1], {"a": 1}, None, -1, 0.5, float("inf"), True, 5e8, 0, 1))
@pytest.mark.parametrize("engine, data_parallel", (("deepspeed", "none"), ("torch", "ddp"), ("accelerate", "ddp")))
def test_an_option_is_refused_in_one_line_or_is_what_the_library_reads(
    engine: str, data_parallel: DataParallel, value: Any
) -> None:
    """DeepSpeed's "auto" is a word of transformers alone, and stands in most of its files."""
    names = (*FLAGS, *SIZES) if engine == "deepspeed" else (*DDP_FLAGS, *DDP_SIZES)
    config = Case("zero2" if engine == "deepspeed" else "ddp").config()
    for name in names:
        strategy = dataclasses.replace(
            config.strategy, engine=engine, data_parallel=data_parallel, options={name: value}
        )
        changed = dataclasses.replace(config, strategy=strategy)
        problems = list(load_engine(engine).unsupported(changed, resolve_layout(strategy, 2), MACHINE))
        least = (SIZES | DDP_SIZES).get(name)
        numbers = [number for number in (0, 1, 5e8) if least is not None and number >= least]
        fits = value is True if least is None else value is not True and value in numbers
        assert len(problems) == (not fits)
        assert all(problem.startswith(f"strategy.options.{name}={value} is ") for problem in problems)
