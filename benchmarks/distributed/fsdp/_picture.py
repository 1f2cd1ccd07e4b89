"""Draws what the streams of some steps did, each step below the one before it."""

from pathlib import Path
from typing import Any


# Its copy docs/timeline.svg is what the pages show
PICTURE = Path(__file__).resolve().parents[3] / "build/bench/timeline.svg"
WIDTH, MARGIN, LEFT, ROW, PER_MS = 840, 14, 130, 19, 13.4  # pixels
ROWS = ("copy-in", "all-gather", "compute", "reduce-scatter")
COLORS = {"compute": "#4c78a8", "collective": "#f58518", "copy": "#54a24b"}
# With a background of its own: the reader's may be light or dark
STYLE = """<style>
text { font: 14px sans-serif; fill: #1f2328 } .page { fill: #ffffff }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .page { fill: #161b22 } }
</style>"""


def caption(step: dict[str, Any]) -> str:
    sent = [nbytes for *_, nbytes in step["spans"] if nbytes]
    return f"{len(sent)} collectives, {sum(sent) / 1e9:.2f} GB sent"


def text(x: float, y: float, words: str, **attributes: str) -> str:
    more = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.0f}" y="{y}"{more.replace("_", "-")}>{words}</text>'


def panel(title: str, step: dict[str, Any], top: float) -> str:
    """Returns a title, and below it a row for each stream, whose name is beside it."""
    streams: dict[str, list[tuple[str, float, float]]] = {}
    for stream, what, begin, end, _ in step["spans"]:
        streams.setdefault(stream, []).append((what, begin, end - begin))
    # A stream is named after its longest span
    named = ((max(spans, key=lambda s: s[2])[0], spans) for spans in streams.values())
    rows = dict(named)
    end, took = LEFT + step["ms"] * PER_MS, f"{step['ms']:.1f} ms"
    lines = [
        text(MARGIN, top, f"{title}: {caption(step)}", font_weight="bold"),
        text(end, top, took, font_weight="bold", text_anchor="end"),
    ]
    for name in sorted(rows, key=ROWS.index):
        top += ROW
        lines.append(text(LEFT - 8, top, name, text_anchor="end"))
        paths = dict.fromkeys(COLORS, "")
        for what, begin, us in rows[name]:
            other = "copy" if "copy" in what else "collective"
            kind = what if what in COLORS else other
            # Less the border of a pixel, and wide enough to be seen
            width = max(us / 1e3 * PER_MS - 1, 1)
            x = LEFT + begin / 1e3 * PER_MS
            paths[kind] += f"M{x:.1f} {top - 12}h{width:.1f}v14h-{width:.1f}z"
        for kind, path in paths.items():
            lines += [f'<path fill="{COLORS[kind]}" d="{path}"/>'] if path else []
    path = f"M{end:.1f} {top + 4}v-{ROW * len(rows)}"
    return "".join((*lines, f'<path stroke="#d1242f" stroke-width="2" d="{path}"/>'))


def draw(steps: dict[str, dict[str, Any]]) -> None:
    what = "A step of six blocks of two dtypes on one of 8 ranks (simulated streams)"
    lines, top = [text(MARGIN, 26, what)], 54
    for title, step in steps.items():
        lines.append(panel(title, step, top))
        top += 28 + ROW * len({stream for stream, *_ in step["spans"]})
    for x, (kind, color) in zip((LEFT, LEFT + 110, LEFT + 220), COLORS.items()):
        square = f'<path fill="{color}" d="M{x} {top - 11}h12v12h-12z"/>'
        lines.append(square + text(x + 18, top, kind))
    size = f'width="{WIDTH}" height="{top + 14}"'
    spoken = "; ".join(f"{title}: {step['ms']:.1f} ms" for title, step in steps.items())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} '
        f'viewBox="0 0 {WIDTH} {top + 14}">',
        f"<title>{what}. {spoken}</title>",
        STYLE,
        f'<rect class="page" {size} rx="6"/>',
    )
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text("\n".join((*head, *lines, "</svg>", "")))
