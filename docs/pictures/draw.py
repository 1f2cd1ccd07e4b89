"""Draws the pictures of docs/index.md, from the plans that FSDP itself makes.

    python docs/pictures/draw.py [FOLDER]

A sample unit of three dtypes over two ranks is planned by ``_fsdp_layout``: what the
pictures show of order, sizes and padding is what is sent.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # where tools/ is

try:
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

    import torch
    from tools.draw_architecture import DTYPE_COLORS, save
    from torch.distributed.fsdp._fully_shard._fsdp_layout import (
        padded_shard_numel,
        plan_buckets,
        plan_gather,
        ReduceBucket,
        ReduceSlot,
    )
except ImportError as missing:
    sys.exit(f"error: {missing}: run `make setup` first")


RANKS = 2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
COLORS = {dtype: DTYPE_COLORS[name] for dtype, name in NAMES.items()}
PADDING = "white"
BAR = 0.7  # of the distance between two rows
CHARACTERS = 120  # that the width of a picture holds


@dataclass(frozen=True)
class Parameter:
    name: str
    dtype: torch.dtype
    rows: int
    columns: int

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, with its padding."""
        return padded_shard_numel(torch.Size((self.rows, self.columns)), RANKS, 0)

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize


# As a state-space layer has them, in the order of its module
UNIT = (
    Parameter("in_proj", BF16, 8, 4),
    Parameter("A_log", FP32, 4, 1),
    Parameter("gate", FP16, 4, 3),
    Parameter("out_proj", BF16, 6, 4),
    Parameter("D", FP32, 4, 1),
    Parameter("scale", BF16, 2, 3),
)


@dataclass(frozen=True)
class Piece:
    label: str
    color: str
    nbytes: int


def piece_of(param: Parameter, nbytes: int, dtype: torch.dtype | None = None) -> Piece:
    return Piece(param.name, COLORS[dtype or param.dtype], nbytes)


def draw_row(axes: Axes, y: float, start: float, pieces: Iterable[Piece]) -> float:
    """Draws pieces one after the other, and returns where they end."""
    for piece in pieces:
        hatch = "////" if piece.color == PADDING else None
        axes.barh(
            y,
            piece.nbytes,
            left=start,
            height=BAR,
            color=piece.color,
            edgecolor="black",
            linewidth=0.6,
            hatch=hatch,
        )
        # What is too narrow for its name has it upright
        room = CHARACTERS * piece.nbytes / axes.get_xlim()[1]
        axes.text(
            start + piece.nbytes / 2,
            y,
            piece.label,
            rotation=0 if len(piece.label) <= room else 90,
            ha="center",
            va="center",
            size=7 if len(piece.label) <= room else 6,
        )
        start += piece.nbytes
    return start


def shards(params: Iterable[Parameter]) -> list[Piece]:
    return [piece_of(p, p.shard_numel * p.dtype.itemsize) for p in params]


def segment() -> list[Piece]:
    """One rank's part of the gather buffer, as planned."""
    layout = plan_gather([p.dtype for p in UNIT], [p.shard_numel for p in UNIT])
    pieces = []
    for i, nbytes in layout.slots:
        pieces += shards([UNIT[i]]) if i is not None else [Piece("", PADDING, nbytes)]
    return pieces


def buckets(reduce_dtype: torch.dtype | None) -> tuple[ReduceBucket, ...]:
    """The reductions of the unit, as planned."""
    slots = [ReduceSlot(i, p.dtype, p.shard_numel) for i, p in enumerate(UNIT)]
    keys = [(reduce_dtype or p.dtype, None) for p in UNIT]
    return plan_buckets(slots, keys, is_aligned=True)


