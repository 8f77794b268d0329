"""Records as a sweep leaves them, with figures that can be checked by hand."""

import dataclasses
from itertools import product
from typing import Any

from harness.cost_model.parts import PEAK_TITLES
from harness.records.provenance import versions
from harness.records.rank_report import MEMORY_ROLES
from harness.records.schema import Record
from harness.report.labels import STEP_TITLES

PARAMETERS = 2**20

MIB = 2**20

HOSTILE = (
    "<script>alert(1)</script> | **b** [l](http://x) `c` $x$ \x1b[31m\n# h\r\n=1+1 [red]r[/red] :smile: _i_ ![p](q)"
)


def row(number: int, strategy: str, engine: str, stage: int, **changes: Any) -> dict[str, Any]:
    """Return an ok row of a 2-rank run in fp32 without accumulation, with the bytes of ZeRO's own formulas."""
    shards = {kind: 2 if stage >= first else 1 for kind, first in (("optimizer", 1), ("gradient", 2), ("parameter", 3))}
    return {
        "run_id": f"{number:010x}",
        "name": "demo",
        "status": "ok",
        "reason": None,
        "model": "tiny",
        "parameters": PARAMETERS,
        "strategy": strategy,
        "engine": engine,
        "checkpointing": "none",
        "precision": "fp32",
        "world_size": 2,
        "zero_stage": stage,
        "micro_batch": 4,
        "grad_accumulation": 1,
        "global_batch": 8,
        "seq_len": 128,
        "tokens_per_second": 12345.6,
        "tokens_per_second_per_device": 6172.8,
        "step_seconds": 0.08294,
        "step_seconds_iqr_ratio": 0.02,
        "peak_allocated_bytes": 20 * MIB,
        "parameter_bytes": 4 * PARAMETERS // shards["parameter"],
        "gradient_bytes": 4 * PARAMETERS // shards["gradient"],
        "optimizer_bytes": (8 if engine == "torch" else 12) * PARAMETERS // shards["optimizer"],
        "activation_bytes": 3 * MIB // 2,
        "communication_bytes": 4 * PARAMETERS,
        "loss_first": 5.545,
        "loss_last": 3.21,
        "loss_deviation": 1.23e-7,
        "grad_deviation": 4.56e-6,
        "update_deviation": 2.34e-6,
        "loss_floor": 9.87e-8,
        "grad_floor": 3.45e-6,
        "update_floor": 2.1e-6,
        "proven_steps": 16,
        "measured_on": "cpu",
        "launch": "processes",
        "repeat": 0,
        "started_at": f"2026-01-02T03:{number:02d}:00Z",
    } | changes


FAILED = dict.fromkeys(
    (
        *("tokens_per_second", "tokens_per_second_per_device", "step_seconds", "step_seconds_iqr_ratio"),
        "peak_allocated_bytes",
        *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "communication_bytes"),
        *("loss_first", "loss_last", "loss_deviation", "grad_deviation", "update_deviation"),
        *("loss_floor", "grad_floor", "update_floor", "proven_steps"),
    )
)


