"""The sentences of a plan worked out again from its rows, by code that shares nothing with the planner's.

Every line that a plan prints must be one of these, with the figures that its rows have.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Row = Mapping[str, Any]

ROOT = Path(__file__).parents[2]

GIB = 1024**3

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")

# The words of a plan for the columns of what is at the peak.
PARTS = {
    "parameters": "parameter",
    "gradients": "gradient",
    "optimizer": "optimizer",
    "activations": "activation",
    "loss": "loss",
    "buffers": "communication",
    "temporaries": "temporary",
    "workspaces": "workspace",
}


def size_text(size: float) -> str:
    """Return bytes in the largest binary unit that is not above them, with one decimal."""
    power = min(3, int(math.log(size, 1024))) if size >= 1024 else 0
    return f"{size / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}" if power else f"{size:.0f} B"


def label(row: Row) -> str:
    """Return a layout in a few words."""
    kind = row["engine"] if row["data_parallel"] == "none" else row["data_parallel"]
    degrees = " x ".join(f"{axis} {row[axis]}" for axis in AXES if row[axis] != 1) or "one rank"
    stage = f" zero {row['zero_stage']}" if row["zero_stage"] else ""
    settings = {"tuned": " tuned for speed", "defaults": " with the library's defaults"}
    words = [kind + stage + settings.get(row["strategy"].rpartition("_")[2], "")]
    words.append(degrees + (" with sequence parallelism" if row.get("sequence_parallel") else ""))
    if row["pp"] > 1:
        virtual = row["virtual_stages"]
        words.append(row["schedule"] + (f" of {virtual} stages a rank" if virtual > 1 else ""))
    every = row.get("checkpointing_every")
    products = " of every second product" if row.get("saved_products") else ""
    words.append(f"checkpointing {row['checkpointing']}" + (f" {every}" if every else "") + products)
    words += {"optimizer": ["optimizer on the host"], "parameters": ["state on the host"]}.get(row["offload"], [])
    words += ["activations on the host"] if row["offload_activations"] else []
    return ", ".join([*words, f"micro-batch {row['micro_batch']}"])


def parts_of_step(row: Row) -> dict[str, float]:
    """Return the seconds of a step by what they are spent on."""
    return {
        "compute": row["forward_seconds"] + row["backward_seconds"],
        **{
            f"exposed {axis} communication": row[f"exposed_{axis}_seconds"]
            for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp")
        },
        "pipeline bubble": row["idle_seconds"],
        "copies to and from the host": row["exposed_copy_seconds"],
        "optimizer": row["optimizer_seconds"],
        "rest of the step": row["other_seconds"],
    }


def columns_of_step(row: Row) -> dict[str, float]:
    """Return the seconds of a step by the heads of a table's columns."""
    shorter = {"pipeline bubble": "bubble", "copies to and from the host": "copies", "rest of the step": "rest"}
    return {shorter.get(part, part.removesuffix(" communication")): s for part, s in parts_of_step(row).items()}


def longer(row: Row, first: Row) -> str:
    """Return how much longer a step takes than the first one's."""
    ratio = row["predicted_step_seconds"] / first["predicted_step_seconds"]
    return "is as fast within 0.1 %" if ratio < 1.001 else f"takes {(ratio - 1) * 100:.1f} % longer"


def separations(best: Sequence[Row]) -> list[str]:
    """Return how many layouts tie, and for every one after the first the part of a step that separates it most."""
    ties = sum(row["predicted_step_seconds"] <= 1.03 * best[0]["predicted_step_seconds"] for row in best)
    tie = "plans do not tell layouts apart whose step times differ by less than 3 %"
    lines = [f"The first {ties} are ties: {tie}."] if ties > 1 else []
    for row in best[1:]:
        own, other = parts_of_step(row), parts_of_step(best[0])
        part = max(own, key=lambda name: own[name] - other[name])
        text, verb = f"{label(row)} {longer(row, best[0])}", "take" if part.startswith("copies") else "takes"
        cause = f": its {part} {verb} {own[part]:.4g} s a step, and {other[part]:.4g} s in the first"
        lines.append(f"{text}{'' if 'within' in text else cause}.")
    return lines


