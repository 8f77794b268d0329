"""One run of every newer choice with about 100 million parameters, each of which must be proven.

python -m tests.support.hundred_million --table results/hundred_million_runs.csv
A case is identified by its number in the list. Those in the table are not run again, unless they are findings and
--again is given.
"""

from tests.support.campaigns import FLAG, REQUIRED_PATH, parse_options, read_table
from tests.support.random_runs import DEVIATIONS, run_line, write_draws

STEPS = "train.seq_len=64 train.micro_batch=1 train.steps=2 train.warmup_steps=1 data=synthetic"

LIMITS = ("timeout_seconds=1500", "hang_seconds=900")

DENSE = "model=125m"

MIXTURE = (
    "model=moe_tiny model.hidden_size=512 model.num_hidden_layers=6 model.num_attention_heads=8 "
    "model.num_key_value_heads=4 model.intermediate_size=768 model.vocab_size=40000"
)

ODD_MIXTURE = MIXTURE + " model.num_experts=9 model.num_experts_per_tok=3"

DDP_PAIR = "strategy.data_parallel=ddp strategy.dp_replicate=2"

CASES = tuple(
    f"precision={precision} train.global_batch={8 if world == 8 else 4} world_size={world} {STEPS} {choices}"
    for world, precision, choices in (
        (2, "fp32", f"{MIXTURE} strategy=ddp"),
        (2, "fp32", f"{MIXTURE} strategy=ep"),
        (4, "fp32", f"{MIXTURE} strategy=fsdp_ep checkpointing=selective"),
        (4, "fp32", f"{MIXTURE} strategy=fsdp_ep strategy.tp=2"),
        (4, "fp32", f"{MIXTURE} strategy=fsdp_ep strategy.pp=2"),
        (4, "bf16_mixed", f"{MIXTURE} strategy=fsdp_ep strategy.ep=4 checkpointing=full"),
        (8, "fp32", f"{MIXTURE} strategy=fsdp_ep strategy.ep=4"),
        (2, "fp32", f"{ODD_MIXTURE} strategy=fsdp_full_shard"),
        (2, "bf16_mixed", f"{ODD_MIXTURE} strategy=zero2"),
        (2, "fp32", f"{ODD_MIXTURE} strategy=zero3 checkpointing=full"),
        (2, "fp32", f"{ODD_MIXTURE} strategy=tp"),
        (3, "fp32", f"{ODD_MIXTURE} strategy=pp_1f1b"),
        (2, "fp32", f"{DENSE} adapter=lora strategy=ddp"),
        (2, "fp32", f"{DENSE} adapter=lora strategy=fsdp_full_shard"),
        (2, "bf16_mixed", f"{DENSE} adapter=lora strategy=fsdp_full_shard checkpointing=full"),
        (2, "fp32", f"{DENSE} adapter=lora strategy=zero1"),
        (2, "fp32", f"{DENSE} adapter=lora strategy=zero2"),
        (4, "fp32", f"{DENSE} adapter=lora strategy=zero3"),
        (2, "fp32", f"{DENSE} adapter=lora strategy=tp"),
        (2, "fp32", f"{DENSE} optimizer=adamw_8bit strategy=ddp"),
        (2, "fp32", f"{DENSE} optimizer=adamw_8bit strategy=fsdp_full_shard"),
        (2, "fp32", f"{DENSE} optimizer=adamw_bf16 strategy=fsdp_shard_grad_op"),
        (2, "fp32", f"{DENSE} optimizer=sgd strategy=zero1"),
        (2, "fp32", f"{DENSE} optimizer=muon strategy=ddp"),
        (4, "fp32", f"{DENSE} optimizer=muon strategy=fsdp_full_shard"),
        (2, "bf16_mixed", f"{DENSE} optimizer=muon strategy=pp_1f1b"),
        (4, "fp32", f"{DENSE} strategy=cp_ulysses"),
        (4, "bf16_mixed", f"{DENSE} strategy=cp_ulysses strategy.cp=2 {DDP_PAIR} checkpointing=full"),
        (4, "fp32", f"{DENSE} strategy=zero3_hpz"),
        (4, "fp32", f"{DENSE} strategy=fsdp_full_shard strategy.secondary_shards=2"),
        (2, "fp32", f"{DENSE} strategy=pp_zbv"),
        (3, "fp32", f"{DENSE} strategy=pp_dualpipev train.global_batch=6"),
        (2, "fp32", f"{DENSE} strategy=pp_interleaved_zero_bubble"),
        (2, "fp8_mixed", f"{DENSE} strategy=ddp"),
        (2, "fp8_mixed", f"{DENSE} strategy=fsdp_full_shard precision.float8_all_gather=true"),
        (2, "fp8_mixed", f"{DENSE} strategy=tp precision.recipe=rowwise"),
        (2, "fp32", f"{DENSE} strategy=fsdp_full_shard train.save=async"),
        (2, "fp32", f"{DENSE} strategy=zero3 train.save=sync"),
    )
)


def overrides_of(case: str) -> list[str]:
    """Return the overrides of a case, of which the last one of each key counts."""
    return [f"{key}={value}" for key, value in dict(each.split("=", 1) for each in case.split()).items()]


def main() -> None:
    arguments = parse_options(
        __doc__,
        table=REQUIRED_PATH | {"help": "the CSV file of all cases so far"},
        again=FLAG | {"help": "run findings again"},
    )
    lines = {int(line["draw"]): line for line in read_table(arguments.table)}
    finished = {number for number, line in lines.items() if line["outcome"] == "proven" or not arguments.again}
    for number in (each for each in range(len(CASES)) if each not in finished):
        lines[number] = line = run_line(number, overrides_of(CASES[number]), LIMITS)
        detail = line["reason"] or " ".join(f"{name} {line.get(name, '')}" for name in DEVIATIONS)
        print(f"{number} {line['wall_seconds']} s {line['outcome']}: {detail[:400]}", flush=True)
        write_draws(arguments.table, list(lines.values()))
    raise SystemExit(any(line["outcome"] != "proven" for line in lines.values()))


if __name__ == "__main__":
    main()
