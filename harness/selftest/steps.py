"""The table of the self-test's steps: what each runs, on which devices, and what must come of it.

The first steps take about a minute on any machine. Those that need CUDA devices go from one device to eight, and from
what is most likely to fail to what takes longest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.launcher.rank_entry import worker_entry
from harness.records.schema import Record
from harness.selftest import checks, observations
from harness.selftest.bench import Bench
from harness.selftest.rank_variants import (
    FAULTY_STEPS,
    bound_rank,
    hanging_rank,
    killed_rank,
    rank_without_host_memory,
    rank_without_memory_for_nccl,
    traced_rank,
)

Check = Callable[[Bench, Sequence[Record]], str]

# A few steps of the tiny model. `{world}` is the number of ranks: two on a CPU, as many as there are devices up to
# two on GPUs.
TINY = (
    "world_size={world} model=tiny precision=fp32 train.global_batch=4 train.micro_batch=1 train.seq_len=64"
    " train.steps=3 train.warmup_steps=3"
)

# A few steps of a model of a real size in 16 bit, which fills a GPU's kernels.
LARGE = (
    "world_size={world} precision=bf16_mixed train.global_batch=8 train.micro_batch=1 train.seq_len=1024 train.steps=5"
    " train.warmup_steps=3 proof.reference=false"
)

# No kernel of the tiny model fits into so little, on any device.
OUT_OF_MEMORY = "strategy=ddp cluster.memory_budget=4MiB preflight=false proof.reference=false"

FAULTY = f"strategy=ddp proof.reference=false train.steps={FAULTY_STEPS}"

HANG = "hang_seconds=20"  # longer than any rank takes to start

PROVEN = "proof.reference=true"

UNPROVEN = "strategy=ddp proof.reference=false"

RATES = ("1e-5", "3e-4", "1e-2")

FOUR_STAGES = "model=350m world_size=4 train.global_batch=16"  # four micro-batches for each stage


@dataclass(frozen=True)
class Step:
    """One step of the self-test."""

    name: str
    about: str  # what it shows, in one line
    check: Check  # returns a few words on the result; raises StepFailedError
    runs: tuple[str, ...] = ()  # the overrides of each run, beside those of `base`
    base: str = TINY
    gpus: int = 0  # the CUDA devices that it needs; 0 if it runs on a CPU too
    entry: Callable[[str], None] = worker_entry  # what every rank runs
    may_not_fit: bool = False  # whether it is skipped where the cost model refuses it for want of memory


def _each(template: str, *values: str) -> tuple[str, ...]:
    """Return the overrides of one run for each value, which replaces {} in the template."""
    return tuple(template.replace("{}", value) for value in values)


STEPS = (
    Step("environment", "what is installed: libraries, compiler, driver", observations.describe_environment),
    Step("devices", "which devices there are, and how they can be named", observations.describe_devices),
    Step("single", "a single process trains", checks.proven, ("strategy=single world_size=1",)),
    Step("torch", "PyTorch's engine, by DDP and FSDP2", checks.proven, ("strategy=ddp", "strategy=fsdp_full_shard")),
    Step("deepspeed", "DeepSpeed's engine", checks.proven, ("strategy=zero3",)),
    Step("accelerate", "Accelerate's engine", checks.proven, ("strategy=ddp strategy.engine=accelerate",)),
    Step("memory", "what fills the peak is known, and adds up to it", checks.memory_adds_up, ("strategy=ddp",)),
    Step("trace", "the parts of a step are known, and add up to it", checks.time_adds_up, ("strategy=ddp",)),
    Step(
        "trace-file",
        "torch's profiler writes what a step runs, on the device too",
        observations.trace_files_are_whole,
        (f"{UNPROVEN} repeat=3",),
        entry=traced_rank,
    ),
    Step(
        "learning-rates",
        "losses fall at every learning rate, from the same first one",
        checks.learns_at_every_rate,
        _each("strategy=single world_size=1 proof.reference=false train.steps=10 train.lr={}", RATES[0], RATES[-1]),
    ),
    Step("out-of-memory", "too small a memory budget ends as oom", checks.out_of_memory, (OUT_OF_MEMORY,)),
    Step(
        "host-memory",
        "memory that the host does not have ends as oom, pinned where there is a GPU",
        checks.out_of_memory,
        (f"{UNPROVEN} repeat=4",),
        entry=rank_without_host_memory,
    ),
    Step("kill", "a rank that is killed is named", checks.killed, (f"{FAULTY} repeat=1",), entry=killed_rank),
    Step("hang", "a hang ends with stack traces", checks.hung, (f"{FAULTY} {HANG} repeat=2",), entry=hanging_rank),
    Step("side-by-side", "a command that makes its runs side by side", observations.side_by_side),
    Step("two-nodes", "a job of Slurm on two nodes", observations.two_nodes),
    Step(
        "precision",
        "16 bit and a model with biases, each with its attention kernel",
        checks.proven,
        _each("strategy=single world_size=1 {}", "precision=bf16_mixed", "precision=fp16_mixed", "model=gpt_tiny"),
        gpus=1,
    ),
    Step(
        "predicted-memory",
        "measured peaks beside predicted ones",
        checks.memory_as_predicted,
        tuple(
            f"strategy=single world_size=1 model={model} checkpointing={kind}"
            for model in ("125m", "350m", "1b")
            for kind in ("none", "full", "selective", "attention")
        ),
        base=LARGE,
        gpus=1,
        may_not_fit=True,
    ),
    Step(
        "fp32",
        "grouped heads in fp32, whose attention has no fused kernel of its own",
        checks.ran,
        ("strategy=single world_size=1 model=1b precision=fp32 train.global_batch=1",),
        base=LARGE,
        gpus=1,
        may_not_fit=True,
    ),
    Step(
        "layouts-on-one",
        "every engine's layouts and options in a world of one",
        checks.proven,
        (
            *_each("world_size=1 strategy={}", "zero1", "zero2", "zero3", "zero1_defaults", "zero2_defaults"),
            *_each("world_size=1 strategy={}", "zero3_defaults", "zero1_tuned", "zero2_tuned", "zero3_tuned"),
            *_each("world_size=1 strategy={}", "zero_offload", "fsdp_full_shard", "fsdp_shard_grad_op"),
            "world_size=1 strategy=fsdp_full_shard strategy.offload=parameters",
            *_each("world_size=1 strategy={} strategy.engine=accelerate", "ddp", "zero2"),
            "world_size=1 strategy=single train.compile=true train.warmup_steps=4",
            "world_size=1 strategy=single checkpointing=full checkpointing.offload_activations=true",
        ),
        gpus=1,
    ),
    Step(
        "exhausted-device",
        "memory that a device does not have ends as oom",
        checks.out_of_memory,
        (
            "strategy=single world_size=1 model=1b preflight=false train.seq_len=8192 train.global_batch=1024"
            " train.micro_batch=1024",
        ),
        base=LARGE,
        gpus=1,
    ),
    Step(
        "release",
        "how long until the memory of an ended run is free",
        observations.memory_is_released,
        ("strategy=single world_size=1 model=350m train.steps=2",),
        base=LARGE,
        gpus=1,
        may_not_fit=True,
    ),
    Step(
        "determinism",
        "the same run twice",
        checks.same_twice,
        _each("strategy=single world_size=1 model=125m repeat={}", "0", "1"),
        base=LARGE,
        gpus=1,
        may_not_fit=True,
    ),
    Step(
        "two-gpus",
        "every kind of layout over NCCL",
        checks.proven,
        (
            *_each(f"model=350m {PROVEN} strategy={{}}", "ddp", "zero1", "zero2", "zero3", "fsdp_full_shard", "tp"),
            *_each(f"model=350m {PROVEN} strategy={{}}", "tp_sp", "cp"),
            f"model=350m {PROVEN} strategy=fsdp_full_shard strategy.engine=accelerate",
            f"model=gpt_125m {PROVEN} strategy=cp precision=fp32",
            *_each(f"model=125m {PROVEN} strategy=tp train.lr={{}}", *RATES),
        ),
        base=LARGE,
        gpus=2,
        may_not_fit=True,
    ),
    Step(
        "nccl-memory",
        "a device that is full before NCCL connects ends as oom",
        checks.out_of_memory,
        (f"{UNPROVEN} preflight=false repeat=5",),
        gpus=2,
        entry=rank_without_memory_for_nccl,
    ),
    Step(
        "pipelines",
        "the bubbles of four stages beside the formulas",
        checks.bubbles_as_in_theory,
        _each(f"{FOUR_STAGES} strategy={{}}", "pp_gpipe", "pp_1f1b", "pp_interleaved", "pp_zero_bubble"),
        base=LARGE,
        gpus=4,
        may_not_fit=True,
    ),
    Step(
        "device-id",
        "pipelines beside the same with process groups that are bound to their devices",
        checks.no_better_with_bound_devices,
        _each(f"{FOUR_STAGES} strategy={{}} repeat=1", "pp_1f1b", "pp_interleaved"),
        base=LARGE,
        gpus=4,
        entry=bound_rank,
        may_not_fit=True,
    ),
    Step(
        "speeds",
        "seven billion parameters on eight devices: DeepSpeed's settings beside FSDP2",
        checks.ran,
        _each("model=7b world_size=8 strategy={}", "fsdp_full_shard", "zero3", "zero3_defaults", "zero3_tuned")
        + _each("model=7b world_size=8 strategy={}", "fsdp_shard_grad_op", "zero2", "zero2_tuned"),
        base=LARGE,
        gpus=8,
        may_not_fit=True,
    ),
)


def step_names() -> list[str]:
    """Return the names of all steps in their order."""
    return [step.name for step in STEPS]
