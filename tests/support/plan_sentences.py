"""The sentences of a plan worked out again from its rows, by code that shares nothing with the planner's.

Every line that a plan prints must be one of these, with the figures that its rows have.
"""

import itertools
import math
import re
import tomllib
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
    words[-1] += " by Ulysses" if row.get("context_parallel") == "ulysses" else ""
    words += [f"secondary shards of {parts} ranks"] if (parts := row.get("secondary_shards")) else []
    quantized = ["parameters gathered in 8 bits", "gradients exchanged in 4 bits"]
    words += quantized if row["strategy"] == "zero3_plus_plus" else []
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


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    units = ((5400, 60, "{:.0f} min"), (48 * 3600, 3600, "{:.1f} h"), (math.inf, 86400, "{:,.1f} days"))
    return next(text.format(seconds / unit) for limit, unit, text in units if seconds < limit)


def decision(row: Row, is_choice: bool, tokens: float = 1e9) -> list[str]:
    """Return what a plan decides on its fastest layout, and how sure that is, as far as the row says it."""
    peak, needed_bytes = row["predicted_peak_bytes"], row["device_bytes"]
    beyond = needed_bytes - needed(row)
    reserve = f", up to {size_text(beyond)} that torch's allocator may not give back" if beyond else ""
    seconds = tokens * row["predicted_step_seconds"] / row["global_batch"] / row["seq_len"]
    price = row["cost_per_billion_tokens"]
    hour = price and price / row["world_size"] / (seconds * 1e9 / tokens / 3600)
    low, high = (row[f"predicted_step_{end}_seconds"] / row["predicted_step_seconds"] for end in ("low", "high"))
    name = range_of(row)[0].removesuffix(" on file")
    limits = size_text(row["predicted_peak_low_bytes"]), size_text(row["predicted_peak_high_bytes"])
    fits = {"likely": "is likely to fit", "tight": "may run out of memory"}[row["fits"]]
    fit, needs = ("fits", "needs") if row["fits"] == "likely" else ("may fit", "may need")
    return [
        f"{f'The fastest that {fit} is ' if is_choice else ''}{label(row)}: it {needs} {size_text(needed_bytes)} of a"
        f" device's {size_text(row['memory_limit_bytes'])} ({size_text(peak)} allocated{reserve}), and trains"
        f" {tokens / 1e9:,.10g} billion tokens in {duration(seconds)}"
        + (f" for {price * tokens / 1e9:,.0f} at {hour:.4g} a device-hour." if price else "."),
        f"How sure: it {fits}: tensors need {limits[0]} to {limits[1]} of"
        f" {size_text(row['memory_limit_bytes'] - row['process_bytes'])}, by the error of earlier predictions for"
        f" {name}. Nine of ten such trainings should take {duration(low * seconds)} to {duration(high * seconds)}: ",
    ]


def separations(choices: Sequence[Row]) -> list[str]:
    """Return which choices tie with the first, and of every other what it saves and what its step takes longer for."""
    ties, lines = [], []
    for row in choices[1:]:
        own, other = parts_of_step(row), parts_of_step(choices[0])
        part = max(own, key=lambda name: own[name] - other[name])
        less = f"{size_text(choices[0]['predicted_peak_bytes'] - row['predicted_peak_bytes'])} less"
        if row["predicted_step_seconds"] <= 1.03 * choices[0]["predicted_step_seconds"]:
            ties.append(f"{label(row)}, which allocates {less}")
            continue
        verb = "take" if part.startswith("copies") else "takes"
        cause = f"its {part} {verb} {own[part]:.4g} s a step, and {other[part]:.4g} s in the first"
        lines.append(f"{label(row)} allocates {less} and {longer(row, choices[0])}: {cause}.")
    return [f"As fast within 3 %, which plans cannot tell apart: {'; '.join(ties)}."] * bool(ties) + lines