def smaller(best: Sequence[Row], front: Sequence[Row]) -> list[str]:
    """Return the first three layouts of the front that need less memory than the fastest that fits."""
    if not best:
        return []
    peak = best[0]["predicted_peak_bytes"]
    less = [row for row in front if row["predicted_peak_bytes"] < 0.99 * peak][:3]
    return [
        f"{label(row)} needs {size_text(row['predicted_peak_bytes'])}, {size_text(peak)} in the fastest, and"
        f" {longer(row, best[0])}."
        for row in less
    ]


def needed(row: Row) -> int:
    """Return the bytes that a device must have."""
    return int(row["predicted_peak_bytes"] + row["process_bytes"])


def range_of(row: Row) -> tuple[str, float, float]:
    """Return how a plan names the measurements behind an interval of memory, and their range."""
    stack = yaml.safe_load((ROOT / "conf" / "stack" / f"{row['stack']}.yaml").read_text())
    own = (stack.get("memory") or {}).get("measured_over_predicted")
    if own:
        return f"stack={row['stack']}", own[0], own[1]
    return "the least predictable stack on file", 0.84, 1.45


def detail(row: Row) -> list[str]:
    """Return what fills memory and time of a layout, and what it sends."""
    parts = ", ".join(
        f"{word} {size_text(row[f'at_peak_{column}_bytes'])}"
        for word, column in PARTS.items()
        if row[f"at_peak_{column}_bytes"]
    )
    reserved = row["peak_reserved_bytes"]
    more = f"; torch reserves about {size_text(reserved)}" if reserved else ""
    if reserved and row["stack"] == "harness":
        lasting = sum(row[f"at_peak_{part}_bytes"] or 0 for part in ("parameter", "optimizer", "workspace"))
        share = 2.4 * (0.36 if row["zero_stage"] == 3 or row["engine"] == "deepspeed" else 0.15)
        beyond = share * (row["predicted_peak_bytes"] - lasting)
        most = math.ceil((row["predicted_peak_bytes"] + beyond) / 2**21) * 2**21
        more += f", rarely more than {size_text(most)}"
    peak = size_text(row["predicted_peak_bytes"])
    name, low, high = range_of(row)
    limits = [row["predicted_peak_low_bytes"], row["predicted_peak_high_bytes"]]
    state = sum(row[f"at_peak_{part}_bytes"] or 0 for part in ("parameter", "gradient", "optimizer"))
    assert limits[0] >= state, "a peak is never below the state that is there at once"
    bound = ", its state," if limits[0] == state else ""
    available = row["memory_limit_bytes"] - row["process_bytes"]
    seconds = ", ".join(f"{part} {size:.4g} s" for part, size in parts_of_step(row).items() if size)
    return [
        f"memory: rank {row['peak_rank']} peaks at {peak} in {row['peak_phase']}: {parts}{more}.",
        f"fits: {row['fits']}: measured peaks of {name} were {low} to {high} of predicted ones, so that this one needs"
        f" between {size_text(limits[0])}{bound} and {size_text(limits[1])}; {size_text(available)} of a device are for"
        " tensors.",
        f"step: {row['predicted_step_seconds']:.4g} s: {seconds}.",
    ]


def sent_is_right(line: str, row: Row) -> bool:
    """Return whether what is sent has the bytes of the row's columns of communication, and all of them."""
    columns = {name: row[name] for name in row if re.fullmatch("communication_.+_bytes", name) and row[name]}
    text = line.removeprefix("sent by one rank in a step: ").removesuffix(".")
    entries = [] if text == "nothing" else [entry.rsplit(" ", 2) for entry in text.split(", ")]
    shown = {f"communication_{re.sub('[+ ]', '_', name)}_bytes": f"{size} {unit}" for name, size, unit in entries}
    return shown == {name: size_text(size) for name, size in columns.items()}


