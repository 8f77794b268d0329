"""Runs of random layouts, shapes, checkpointing and precision, each of which is proven, or refused before it starts.

python -m tests.support.random_runs --draws 200 --first 0 --world 8
"""

import argparse
import collections
import math
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.launcher.forkserver import start_forkserver
from harness.runner import local_machine
from harness.runner.context import RunContext
from harness.runner.plan import make_plan
from harness.runner.run import execute
from harness.util.errors import UserError
from tests.support.commands import compose


class Ending(NamedTuple):
    status: str
    reason: str
    row: dict[str, Any]


def degrees(random_: random.Random, most: int) -> dict[str, int]:
    """Return random degrees of the five axes, whose product is at most `most` and mostly more than 1."""
    axes = ["dp_replicate", "dp_shard", "tp", "cp", "pp"]
    random_.shuffle(axes)
    degree_of, left = dict.fromkeys(axes, 1), most
    for axis in axes:
        degree_of[axis] = random_.choice([degree for degree in (1, 2, 2, 4) if degree <= left])
        left //= degree_of[axis]
    return degree_of


def draw(seed: int, most_ranks: int) -> list[str]:
    """Return the overrides of one random run.

    Most are valid, so that refused runs do not crowd out the others.
    """
    r = random.Random(seed)
    degree = degrees(r, most_ranks)
    engine = r.choices(("torch", "deepspeed", "accelerate"), (75, 15, 10))[0]
    base = "single"
    data_parallel, stage = r.choice([("none", 0), ("ddp", 0), ("ddp", 1), ("fsdp", 0), ("fsdp", 2), ("fsdp", 3)])
    if engine == "deepspeed" or (engine == "accelerate" and r.random() < 0.5):
        data_parallel, stage = "none", r.choice((1, 2, 3))
        base = f"zero{stage}"  # with its options
        cut = r.choice((1, 1, 1, 2)) if engine == "deepspeed" else 1
        degree = dict.fromkeys(degree, 1) | {"dp_shard": r.choice((1, 2, 4)), "tp": cut}
    elif engine == "accelerate":
        data_parallel, stage = "ddp", 0
        degree = dict.fromkeys(degree, 1) | {"dp_replicate": r.choice((1, 2, 4))}
    if r.random() < 0.9:  # mostly leave out what the kind of data parallelism cannot do at all
        if data_parallel == "none" and engine == "torch":
            degree |= {"dp_replicate": 1, "dp_shard": 1, "cp": 1}
        if data_parallel == "ddp":
            degree |= {"tp": 1} if stage else {"dp_shard": 1, "tp": 1}
        if (data_parallel, stage) == ("fsdp", 0):
            degree |= {"dp_shard": 1}
    schedule = r.choice(("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"))
    virtual = r.choice((1, 2)) if schedule == "zero_bubble" else 2 if schedule == "interleaved_1f1b" else 1
    virtual = virtual if degree["pp"] > 1 else 1
    micro_batch, passes = (
        r.choice((1, 2)),
        r.choice((1, 2, 3)) if degree["pp"] == 1 else degree["pp"] * r.choice((1, 2)),
    )
    batch = micro_batch * passes * degree["dp_replicate"] * degree["dp_shard"]
    heads, groups = r.choice(((4, 2), (4, 4), (8, 4)))
    layers = r.choice((4, 5)) if degree["pp"] * virtual <= 4 else 8
    family = r.choice(("tiny", "tiny", "gpt_tiny"))
    model = {
        *(f"model.num_hidden_layers={layers}", f"model.num_attention_heads={heads}"),
        *(f"model.num_key_value_heads={groups}", f"model.hidden_size={r.choice((64, 96))}"),
        *(f"model.intermediate_size={r.choice((128, 192))}", f"model.vocab_size={r.choice((256, 258))}"),
        *(f"model.attention={r.choice(('flash', 'eager'))}", f"model.tie_word_embeddings={r.random() < 0.2}"),
        f"model.dropout={0.1 if family == 'gpt_tiny' and r.random() < 0.3 else 0}",
    }
    checkpointing = r.choice(("none", "none", "full", "every_n", "selective", "attention"))
    vocabulary = degree["tp"] == 1 or engine != "deepspeed"
    return [
        *(f"strategy={base}", f"model={family}", *sorted(model)),
        f"world_size={math.prod(degree.values())}",
        *(f"strategy.{key}={value}" for key, value in degree.items()),
        *(f"strategy.engine={engine}", f"strategy.data_parallel={data_parallel}", f"strategy.zero_stage={stage}"),
        *(f"strategy.schedule={schedule if degree['pp'] > 1 else '1f1b'}", f"strategy.virtual_stages={virtual}"),
        f"strategy.sequence_parallel={vocabulary and degree['tp'] > 1 and r.random() < 0.5}",
        f"strategy.literature={(data_parallel, stage) != ('ddp', 1)}",
        f"strategy.vocabulary_parallel={vocabulary}",
        f"strategy.offload={offload(r, engine, data_parallel, stage)}",
        f"checkpointing={checkpointing}",
        f"checkpointing.offload_activations={checkpointing != 'selective' and r.random() < 0.15}",
        f"precision={r.choice(('fp32', 'fp32', 'fp32', 'bf16_mixed', 'bf16', 'fp16_mixed'))}",
        f"train.global_batch={batch}",
        *(f"train.micro_batch={micro_batch}", f"train.seq_len={r.choice((16, 32, 48))}"),
        *("train.steps=1", "train.warmup_steps=2", f"train.gradient_clipping={r.choice((0, 1.0))}"),
        *(f"train.loss_chunks={r.choice((1, 1, 1, 2))}", f"train.fused_optimizer={r.random() < 0.8}"),
        f"train.compile={r.random() < 0.05}",
    ]