def is_chosen_well(choices: Sequence[Row], front: Sequence[Row]) -> bool:
    """Return whether each choice fits and saves memory, and no layout of the front that does was left out."""
    if not choices:
        return not any(needed(row) <= row["memory_limit_bytes"] and row["fits"] != "no" for row in front)
    peaks, seconds = ([row[f"predicted_{name}"] for row in choices] for name in ("peak_bytes", "step_seconds"))
    faster = [row["fits"] for row in front if row["predicted_step_seconds"] < seconds[0]]
    starts = (choices[0]["fits"] == "likely" and "likely" not in faster) or {"likely"}.isdisjoint(
        row["fits"] for row in front
    )
    falls = all(later < 0.99 * earlier for earlier, later in itertools.pairwise(peaks))
    last = seconds[-1] if len(choices) == 5 else math.inf
    passed = [row for row in front if seconds[0] <= row["predicted_step_seconds"] <= last and row["fits"] != "no"]
    saves = (
        row["predicted_peak_bytes"]
        < 0.99 * min(peak for peak, time in zip(peaks, seconds, strict=True) if time <= row["predicted_step_seconds"])
        for row in passed
    )
    return (
        starts
        and falls
        and seconds == sorted(seconds)
        and not any(saves)
        and all(row["fits"] != "no" for row in choices)
    )


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
    bound = " (its state)" if limits[0] == state else ""
    available = row["memory_limit_bytes"] - row["process_bytes"]
    seconds = ", ".join(f"{part} {size:.4g} s" for part, size in parts_of_step(row).items() if size)
    return [
        f"memory: rank {row['peak_rank']} peaks at {peak} in {row['peak_phase']}: {parts}{more}.",
        f"fits: {row['fits']}: tensors need {size_text(limits[0])}{bound} to {size_text(limits[1])} of"
        f" {size_text(available)}, as measured peaks of {name} were {low} to {high} of predicted ones.",
        f"step: {row['predicted_step_seconds']:.4g} s: {seconds}.",
    ]


def sent_is_right(line: str, row: Row) -> bool:
    """Return whether what is sent has the bytes of the row's columns of communication, and all of them."""
    columns = {name: row[name] for name in row if re.fullmatch("communication_.+_bytes", name) and row[name]}
    text = line.removeprefix("sent by one rank in a step: ").removesuffix(".")
    if between := row["between_nodes_bytes"]:
        within = size_text(row["communication_bytes"] - between)
        text = text.removesuffix(f"; {size_text(between)} a device go between nodes, and {within} within")
    if parts := row.get("secondary_shards"):
        text = text.removesuffix(f", of it {size_text(row['secondary_bytes'])} among {parts} neighboring ranks")
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
        f"{label(row)} would take {row['predicted_step_seconds']:.4g} s a step, but needs {size_text(needed(row))}; a"
        f" device has {size_text(row['memory_limit_bytes'])}: "
    )


def notes(row: Row) -> list[str]:
    """Return the sentences on what a plan rests on that its row says itself."""
    datasheet = "is datasheet-only: no published measurement stands behind its efficiencies."
    lines = [f"cluster={row['cluster']} {datasheet}"] if row["datasheet_only"] else []
    if row.get("recipe"):
        passes = "fused" if row["compile"] else "separate"
        lines.append(
            f"precision.recipe={row['recipe']}: the products of the layers' projections are planned at"
            f" {scaled_rate(row):.3g} times the rate of bfloat16, as the datasheet has it, and their casts as {passes}"
            " passes through memory. Attention, head and loss stay in 16 bits."
        )
    if row["offload"] != "none" or row["offload_activations"]:
        cluster = cluster_of(row)
        memory = cluster["hardware"].get("host_memory")
        share = (
            float(memory.removesuffix("GB")) * 1e9 / min(cluster["gpus_per_node"], row["world_size"]) if memory else 0
        )
        has = f" and has {size_text(share)}" if memory else ", which no plan checks"
        lines.append(
            f"A device needs {size_text(row['host_bytes'])} of its host's memory{has}. Torch may round pinned memory up"
            " to powers of two, at most twice as much. Copies to the host are predicted by the datasheet of its link"
            " alone."
        )
    batch, devices = row["global_batch"], row["world_size"]
    reason = "as in a run" if batch != devices else "one sequence for each device; a run has 48 in all"
    chosen = f"train.global_batch=auto became {batch}, {reason}. Set train.global_batch for your own."
    return [*lines, left_out(row), chosen]


def scaled_rate(row: Row) -> float:
    """Return the ratio of the device's peaks in the recipe's format and in bfloat16."""
    table = tomllib.loads((ROOT / "harness" / "config" / "devices.toml").read_text())["device"]
    name = cluster_of(row)["hardware"]["device_name"]
    flops = next(entry["names"][name].get("flops", entry.get("flops")) for entry in table if name in entry["names"])
    formats = {"tensorwise": "float8_e4m3fn", "rowwise": "float8_e4m3fn"}
    return float(flops[formats.get(row["recipe"], row["recipe"])] / flops["bfloat16"])


def cluster_of(row: Row) -> dict[str, Any]:
    """Return the file of a row's cluster, one of the current folder first."""
    place = Path("conf", "cluster", f"{row['cluster']}.yaml")
    cluster: dict[str, Any] = yaml.safe_load((place if place.exists() else ROOT / place).read_text())
    return cluster


