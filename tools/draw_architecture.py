#!/usr/bin/env python3
"""Draws docs/architecture.svg: the rooms of the branch, and the life of one step.

    python tools/draw_architecture.py

Its ground is white and its texts are texts, in whatever fonts a viewer has.
"""

from __future__ import annotations

import sys
from pathlib import Path


try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ImportError as missing:
    sys.exit(f"error: {missing}: run `make setup` first")


OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "architecture.svg"
WIDTH, HEIGHT = 980, 942
# Of each dtype, in all pictures. Others show gathers in blue and reductions in orange.
DTYPE_COLORS = {"fp32": "#6bb36b", "bf16": "#b093d6", "fp16": "#e6c34d"}
COLORS = {**DTYPE_COLORS, "pad": "#d0d0d0"}
# Of one rank's shards, in the order of the parameters: dtype, width in pixels.
SHARDS = [("bf16", 34), ("fp32", 20), ("bf16", 26), ("fp16", 20), ("fp32", 14)]
ORDER = ("fp32", "bf16", "fp16")
RANKS = 4
# Each file imports from rows below its own, or from its right. The middle is what a
# step goes through, and None is no file.
ROOMS = [
    [
        ("_fsdp_settings", "what users set"),
        ("_fsdp_param_group", "when it moves"),
        ("_fsdp_summary", "tables"),
    ],
    [("_fsdp_registrations", "what modules have"), None, ("_fsdp_agreement", "do ranks agree")],
    [
        ("_fsdp_context", "streams of all units"),
        ("_fsdp_grads", "gradients become buckets"),
        ("_fsdp_described_unit", "for the two above"),
    ],
    [None, ("_fsdp_collectives", "what moves"), ("_fsdp_copies", "into buffers, and out")],
    [
        ("_fsdp_compat", "names for plugins"),
        ("_fsdp_param_cache", "cached between steps"),
        ("_fsdp_comms", "backends and operators"),
    ],
    [
        ("_fsdp_scaling", "divide factors"),
        ("_fsdp_dtypes", "dtypes of a parameter"),
        ("_fsdp_errors", "what was wrong"),
    ],
    [
        ("_fsdp_observers", "who looks at a step"),
        ("_fsdp_layout", "where it lies"),
        ("_fsdp_policies", "policies, dtypes by name"),
    ],
    [
        ("_fsdp_fast_paths", "cheaper hooks"),
        ("_fsdp_tree", "sums in one order"),
        ("_fsdp_release", "what the release has"),
    ],
]  # fmt: skip
# What training does not need, and which knows no parameter group
BESIDE = (
    "_fsdp_settings",
    "_fsdp_summary",
    "_fsdp_agreement",
    "_fsdp_described_unit",
    "_fsdp_errors",
    "_fsdp_policies",
)
KEY = (
    "A file imports only from rows below its own, or from its right. Dashed: training "
    "does not need it, and it knows no parameter group."
)


class Drawing:
    """A picture in pixels, from its upper left corner."""

    def __init__(self) -> None:
        # Of 72 pixels an inch, a point of text is a pixel
        self.figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1), frameon=False)
        self.axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0), xticks=(), yticks=())

    def box(
        self, x: int, y: int, width: int, height: int, fill: str, line: str = "#444",
        *, dashed: bool = False,
    ) -> None:  # fmt: skip
        style = (0, (5, 3)) if dashed else "solid"
        box = Rectangle((x, y), width, height, fc=fill, ec=line, ls=style, lw=1)
        self.axes.add_patch(box)

    def text(
        self, x: int, y: int, text: str, size: int = 13, *, bold: bool = False,
        mono: bool = False, centered: bool = False,
    ) -> None:  # fmt: skip
        self.axes.text(
            x, y, text, size=size, color="#222", weight="bold" if bold else "normal",
            family="monospace" if mono else "sans-serif",
            ha="center" if centered else "left",
        )  # fmt: skip

    def arrow(self, x: int, y: int, width: int = 0, height: int = 0) -> None:
        style = {"arrowstyle": "-|>", "color": "#444", "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", (x + width, y + height), (x, y), arrowprops=style)

    def pieces(self, x: int, y: int, pieces: list[tuple[str, int]]) -> int:
        """Draws adjacent pieces of a buffer; returns where they end."""
        for kind, width in pieces:
            self.box(x, y, width, 26, COLORS[kind], "#fff")
            x += width
        return x


