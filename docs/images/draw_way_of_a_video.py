"""Draws way_of_a_video.svg, the picture of the README: `python docs/images/draw_way_of_a_video.py`."""

import random
from pathlib import Path

WIDTH, HEIGHT = 1105, 270
INK, SOFT, LINE, PAPER = "#1f2937", "#6b7280", "#9ca3af", "#ffffff"
BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#d1d5db"
FRAMES, SIDE = 4, 4  # frames, and tokens along a frame's sides
KEPT = {(0, 5), (0, 6), (1, 6), (1, 10), (2, 9), (2, 10), (3, 9)}  # (frame, token)


def rect(x, y, w, h, fill, stroke="none", radius=0):
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius}" fill="{fill}" stroke="{stroke}"/>'


def text(x, y, words, size=14, colour=INK, weight=400):
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}">{words}</text>'


def arrow(*points):
    way = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{way}" fill="none" stroke="{LINE}" marker-end="url(#head)"/>'


def box(x, title, lines, colour=BLUE, width=132):
    """A step of the model, with its middle on the line that the video takes."""
    y, height = 122, 96
    parts = [rect(x, y, width, height, PAPER, colour, 10), text(x + width / 2, y + 26, title, 13.5, colour, 600)]
    return parts + [text(x + width / 2, y + 48 + 17 * i, line, 11.5, SOFT) for i, line in enumerate(lines)]


def token_grids(x, kept_only, shade):
    """The frames' tokens, four little grids in two rows."""
    parts, size, gap = [], 10, 2
    for frame in range(FRAMES):
        left, top = x + (frame % 2) * 54, 118 + (frame // 2) * 54
        for token in range(SIDE * SIDE):
            column, row = token % SIDE, token // SIDE
            is_kept = (frame, token) in KEPT
            fill = ORANGE if is_kept and kept_only else shade(frame, token) if not kept_only else "none"
            stroke = GREY if kept_only and not is_kept else "none"
            parts.append(rect(left + column * (size + gap), top + row * (size + gap), size, size, fill, stroke, 2))
    return parts


def draw() -> str:
    random.seed(0)
    shades = {
        (f, t): ORANGE if (f, t) in KEPT else random.choice(("#fed7aa", "#e5e7eb", "#e5e7eb", "#d1d5db"))
        for f in range(FRAMES)
        for t in range(SIDE * SIDE)
    }
    middle = 170
    parts = [rect(0.5, 0.5, WIDTH - 1, HEIGHT - 1, PAPER, "#e5e7eb", 14)]
    # The question, above, goes to the selector and to the language model.
    parts += [rect(409, 26, 228, 36, "#eff6ff", BLUE, 18), text(523, 49, "“What colour is the cross?”")]
    parts += [arrow((503, 62), (503, 116)), arrow((637, 44), (952, 44), (952, 116))]
    for i in range(FRAMES):
        parts += [rect(24 + 9 * i, 132 + 9 * i, 62, 44, "#374151", PAPER, 4)]
    parts += [text(68, 246, "video", 14, INK, 600), arrow((118, middle), (140, middle))]
    parts += box(146, "vision encoder", ["as in the stock", "model"])
    parts += [arrow((278, middle), (298, middle))]
    parts += token_grids(304, False, lambda f, t: shades[(f, t)])
    parts += [text(355, 246, "M visual tokens", 14, INK, 600), arrow((411, middle), (431, middle))]
    parts += box(437, "selector", ["scores each,", "says how many,", "keeps the top n"], ORANGE)
    parts += [arrow((569, middle), (589, middle))]
    parts += token_grids(595, True, None)
    parts += [text(646, 246, "n tokens, in order", 14, INK, 600), arrow((702, middle), (722, middle))]
    parts += box(728, "re-encoder", ["the kept look at", "each other, each at", "its time and place"], ORANGE)
    parts += [arrow((860, middle), (880, middle))]
    parts += box(886, "language model", ["as in the stock", "model, on a", "short prompt"])
    parts += [arrow((1018, middle), (1038, middle)), text(1070, middle + 6, "“red”", 17, INK, 600)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" text-anchor="middle">',
            "<title>Video, vision encoder, selector with the question, re-encoder, language model, answer</title>",
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>',
            '<g stroke-width="1.5">',
            *parts,
            "</g></svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("way_of_a_video.svg").write_text(draw(), encoding="utf-8")