def bucket_shard(bucket: ReduceBucket, dtype: torch.dtype | None) -> list[Piece]:
    """One rank's part of a bucket, in ``dtype`` or as it is stored after."""
    pieces = []
    padding = {count: numel for count, _, numel in bucket.gaps}
    for count, slot in enumerate(bucket.slots, start=1):
        own = dtype or slot.grad_dtype or bucket.dtype
        nbytes = slot.shard_numel * own.itemsize
        pieces.append(piece_of(UNIT[slot.param], nbytes, own))
        if dtype is not None and count in padding:
            pieces.append(Piece("", PADDING, padding[count] * dtype.itemsize))
    return pieces


def finish(axes: Axes, labels: list[str], title: str) -> None:
    axes.set_yticks(range(len(labels)), labels, size=8)
    axes.invert_yaxis()
    axes.set_xlabel("bytes", size=8)
    axes.tick_params(axis="x", labelsize=7, labelbottom=True)
    axes.set_title(title, size=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def legend(figure: plt.Figure, *, has_padding: bool) -> None:
    handles = [Patch(fc=COLORS[d], ec="black", label=NAMES[d]) for d in COLORS]
    if has_padding:
        handles.append(Patch(fc=PADDING, ec="black", hatch="////", label="padding"))
    figure.legend(handles=handles, loc="outside lower right", ncols=4, fontsize=7)


def draw_gather(path: Path) -> None:
    """Parameters, shards, the buffer, and parameters again."""
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axes.set_xlim(0, 1.02 * RANKS * sum(piece.nbytes for piece in segment()))
    whole = [piece_of(param, param.nbytes) for param in UNIT]
    labels = ["parameters of the unit"]
    draw_row(axes, 0, 0, whole)
    for rank in range(RANKS):
        labels.append(f"shards of rank {rank}")
        draw_row(axes, len(labels) - 1, 0, shards(UNIT))
    labels.append("all-gather buffer")
    end: float = 0
    for rank in range(RANKS):
        start, end = end, draw_row(axes, len(labels) - 1, end, segment())
        below = len(labels) - 0.5
        text = f"segment of rank {rank}: widest dtype first"
        axes.text((start + end) / 2, below, text, ha="center", va="center", size=7)
    labels.append("unsharded parameters")
    draw_row(axes, len(labels), 0, whole)
    axes.set_ylim(-0.5, len(labels) + 0.5)
    finish(axes, labels, "One all-gather, of the parameters' own bytes")
    axes.set_yticks([*range(len(labels) - 1), len(labels)], labels, size=8)
    legend(figure, has_padding=True)
    save(figure, path)


def draw_reduce(path: Path) -> None:
    """Gradients, buckets and what each rank keeps: as they are, and all in fp32."""
    figure, panels = plt.subplots(
        2, figsize=(9, 6), layout="constrained", height_ratios=(7, 3), sharex=True
    )
    widest = sum(b.shard_numel * b.dtype.itemsize for b in buckets(FP32))
    panels[0].set_xlim(0, 1.02 * RANKS * widest)  # of both
    titles = {
        None: "One reduce-scatter for each reduce dtype (no reduce_dtype in the policy)",
        FP32: "reduce_dtype=torch.float32: one bucket, cast to each storage dtype after",
    }
    for axes, (reduce_dtype, title) in zip(panels, titles.items(), strict=True):
        labels = ["gradients of a rank"]
        draw_row(axes, 0, 0, [piece_of(param, param.nbytes) for param in UNIT])
        for bucket in buckets(reduce_dtype):
            labels.append(f"{NAMES[bucket.dtype]} bucket")
            row = len(labels) - 1
            end: float = 0
            for _ in range(RANKS):
                end = draw_row(axes, row, end, bucket_shard(bucket, bucket.dtype))
            labels.append("rank 0 keeps")
            draw_row(axes, row + 1, 0, bucket_shard(bucket, None))
        finish(axes, labels, title)
    legend(figure, has_padding=True)
    save(figure, path)


def main(folder: Path) -> None:
    plt.switch_backend("svg")
    draw_gather(folder / "gather.svg")
    draw_reduce(folder / "reduce.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