def left_out(row: Row) -> str:
    """Return what a training needs beside what is planned."""
    dtype, width = {"fp32": ("float32", 4), "fp16_mixed": ("float16", 2)}.get(row["precision"], ("bfloat16", 2))
    whole, processes = width * row["parameters"], min(cluster_of(row)["gpus_per_node"], row["world_size"])
    return (
        f"Not planned: evaluation, sequences longer than train.seq_len={row['seq_len']}, and host memory for a"
        f" checkpoint in {dtype}: {size_text(processes * whole)} a node if each process loads the whole model,"
        f" {size_text(whole)} if rank 0 gathers it."
    )


def to_run(settings: Sequence[str], best: Sequence[Row]) -> list[str]:
    """Return the sentences on how the fastest layout is run, which name what was planned and the row's overrides."""
    if not best or best[0]["stack"] != "harness":
        return []
    chosen = r"(strategy|checkpointing|train\.micro_batch|stack|plan\.tokens|plan\.simulate)\b"
    kept = " ".join([*(word for word in settings if not re.match(chosen, word)), best[0]["overrides"]])
    return [f"Measure it: harness {kept}", f"Export it: harness export --plan {kept} --to FOLDER"]


BASES = (
    "steps of this stack were measured on this device",
    "steps of this stack and steps on clusters of this device were measured, but not both at once",
    "no steps were measured on this device",
    "no times are fitted to a mixture of experts",
)


def tokens_of(settings: Sequence[str]) -> float:
    """Return the tokens of a training that a plan was asked for, else a billion."""
    return next((float(word.partition("=")[2]) for word in settings if word.startswith("plan.tokens=")), 1e9)


def unexplained(
    lines: Sequence[str],
    rows: Sequence[Row],
    settings: Sequence[str] = (),
    page: Mapping[str, Any] | None = None,
    decides: bool = True,
) -> list[str]:
    """Return the lines of a plan, after its table and labels, that do not follow from its rows.

    `settings` are the overrides of a search, `page` the data of its page. Two layouts side by side decide nothing.
    """
    front = page["front"] if page else []
    expected = [*separations(rows), counts(page), *to_run(settings, rows)] if page else []
    expected += [left_out(row) for row in [*rows, *front[-1:]][:1]]
    expected += ["No layout of this model fits these devices."] * bool(page and not rows)
    fitting = [row for row in rows if decides and needed(row) <= row["memory_limit_bytes"]]
    decided = [line for row in fitting[:1] for line in decision(row, bool(page), tokens_of(settings))]
    known = [*expected]
    if page and not any(row["offload"] == "none" and not row["offload_activations"] for row in rows):
        known += ["No layout is predicted to fit without the host's memory. Offload was searched, too."]
    known += [line for row in [*rows, *front[:1]] for line in notes(row)]
    shown = [*front[:1], *front[-1:], *rows]
    misfits = tuple(misfit(row) for row in shown if needed(row) > row["memory_limit_bytes"])
    wrong = [f"missing: {line}" for line in expected if line not in lines]
    wrong += [f"missing: {start}" for start in decided if not any(line.startswith(start) for line in lines)]
    first = rows[0]["predicted_step_seconds"] if page and rows else math.inf
    for row in front[:1]:
        saved = 100 * (1 - row["predicted_step_seconds"] / first)
        more = f"{label(row)} would take {saved:.1f} % less time, on devices with {size_text(row['device_bytes'])}."
        is_worth = needed(row) > row["memory_limit_bytes"] and first > 1.03 * row["predicted_step_seconds"]
        line = misfit(row) if first == math.inf else more
        known.append(more)
        if any(text.startswith(line) for text in lines) != is_worth:
            wrong.append(f"{'missing' if is_worth else 'needless'}: {line}")
    risky = [row for row in front if row["fits"] == "tight" and 1.03 * row["predicted_step_seconds"] < first < math.inf]
    for row in risky[:1]:
        saved = f"takes {100 * (1 - row['predicted_step_seconds'] / first):.1f} % less time, but may run out of memory:"
        wrong += [] if any(f" {saved} " in line for line in lines) else [f"missing: {saved}"]
    wrong += [] if not page or is_chosen_well(rows, front) else ["the choices are not those of the front"]
    for line in lines:
        number, _, text = line.partition(": ")
        if number.isdigit():
            row = rows[int(number) - 1]
            sent = text.startswith("sent by") and sent_is_right(text, row)
            is_right = sent or text in detail(row) or derived(text, row)
        else:
            ends = tuple(f"{decided[1]}{basis}." for basis in BASES) if decided else ()
            is_risk = " less time, but may run out of memory: its tensors need " in line
            is_right = line in known or is_risk or line.startswith(misfits) or line in (*decided[:1], *ends)
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
