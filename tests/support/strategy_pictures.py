"""The pictures of docs/pictures.md: what each of four ranks holds under a strategy, and the way of a command.

A layout itself says which part a rank holds (`harness.layout.layout.Layout`), as to engines, planner and proof.
`python -m tests.support.reference_pages` writes the pictures; tests/unit/test_docs.py checks that they are current.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from harness.layout.layout import Layout, resolve_layout
from tests.support.commands import compose_config

RANKS = 4

LAYERS = 4  # the rows of every block

PARTS = 8  # the columns of a block of model state: parts of every matrix

SEQUENCES = 4  # the columns of a block of activations: the global batch

KINDS = {"parameters": "#2f6fab", "gradients": "#c1662b", "optimizer": "#5d8a2f", "activations": "#85509f"}

BLOCK = (88, 64)  # the pixels of a block of state or activations

RANK = (212, 196)  # the pixels of a rank's frame

MARGIN = 12

# What ranks send in a step with one micro-batch, by strategy.
SENT = {
    "ddp": "Gradients: all-reduce, once a step.",
    "zero1": "Gradients: reduced to the rank that owns their part. Updated parameters: all-gather, once a step.",
    "zero2": "Gradients: reduced to their owners as soon as they are there. Updated parameters: all-gather.",
    "zero3": "Parameters: all-gather of every layer, in forward and in backward. Gradients: reduced to their owners.",
    "fsdp_shard_grad_op": "Parameters: all-gather once, whole until backward ends. Gradients: reduce-scatter.",
    "fsdp_full_shard": "Parameters: all-gather of every layer, in forward and in backward. Gradients: reduce-scatter.",
    "fsdp_hybrid_shard": "Within a pair: as fsdp_full_shard. Between the pairs: all-reduce of each shard's gradients.",
    "tp": "Activations: two all-reduces in every layer, in forward and again in backward.",
    "tp_sp": "Activations: all-gathers and reduce-scatters in the place of the all-reduces of tp.",
    "pp_1f1b": "Activations and their gradients at the edges of stages, from neighbor to neighbor.",
    "cp": "Keys and values: all-gather; their gradients: reduce-scatter. Gradients of parameters: as ddp.",
    "cp_ulysses": "Heads for parts of sequences: all-to-alls around attention. Gradients of parameters: as ddp.",
    "fsdp_tp": "Along tp: activations in every layer. Along dp_shard: parameters and gradients, as fsdp_full_shard.",
}

Cell = tuple[float, float, float, float]  # x, y, width and height, as shares of a block


@dataclass(frozen=True)
class Holding:
    """What a rank has of a kind: between steps or passes, and besides for a moment."""

    kept: list[Cell]
    passing: list[Cell]


def held(layout: Layout, rank: int, kind: str) -> Holding:
    """Return what a rank has of parameters, gradients, optimizer or activations."""
    places = layout.coordinates(rank)
    rows = range(places["pp"] * LAYERS // layout.pp, (places["pp"] + 1) * LAYERS // layout.pp)
    if kind == "activations":
        return Holding(list(activations(layout, rank, rows)), [])
    width = PARTS // layout.tp
    columns = range(places["tp"] * width, (places["tp"] + 1) * width)
    own = [(row, column) for row in rows for column in columns]
    shards = layout.shard_count(kind)
    index = layout.shard_index(rank) if shards > 1 else 0
    if layout.zero_stage < 3 and layout.data_parallel != "fsdp":  # a flat buffer, whose parts are runs of layers
        kept = own[index * len(own) // shards : (index + 1) * len(own) // shards]
    else:
        kept = [(row, column) for row, column in own if (column - columns[0]) * shards // width == index]
    passing = [] if kind == "optimizer" else [place for place in own if place not in kept]
    return Holding([state_cell(*place) for place in kept], [state_cell(*place) for place in passing])


def state_cell(row: int, column: int) -> Cell:
    """Return the cell of a part of a layer's matrices."""
    return column / PARTS, row / LAYERS, 1 / PARTS, 1 / LAYERS


def activations(layout: Layout, rank: int, rows: range) -> Iterator[Cell]:
    """Yield what a rank keeps of each layer and sequence: slices by width under tp, by tokens under cp and tp_sp."""
    places, per_rank = layout.coordinates(rank), SEQUENCES // layout.dp
    first, tokens = layout.data_rank(rank) * per_rank, 2 * layout.cp
    for row in rows:
        for column in range(first, first + per_rank):
            for start, stop in layout.sequence_chunks(rank, tokens):
                x, y = column + places["tp"] / layout.tp, row + start / tokens
                yield x / SEQUENCES, y / LAYERS, 1 / layout.tp / SEQUENCES, (stop - start) / tokens / LAYERS