def record_of(row: dict[str, Any]) -> Record:
    sent = row["communication_bytes"] or 0
    communication = [{"operation": "all_reduce", "axis": "dp_replicate", "bytes": sent, "count": 3}]
    if row["zero_stage"]:
        communication = [
            {"operation": "all_gather", "axis": "dp_shard", "bytes": sent - 2 * PARAMETERS, "count": 7},
            {"operation": "reduce_scatter", "axis": "dp_shard", "bytes": 2 * PARAMETERS, "count": 5},
        ]
    peak = row["peak_allocated_bytes"]
    ranks = [
        {"rank": rank, "peak_allocated_bytes": peak and peak - rank * MIB // 2} for rank in range(row["world_size"])
    ]
    ok = row["status"] == "ok"
    return Record.from_json(
        {
            "schema_version": 1,
            "row": row,
            "config": {},
            "layout": {},
            "ranks": ranks,
            "environment": {"cpu": "Some CPU | 8 cores"},
            "versions": dict(versions()),
            "proof": {"layout": "proven"} if ok else {},
            "communication": communication if sent else [],
            "pipeline": [],
        }
    )


def records() -> list[Record]:
    """Return ten runs as they come out of a sweep, in the order they started."""
    single = {"world_size": 1, "communication_bytes": 0, "loss_deviation": 0.0}
    single |= dict.fromkeys(("tokens_per_second", "tokens_per_second_per_device"), 8000.0)
    refused = (
        "train.global_batch=8 is not a multiple of train.micro_batch=3 x 2 data-parallel ranks: choose a multiple of 6"
    )
    rows = [
        row(1, "zero1", "deepspeed", 1, peak_allocated_bytes=18 * MIB),
        row(2, "ddp", "torch", 0, tokens_per_second=16000.0, tokens_per_second_per_device=8000.0),
        row(3, "single", "torch", 0, **single),
        row(4, "zero2", "deepspeed", 2, peak_allocated_bytes=16 * MIB),
        row(5, "zero3", "deepspeed", 3, peak_allocated_bytes=10 * MIB, communication_bytes=6 * PARAMETERS),
        row(6, "fsdp_full_shard", "torch", 3, peak_allocated_bytes=9 * MIB, communication_bytes=6 * PARAMETERS),
        row(7, "fsdp_shard_grad_op", "torch", 2, status="oom", reason="rank 1 ran out of memory", **FAILED),
        row(8, "fsdp_no_shard", "torch", 0, status="refused", reason=refused, **FAILED),
        row(9, "fsdp_hybrid_shard", "torch", 3, status="timeout", reason="no step for 1800 s", **FAILED),
        row(10, "zero_offload", "deepspeed", 2, status="error", reason="RuntimeError: shards differ", **FAILED),
    ]
    return [record_of(entry) for entry in rows]


def mixed() -> list[Record]:
    """Return data-, tensor- and pipeline-parallel runs on 2 and 4 ranks, with 8 micro-batches through the pipelines."""
    axes = {"ddp": "dp_replicate", "tp": "tp", "pp_1f1b": "pp", "pp_gpipe": "pp"}
    entries = []
    for number, (strategy, world) in enumerate(product(axes, (2, 4)), start=1):
        degrees = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "cp", "pp"), 1) | {axes[strategy]: world}
        entry = record_of(row(number, strategy, "torch", 0, world_size=world, **degrees))
        entry.communication[0]["axis"] = axes[strategy]
        if axes[strategy] == "pp":
            entry.row.update({"pipeline_bubble": 0.3294, "pipeline_bubble_theory": (world - 1) / 8})
            entry.communication.insert(0, {"operation": "send", "axis": "pp", "bytes": MIB // 2, "count": 16})
            entry.pipeline.extend(
                {"rank": rank, "stages": [rank, rank + world], "layers": [1, 2], "working_seconds": 0.04 + rank / 1000}
                | {"idle_seconds": 0.02, "idle_share": 1 / 3, "bubble": 0.5 + rank, "in_flight": world - rank}
                | {"activation_bytes": (4 - rank) * MIB}
                for rank in range(world)
            )
        entries.append(entry)
    return entries


GIB = 2**30

PARTS = {role: PEAK_TITLES[role] for role in MEMORY_ROLES}

TIMES = dict(list(STEP_TITLES.items())[:5])


def record(number: int, strategy: str, gibs: float, tokens_per_second: float, **changes: Any) -> Record:
    """Return a run of torch on 2 ranks with this peak in GiB, whose parts and times all have different sizes."""
    share = dict(zip(PARTS, (1 / 8, 1 / 4, 1 / 16, 1 / 32, 7 / 16, 1 / 64, 5 / 64), strict=True))
    seconds = 1024 / tokens_per_second
    measured: dict[str, Any] = {
        "tokens_per_second": tokens_per_second,
        "step_seconds": seconds,
        "step_seconds_iqr_ratio": 0.2,
        "peak_allocated_bytes": int(gibs * GIB),
        "activation_bytes": int(gibs * GIB / 2),
        "communication_bytes": None,
        "predicted_peak_bytes": int(gibs * GIB * (1 + number / 100)),
        "predicted_activation_bytes": int(gibs * GIB / 2.1),
        **{f"at_peak_{part}_bytes": int(gibs * GIB * fraction) for part, fraction in share.items()},
        **dict(zip(TIMES, (seconds * fraction for fraction in (0.02, 0.28, 0.4, 0.1, 0.2)), strict=True)),
    }
    if changes.get("status", "ok") != "ok":
        measured = FAILED | {"last_seen_allocated_bytes": 7 * GIB}
    sent = {"dp_shard": (number * 100.0 * MIB, 250.0 * MIB), "tp": (50.0 * MIB * number, None)}
    traffic = [{"axis": axis, "bytes": size, "formula_bytes": due, "outside": {}} for axis, (size, due) in sent.items()]
    parts = {"config": {}, "layout": {}, "versions": dict(versions()), "traffic": traffic[: 1 + number % 2]}
    own = row(number, strategy, "torch", 0, **{"measured_on": "cuda"} | measured | changes)
    return Record.from_json({"row": own, **parts})


def thrice(entries: list[Record], away: float = 0.1) -> list[Record]:
    """Return three repeats of every run; the others are slower and faster by a part of the first one's speed."""
    repeated = []
    for entry, (repeat, share) in product(entries, enumerate((1.0, 1 - away, 1 + away))):
        factors = {"tokens_per_second": share} | dict.fromkeys(("step_seconds", *TIMES), 1 / share)
        again = entry.row | {name: entry.row[name] * by for name, by in factors.items() if entry.row.get(name)}
        again |= {"repeat": repeat, "run_id": f"{entry.run_id}{repeat or ''}"}
        repeated.append(dataclasses.replace(entry, row=again, config={"repeat": repeat}))
    return repeated