def save(figure: Figure, path: Path) -> None:
    """Writes the same bytes whenever it is run: no date, and no random names."""
    settings = {"svg.hashsalt": "fsdp2", "svg.fonttype": "none"}
    with matplotlib.rc_context(settings):
        figure.savefig(path, metadata={"Date": None})
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def draw_rooms(drawing: Drawing) -> None:
    width, height, pitch = 182, 44, 58
    columns = (60, 399, 738)
    for row, rooms in enumerate(ROOMS):
        y = 20 + row * pitch
        xs = columns if len(rooms) == 3 else range(7, 980, 196)
        for x, room in zip(xs, rooms):
            if room is not None:
                file, role = room
                drawing.box(x, y, width, height, "#f4f1ea", dashed=file in BESIDE)
                middle = x + width // 2
                drawing.text(middle, y + 18, file, 12, mono=True, centered=True)
                drawing.text(middle, y + 35, role, 12, centered=True)
    middle, previous = columns[1] + width // 2, 0
    for row in (2, 3, 4, 5, 6):
        start = 20 + previous * pitch + height
        drawing.arrow(middle, start, height=20 + row * pitch - start)
        previous = row
    drawing.text(20, 20 + len(ROOMS) * pitch + 6, KEY, 12)


def draw_key(drawing: Drawing, y: int) -> None:
    x = 620
    for kind, color in COLORS.items():
        drawing.box(x, y - 11, 14, 14, color, "#fff")
        drawing.text(x + 20, y, "padding" if kind == "pad" else kind, 12)
        x += 82


def draw_step(drawing: Drawing, x: int, y: int, name: str, function: str) -> int:
    """Draws an arrow with what it does and the function that does it."""
    length = 168
    drawing.arrow(x + 8, y + 13, length - 16)
    drawing.text(x + length // 2, y + 5, name, 12, centered=True)
    drawing.text(x + length // 2, y + 31, function, 10, mono=True, centered=True)
    return x + length


def draw_gather(drawing: Drawing, y: int) -> None:
    drawing.text(20, y, "Before forward and before backward: one gather", 15, bold=True)
    draw_key(drawing, y)
    y += 22
    by_dtype = [shard for kind in ORDER for shard in SHARDS if shard[0] == kind]
    segment = [*by_dtype, ("pad", 8)]
    x = drawing.pieces(20, y, SHARDS)
    drawing.text(20, y + 44, "a rank's shards", 12)
    x = draw_step(drawing, x, y, "copy-in, typed", "_copy_in")
    start, x = x, drawing.pieces(x, y, segment)
    drawing.text(start, y + 44, "segment: widest first", 12)
    # Into the buffer, which is the next row
    middle = (start + x) // 2
    drawing.arrow(middle, y + 52, height=38)
    drawing.text(middle + 14, y + 69, "one all-gather", 12)
    drawing.text(middle + 14, y + 83, "foreach_all_gather", 10, mono=True)
    y += 94
    x = 20
    for _ in range(RANKS):
        x = drawing.pieces(x, y, segment) + 3
    drawing.text(20, y + 44, "buffer: one segment for each rank", 12)
    x = draw_step(drawing, x, y, "copy-out, as bytes", "_split_copy")
    for kind, width in SHARDS:
        drawing.pieces(x, y, [(kind, width)])
        x += width + 6
    drawing.text(x - 144, y + 44, "whole parameters", 12)


def draw_reduction(drawing: Drawing, y: int) -> None:
    drawing.text(20, y, "After backward: one reduction for each reduce dtype", 15, bold=True)  # fmt: skip
    y += 22
    before = {"fp32": "AVG", "bf16": "AVG", "fp16": "÷ 4, then SUM"}
    after = {"fp32": "as it is", "bf16": "as it is", "fp16": "÷ 2"}
    for kind in ORDER:
        grads = [shard for shard in SHARDS if shard[0] == kind]
        width = sum(width for _, width in grads)
        drawing.pieces(20, y, grads)
        drawing.text(98, y + 17, f"gradients in {kind}", 12)
        x = draw_step(drawing, 206, y, "copy-in", "_reduce_copy_in")
        drawing.pieces(x, y, [(kind, width)])
        drawing.text(x + width + 8, y + 17, "bucket", 12)
        x = draw_step(drawing, 500, y, before[kind], "_reduce_scatter")
        drawing.pieces(x, y, [(kind, width // 2)])
        drawing.text(x + 44, y + 17, after[kind], 12)
        drawing.text(x + 106, y + 17, f"sharded .grad, {kind}", 12)
        y += 46
    drawing.text(
        20, y + 12, "Factors for 8 ranks, from _get_gradient_divide_factors in "
        "_fsdp_scaling.py. With HSDP an all-reduce follows each.", 12,
    )  # fmt: skip


def draw(path: Path) -> None:
    drawing = Drawing()
    draw_rooms(drawing)
    draw_gather(drawing, 528)
    draw_reduction(drawing, 744)
    save(drawing.figure, path)


if __name__ == "__main__":
    draw(OUTPUT)