def picture(name: str) -> str:
    """Return the SVG of a strategy on four ranks."""
    layout = resolve_layout(compose_config(f"strategy={name}").strategy, RANKS)
    degrees = " × ".join(f"{axis} {size}" for axis, size in layout.axis_sizes.items() if size > 1)
    width, height = RANKS * RANK[0] + MARGIN, RANK[1] + 78
    lines = [
        opening(width, height),
        f'<text x="{MARGIN}" y="22" font-size="15" font-weight="bold">{name}</text>',
        f'<text x="{width - MARGIN}" y="22" text-anchor="end" fill="#555">{degrees}</text>',
        *(line for rank in range(RANKS) for line in frame(layout, rank)),
        f'<text x="{MARGIN}" y="{height - 14}"><tspan font-weight="bold">Sent:</tspan> {SENT[name]}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def opening(width: int, height: int) -> str:
    """Return the beginning of a picture of so many pixels, which is white in dark themes, too."""
    size = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="{width}" height="{height}" fill="white"/>'


def frame(layout: Layout, rank: int) -> Iterator[str]:
    """Yield a rank's frame with its four blocks."""
    left, top = MARGIN + rank * RANK[0], 34
    box = f'width="{RANK[0] - MARGIN}" height="{RANK[1]}" rx="4" fill="none" stroke="#999"'
    yield f'<rect x="{left}" y="{top}" {box}/>'
    yield f'<text x="{left + 8}" y="{top + 17}" fill="#555">rank {rank}</text>'
    for place, (kind, color) in enumerate(KINDS.items()):
        x, y = left + 8 + place % 2 * (BLOCK[0] + 8), top + 42 + place // 2 * (BLOCK[1] + 20)
        yield f'<text x="{x}" y="{y - 4}">{kind}</text>'
        yield f'<rect x="{x}" y="{y}" width="{BLOCK[0]}" height="{BLOCK[1]}" fill="#f1f1f1"/>'
        holding = held(layout, rank, kind)
        yield shape(x, y, holding.passing, color, 0.3)
        yield shape(x, y, holding.kept, color, 1)


def shape(left: float, top: float, cells: list[Cell], color: str, opacity: float) -> str:
    """Return cells of a block as one shape, with thin gaps between them."""
    outlines = []
    for cell in cells:
        x, y, width, height = (share * BLOCK[number % 2] for number, share in enumerate(cell))
        width, height = width - min(0.8, width / 4), height - min(0.8, height / 4)
        outlines.append(f"M{left + x:.5g} {top + y:.5g}h{width:.3g}v{height:.3g}h{-width:.3g}z")
    return f'<path d="{"".join(outlines)}" fill="{color}" fill-opacity="{opacity}"/>'


# The boxes of the picture of the architecture, by name: column, row, title, what it says below, color; then its arrows.
BOXES = {
    "command": (0, 1, "harness", "command line, sweeps/, conf/", "#f1f1f1"),
    "config": (1, 1, "config", "Hydra, then plain data", "#dbe7f3"),
    "layout": (2, 1, "layout", "degrees; what is refused", "#dbe7f3"),
    "planner": (2, 0, "cost_model, planner", "memory, time, bytes sent", "#e4edd9"),
    "plan": (3, 0, "plan", "the answer of harness plan", "#f1f1f1"),
    "runner": (3, 1, "runner, launcher", "one run: lock, ranks, limits", "#dbe7f3"),
    "worker": (4, 1, "worker", "one loop on every rank", "#f6e3d7"),
    "simulator": (4, 0, "simulator", "one rank without its GPU", "#f6e3d7"),
    "engines": (5, 1, "engines, models", "torch, DeepSpeed, Accelerate", "#f6e3d7"),
    "measure": (5, 2, "measure", "time, memory, bytes, shards", "#f6e3d7"),
    "reports": (4, 2, "rank reports", "a file of every rank", "#f1f1f1"),
    "proof": (3, 2, "proof, metrics", "status and columns", "#e9deef"),
    "record": (2, 2, "record.json, runs.csv", "one row for every run", "#f1f1f1"),
    "report": (1, 2, "report, export, tracking", "pages, scripts, trackers", "#e4edd9"),
}

ARROWS = (
    *("command>config", "config>layout", "layout>planner", "planner>plan", "layout>runner", "runner>worker"),
    *("runner>simulator", "worker>engines", "simulator>engines", "engines>measure", "measure>reports"),
    *("reports>proof", "proof>record", "record>report"),
)

BOX = (172, 52)

STEP = (200, 92)  # from a box to the next column and row


def architecture() -> str:
    """Return the SVG of the way from a command to its report."""
    width, height = 6 * STEP[0] - 4, 3 * STEP[1] + 2
    lines = [
        opening(width, height),
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        *map(arrow, ARROWS),
    ]
    for column, row, title, below, color in BOXES.values():
        x, y = 12 + column * STEP[0], 20 + row * STEP[1]
        lines.append(f'<rect x="{x}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="5" fill="{color}" stroke="#888"/>')
        lines.append(f'<text x="{x + 8}" y="{y + 22}" font-weight="bold">{title}</text>')
        lines.append(f'<text x="{x + 8}" y="{y + 40}" font-size="10.5">{below}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def arrow(ends: str) -> str:
    """Return an arrow between two boxes, from the edge of one to the facing edge of the other."""
    (x, y), (to_x, to_y) = (BOXES[name][:2] for name in ends.split(">"))
    across, down = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    if across and down:
        down = 0  # leave by the side
    start = (12 + x * STEP[0] + BOX[0] * (1 + across) / 2, 20 + y * STEP[1] + BOX[1] * (1 + down) / 2)
    up = (to_y > y) - (to_y < y)
    end = (12 + to_x * STEP[0] + BOX[0] * (1 - across) / 2, 20 + to_y * STEP[1] + BOX[1] * (1 - up * (not across)) / 2)
    line = f'x1="{start[0]:.4g}" y1="{start[1]:.4g}" x2="{end[0]:.4g}" y2="{end[1]:.4g}"'
    return f'<line {line} stroke="#555" stroke-width="1.4" marker-end="url(#end)"/>'


def pictures() -> dict[str, str]:
    """Return every picture by its name."""
    return {name: picture(name) for name in SENT} | {"architecture": architecture()}
