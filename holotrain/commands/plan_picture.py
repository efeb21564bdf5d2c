"""A plan as an SVG picture: one stacked bar per backward, up to the bound of its memory, and the memory budget as a line."""

from html import escape

from holotrain.planning import Plan
from holotrain.sizes import in_words

COLOURS = {
    "parameters": "#3b7dd8",
    "buffers": "#7a8794",
    "gradients": "#0fa3b1",
    "optimizer": "#8a63d2",
    "average": "#d45fa6",
    "hologram": "#b5852a",
    "batch": "#8fa81f",
    "activations": "#e07b22",
    "temporary": "#d1495b",
    "scratch": "#d9dde2",
}
LEFT, WIDTH, ROW, BAR, TOP = 130, 640, 44, 26, 20


def picture(plan: Plan) -> str:
    """The text of an SVG file."""
    rows = plan.footprints
    parts = {name: footprint.parts | {"scratch": footprint.scratch} for name, footprint in rows.items()}
    most = max([footprint.bound for footprint in rows.values()] + [plan.budget or 0])
    scale = WIDTH / most
    bottom = TOP + ROW * len(rows)
    pieces = []
    for place, (name, footprint) in enumerate(rows.items()):
        y, x = TOP + ROW * place, float(LEFT)
        weight = "bold" if name == plan.backward else "normal"
        pieces.append(_text(LEFT - 10, y + BAR / 2 + 4, name, anchor="end", weight=weight))
        for kind, size in parts[name].items():
            pieces.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{BAR}" fill="{COLOURS[kind]}">'
                f"<title>{escape(kind)}: {in_words(size)}</title></rect>"
            )
            x += size * scale
        pieces.append(_text(x + 6, y + BAR / 2 + 4, in_words(footprint.bound, up=True)))
    if plan.budget:
        x = LEFT + plan.budget * scale
        pieces.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#555" stroke-dasharray="4 3"/>')
        pieces.append(_text(x, bottom + 14, f"memory: {in_words(plan.budget)}", anchor="middle"))
    used = [kind for kind in COLOURS if any(sizes[kind] * scale >= 0.5 for sizes in parts.values())]
    for place, kind in enumerate(used):
        x = LEFT + 110 * (place % 6)
        y = bottom + 34 + 20 * (place // 6)
        pieces.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>' + _text(x + 17, y, kind))
    height = bottom + 44 + 20 * ((len(used) - 1) // 6)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 110}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(pieces)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