def offload(r: random.Random, engine: str, data_parallel: str, stage: int) -> str:
    """Return a kind of offload, mostly none, and otherwise mostly one that the engine supports."""
    if r.random() < 0.8:
        return "none"
    if engine == "deepspeed":
        return "parameters" if stage == 3 and r.random() < 0.5 else "optimizer"
    return "parameters" if data_parallel == "fsdp" or r.random() < 0.1 else "none"


def ending(overrides: Sequence[str], results: Path) -> Ending:
    """Return how the run of these overrides ends; refused means before any of its processes started."""
    try:
        config, command = compose(*overrides, f"results_dir={results}", "name=random")
        machine = local_machine.detect_machine(config.cluster)
        start_forkserver(machine.device)
        plan = make_plan(config, machine, command)
    except UserError as error:
        return Ending("refused", str(error), {})
    row = execute(plan, RunContext()).row
    return Ending(row["status"], row["reason"], row)


def is_proven(end: Ending, overrides: Sequence[str]) -> bool:
    """Return whether the run was compared with a single process too, as every run without dropout is."""
    drops = "model.dropout=0" not in overrides
    return end.status == "ok" and (drops or end.row.get("grad_deviation") is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first draw's number; each is a seed")
    parser.add_argument("--world", type=int, default=8, help="ranks at most")
    arguments = parser.parse_args()
    counted: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first, arguments.first + arguments.draws):
            started, overrides = time.monotonic(), draw(seed, arguments.world)
            end = ending(overrides, Path(folder))
            status = "unproven" if end.status == "ok" and not is_proven(end, overrides) else end.status
            counted[status] += 1
            detail = end.reason or str({name: end.row.get(name) for name in ("loss_deviation", "grad_deviation")})
            print(f"{seed} {time.monotonic() - started:.0f} s {status}: {detail[:300]}", flush=True)
            if status not in ("ok", "refused"):
                print("    " + " ".join(overrides), flush=True)
    print(dict(counted))
    raise SystemExit(0 if counted.keys() <= {"ok", "refused"} else 1)


if __name__ == "__main__":
    main()