def counts(page: Mapping[str, Any]) -> str:
    """Return what a search went through."""
    beyond = f"{page['beyond']} need two devices' memory for their state alone, " if page["beyond"] else ""
    valid = f"{beyond}{page['valid']} {'others ' if beyond else ''}could run"
    exact = f"{page['memory_estimates']} needed an exact estimate of memory"
    return f"{page['considered']} candidates were considered: {valid}, and {exact}."


def misfit(row: Row) -> str:
    """Return how a sentence on a layout that does not fit begins."""
    return (
        f"{label(row)} would take {row['predicted_step_seconds']:.4g} s but needs {size_text(needed(row))} of the"
        f" {size_text(row['memory_limit_bytes'])} of a device: "
    )


def notes(row: Row) -> list[str]:
    """Return the sentences on what a plan rests on that its row says itself."""
    datasheet = "is datasheet-only: no published measurement stands behind its efficiencies."
    lines = [f"cluster={row['cluster']} {datasheet}"] if row["datasheet_only"] else []
    if row["offload"] != "none" or row["offload_activations"]:
        cluster = yaml.safe_load((ROOT / "conf" / "cluster" / f"{row['cluster']}.yaml").read_text())
        memory = cluster["hardware"].get("host_memory")
        share = (
            float(memory.removesuffix("GB")) * 1e9 / min(cluster["gpus_per_node"], row["world_size"]) if memory else 0
        )
        has = f"of which it has {size_text(share)}" if memory else "which no plan checks"
        lines.append(
            f"A device needs {size_text(row['host_bytes'])} of its host's memory, {has}, and up to twice"
            " as much where torch rounds pinned memory to powers of two; copies to the host are predicted by the"
            " datasheet of its link alone."
        )
    batch, devices = row["global_batch"], row["world_size"]
    reason = "as in a run" if batch != devices else "one sequence for each device, where a run has 48 in all"
    return [*lines, f"train.global_batch=auto became {batch}, {reason}: give train.global_batch for your own."]


def to_run(settings: Sequence[str], best: Sequence[Row]) -> list[str]:
    """Return the sentences on how the fastest layout is run, which name what was planned and the row's overrides."""
    if not best or best[0]["stack"] != "harness":
        return []
    kept = [word for word in settings if not re.match(r"(strategy|checkpointing|train\.micro_batch|stack)\b", word)]
    return [
        f"Run the fastest with: harness {' '.join([*kept, best[0]['overrides']])}",
        "With launch=simulated as well it runs one rank's code without the devices.",
    ]


def unexplained(
    lines: Sequence[str], rows: Sequence[Row], settings: Sequence[str] = (), page: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the lines of a plan, after its table and labels, that do not follow from its rows.

    `settings` are the overrides of a search, `page` the data of its page.
    """
    front = page["front"] if page else []
    expected = [*separations(rows), *smaller(rows, front), counts(page), *to_run(settings, rows)] if page else []
    known = [*expected]
    if page and not any(row["offload"] == "none" and not row["offload_activations"] for row in rows):
        known += ["No layout is predicted to fit without the host's memory, so that offload was searched, too."]
    known += [line for row in [*rows, *front[:1]] for line in notes(row)]
    shown = [*front[:1], *front[-1:], *rows]
    misfits = tuple(misfit(row) for row in shown if needed(row) > row["memory_limit_bytes"])
    wrong = [f"missing: {line}" for line in expected if line not in lines]
    for line in lines:
        number, _, text = line.partition(": ")
        if number.isdigit():
            row = rows[int(number) - 1]
            sent = text.startswith("sent by") and sent_is_right(text, row)
            is_right = sent or text in detail(row) or derived(text, row)
        else:
            is_right = line in known or line.startswith(misfits)
        wrong += [] if is_right else [line]
    return wrong


def derived(text: str, row: Row) -> bool:
    """Return whether a derivation gives the figure that the row has."""
    match = re.match(r"(\w+) = ([^ ]+): ", text)
    if not match or match[1] not in row:
        return False
    value = row[match[1]]
    if isinstance(value, str):
        return value == match[2].rstrip(":")
    return math.isclose(float(match[2]), value, rel_tol=1e-3, abs_tol=1e-12)
