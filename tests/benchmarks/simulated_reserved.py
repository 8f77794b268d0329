"""Compare the memory that simulated steps reserve with what others have measured.

python -m tests.benchmarks.simulated_reserved --out results/simulator/reserved.csv
The rows are those of fms-acceleration on one A100 without patched kernels, and torchtitan's Llama-3.1-8B on 8 x H100 of
96 GB. One constant, the median of what is measured beyond the simulation of fms-acceleration's rows, stands for CUDA's
context, which nvidia-smi counts; torchtitan's figure is of torch's allocator alone.
"""

import dataclasses
import statistics

from harness.layout.layout import resolve_layout
from harness.simulator.process import StepRequest
from tests.support.campaigns import REQUIRED_PATH, Line, parse_options, write_table
from tests.support.commands import compose_config
from tests.support.published import TunedRow, fms
from tests.support.simulated_steps import simulate_steps

A100_BYTES = 85_094_498_304  # total memory of an A100 of 80 GB as CUDA reports it, 81,152 MiB

TORCHTITAN = (
    *("strategy=fsdp_full_shard", "model=8b", "precision=bf16_mixed", "train.seq_len=8192", "train.micro_batch=2"),
    *("train.global_batch=16", "world_size=8", "data=synthetic"),
    *("checkpointing=selective", "checkpointing.saved_products=every_second"),
)

TORCHTITAN_RESERVED_BYTES = 82.4 * 2**30  # eager, batch 2: torchtitan's docs/performance.md of December 2024

COLUMNS = ("source", "row", "model", "micro_batch", "measured_bytes", "simulated_bytes", "error", "excluded")


def fms_rows() -> tuple[list[TunedRow], dict[str, int]]:
    """Return the rows that a layout here can express, and how many others there are for each reason."""
    expressible, excluded = [], dict(fms.excluded_rows())
    for entry in fms.rows():
        reason = ""
        if entry.row.layout.world_size > 1:
            reason = "FSDP1, which has flat parameters"
        elif entry.stack != fms.load_stack("fms_acceleration") and entry.row.config.model.name != "santacoder":
            reason = "patched kernels of norms and the loss"
        if reason:
            excluded[reason] = excluded.get(reason, 0) + 1
        else:
            expressible.append(entry)
    return expressible, excluded


def fms_request(entry: TunedRow) -> StepRequest:
    """Return the simulation of a row: the Trainer's AdamW is torch's with foreach operators."""
    config = entry.row.config
    seq_len = min(config.train.seq_len, config.model.context_length)
    train = dataclasses.replace(config.train, fused_optimizer=False, seq_len=seq_len)
    request = dataclasses.replace(config, train=train)
    return StepRequest(request, entry.row.layout, device_bytes=A100_BYTES)


def main() -> None:
    arguments = parse_options(__doc__, out=REQUIRED_PATH)
    entries, excluded = fms_rows()
    reports = simulate_steps([fms_request(entry) for entry in entries])
    lines: list[Line] = []
    for entry, report in zip(entries, reports, strict=True):
        assert report.status == "ok", report.reason
        row = entry.row
        names = {"source": row.source, "row": row.row_number, "model": row.config.model.name}
        sizes = {"measured_bytes": int(row.measured["reserved_bytes"]), "simulated_bytes": report.peak_reserved_bytes}
        lines.append(names | sizes | {"micro_batch": row.config.train.micro_batch})
    context = statistics.median(line["measured_bytes"] - line["simulated_bytes"] for line in lines)
    for line in lines:
        line["simulated_bytes"] += round(max(0, context))
    config = compose_config(*TORCHTITAN)
    request = StepRequest(config, resolve_layout(config.strategy, 8), device_bytes=None)
    (report,) = simulate_steps([request])
    assert report.status == "ok", report.reason
    lines.append(
        {
            "source": "torchtitan docs/performance.md",
            "model": "8b",
            "micro_batch": 2,
            "measured_bytes": round(TORCHTITAN_RESERVED_BYTES),
            "simulated_bytes": report.peak_reserved_bytes,
        }
    )
    for line in lines:
        line["error"] = f"{line['simulated_bytes'] / line['measured_bytes'] - 1:+.4f}"
        print(line)
    print(f"constant for CUDA's context: {context:.0f} bytes")
    print(f"median error {statistics.median(abs(float(line['error'])) for line in lines[:-1]):.2%}")
    lines += [{"excluded": f"{count} rows: {reason}"} for reason, count in excluded.items()]
    write_table(arguments.out, COLUMNS, lines)


if __name__ == "__main__":
    main()
